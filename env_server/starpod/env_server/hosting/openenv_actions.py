"""Actions of an OpenEnv environment: its own action model, calls to its MCP tools, or both."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from openenv.core.env_server.types import Action as OpenAction
from pydantic import TypeAdapter, ValidationError

from starpod.env_server.authoring.environment import Tool
from starpod.env_server.hosting.request import HostingRequest, import_named
from starpod.v1.untrusted import read_untrusted_json
from starpod.v1.values import JSON, Action, ToolCall


@dataclass(frozen=True, slots=True)
class Actions:
    """Converter from Starpod's actions to the environment's actions."""

    model: TypeAdapter[Any] | None
    """Type that the environment's `step` takes; None if it takes only tool calls."""
    typed: str
    """Name of the type in `model`."""
    only_field: str
    """Name of the model's only required field, which plain text fills; empty if it has none or several."""
    tools: Mapping[str, Tool]
    """Tools by name. The model is one of them, so that programs find its schema."""

    @classmethod
    def of(
        cls, request: HostingRequest, env_class: type[Any], listed: Sequence[tuple[str, str, Mapping[str, Any]]]
    ) -> Actions:
        """Return the actions of a class. Raises HostingError.

        Args:
            listed: the result of `list_tools`: name, description and schema per tool.
        """
        tools: dict[str, Tool] = {}
        type_name = only_field = ""
        model = _action_type(request, env_class)
        if model is not None:
            schema = model.json_schema()
            schema.get("properties", {}).pop("metadata", None)
            type_name = schema.get("title", "Action")
            tools[type_name] = Tool(type_name, schema.get("description", ""), schema)
            required = schema.get("required", [])
            only_field = required[0] if len(required) == 1 else ""
        tools |= {name: Tool(name, description, schema) for name, description, schema in listed}
        if not tools:
            raise request.fail("it lists no tools")
        return cls(model, type_name, only_field, tools)

    @property
    def grammar(self) -> str:
        """The grammar of an action, for people and prompts."""
        forms = []
        if self.model is not None:
            schema = self.tools[self.typed].parameters
            forms.append(f"a JSON object of the schema {json.dumps(schema, ensure_ascii=False)}")
        if self.only_field:
            forms.append(f"plain text, which stands for {self.only_field}")
        calls = [tool for tool in self.tools.values() if tool.name != self.typed]
        if calls:
            forms.append('a JSON object {"tool_name": ..., "arguments": {...}} that calls one of these tools')
        tool_lines = [
            f"{tool.name}: {tool.description.strip()} Arguments: {json.dumps(tool.parameters, ensure_ascii=False)}"
            for tool in calls
        ]
        return "\n".join([", or ".join(forms), *tool_lines])

    def read(self, action: Action) -> Any:
        """Return the environment's own action. Raises ValueError."""
        match action:
            case ToolCall() if action.name == self.typed:
                return self._validate(dict(action.arguments))
            case ToolCall():
                return self._call(action.name, dict(action.arguments))
            case JSON():
                return self._object(action.value)
            case str():
                try:
                    return self._object(read_untrusted_json(action))
                except ValueError:
                    if not self.only_field:
                        raise ValueError("not an action") from None
                    return self._validate({self.only_field: action})
        raise ValueError("an action is text, JSON or a call of a tool")

    def _object(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("not an object")
        if isinstance(value.get("tool_name"), str):
            return self._call(value["tool_name"], value.get("arguments", {}))
        return self._validate(value)

    def _validate(self, value: Any) -> Any:
        if self.model is None:
            raise ValueError("it takes calls of tools only")
        try:
            return self.model.validate_python(value)
        except ValidationError as error:
            raise ValueError(str(error)) from error

    def _call(self, name: str, arguments: Any) -> Any:
        if name not in self.tools or name == self.typed or not isinstance(arguments, dict):
            raise ValueError(f"there is no tool {name!r}")
        from openenv.core.env_server.mcp_types import CallToolAction

        return CallToolAction(tool_name=name, arguments=arguments)


def list_tools(environment: Any) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return the MCP tools of a live environment as (name, description, schema of the arguments)."""
    if not _is_mcp(type(environment)):
        return []
    from openenv.core.env_server.mcp_types import ListToolsAction

    return [(tool.name, tool.description, tool.input_schema) for tool in environment.step(ListToolsAction()).tools]


def _action_type(request: HostingRequest, env_class: type[Any]) -> TypeAdapter[Any] | None:
    """Return the type that `step` takes, from the setting `action`, the annotation, or the base class's parameters."""
    if "action" in request.settings:
        source, _, name = request.settings["action"].partition(":")
        action_type = getattr(import_named(request, source), name, None)
    else:
        action_type = _annotation(env_class)
    if action_type in (None, Any, OpenAction):
        if _is_mcp(env_class):
            return None
        raise request.fail("its step declares no type of action; name the class: #action=MODULE:CLASS")
    try:
        return TypeAdapter(action_type)
    except Exception as error:
        raise request.fail(f"its actions of type {action_type} have no schema: {error}") from error


def _annotation(env_class: type[Any]) -> Any:
    try:
        annotation = get_type_hints(env_class.step).get("action")
    except Exception:  # ignore an annotation that cannot be resolved
        annotation = None
    if annotation in (None, Any, OpenAction) or not (isinstance(annotation, type) or get_args(annotation)):
        bases = [get_args(base) for cls in env_class.__mro__ for base in getattr(cls, "__orig_bases__", ())]
        annotation = next((args[0] for args in bases if len(args) == 3 and isinstance(args[0], type)), annotation)
    return annotation


def _is_mcp(env_class: type[Any]) -> bool:
    """Return whether a class takes tool calls. Compare names of bases, because importing the base takes seconds."""
    return any(cls.__name__ == "MCPEnvironment" for cls in env_class.__mro__)
