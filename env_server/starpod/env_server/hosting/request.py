"""Requests to host an environment: its name, constructor arguments, settings, and callers' options."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

from starpod.env_server.authoring.environment import EnvironmentOptions
from starpod.env_server.registry import RegistryError
from starpod.v1.spelling import near

Default = TypeVar("Default", bound=float | None)
SHARED_SETTINGS = ("id", "concurrency", "options", "deterministic", "success_at")

_FORM = re.compile(r"(?P<name>[^?#]+)(\?(?P<arguments>[^#]*))?(#(?P<settings>.*))?", re.DOTALL)


class HostingError(RegistryError):
    """An environment that cannot be hosted as requested. The message says why, and how to fix it, in one line."""


@dataclass(frozen=True, slots=True)
class HostingRequest:
    """A request to host an environment, `NAME?argument=value&...#setting=value&...`."""

    text: str
    """The whole request as text, which other processes parse again."""
    name: str
    """Name of the environment in its package."""
    arguments: Mapping[str, Any]
    """Arguments of the constructor: parsed if they are valid JSON, else text."""
    settings: Mapping[str, str]
    """Settings of the hosting, such as `id` and `concurrency`."""

    @classmethod
    def parse(cls, text: str, settings: Collection[str]) -> HostingRequest:
        """Parse a request. Raises HostingError if it is malformed or has an unknown setting."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise HostingError(f"{text!r} is not of the form NAME?argument=value&...#setting=value&...")
        names = (*SHARED_SETTINGS, *settings)
        values = _pairs(text, match["settings"])
        for setting in values:
            if setting not in names:
                raise HostingError(f"{text!r}: there is no setting {setting!r} after the #{nearest(setting, names)}")
        arguments = {name: _value(value) for name, value in _pairs(text, match["arguments"]).items()}
        return cls(text, match["name"].strip(), arguments, values)

    def fail(self, problem: object) -> HostingError:
        return HostingError(f"{self.name} cannot be hosted: {problem}")

    def choice(self, setting: str, *values: str) -> str:
        """Return a setting's value, by default the first of `values`. Raises HostingError for other values."""
        value = self.settings.get(setting, values[0])
        if value not in values:
            raise self.fail(f"{setting} is {value!r}; use one of {', '.join(dict.fromkeys(values))}")
        return value

    def number(
        self,
        setting: str,
        default: Default = None,  # type: ignore[assignment]
        least: float = -math.inf,
    ) -> float | Default:
        """Return a setting's value, or the default. Raises HostingError if it is no finite number from `least` on."""
        if setting not in self.settings:
            return default
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(self.settings[setting])) and value >= least:
                return value
        bound = f" from {least:g} on" if math.isfinite(least) else ""
        raise self.fail(f"{setting} is {self.settings[setting]!r}, not a number{bound}")


def _pairs(text: str, part: str | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for pair in filter(None, (part or "").split("&")):
        name, equals_sign, value = map(unquote, pair.partition("="))
        if not equals_sign or name in pairs:
            raise HostingError(
                f"{text!r}: {pair!r} " + ("is given twice" if equals_sign else "is not of the form name=value")
            )
        pairs[name] = value
    return pairs


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def nearest(name: str, known: Collection[str]) -> str:
    """Return the end of an error message about an unknown name: similar names, or all of them."""
    if names := near(name, known):
        return f"; did you mean {' or '.join(names)}?"
    return f"; there are {', '.join(sorted(known)[:12])}" + (", ..." if len(known) > 12 else "") if known else ""


def fitting(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that match a pattern, sorted. `*` matches any text."""
    expression = ".*".join(map(re.escape, pattern.split("*")))
    return [name for name in sorted(names) if re.fullmatch(expression, name)]


def constructor(target: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a class or function, with annotations resolved if possible."""
    try:
        return inspect.signature(target, eval_str=True)
    except Exception:
        return inspect.signature(target)


def import_named(request: HostingRequest, module: str) -> ModuleType:
    """Import a module that the operator named. Raises HostingError, with a hint what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise request.fail(
            f"there is no module {error.name}; perhaps pip install {package.replace('_', '-')}"
        ) from error
    except ImportError as error:
        raise request.fail(error) from error


def check_arguments(request: HostingRequest, signature: inspect.Signature, more: Collection[str] = ()) -> None:
    """Raise HostingError if the constructor does not take an argument, or its type is wrong.

    Args:
        request: the operator's request, with the arguments.
        signature: signature of the constructor. One with **kwargs takes everything.
        more: names of arguments that are valid besides the constructor's, and are not checked.
    """
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name, value in request.arguments.items():
        if name in more:
            continue
        if name not in parameters:
            raise request.fail(f"its constructor takes no {name!r}{nearest(name, parameters)}")
        annotation = parameters[name].annotation
        if annotation is inspect.Parameter.empty or isinstance(annotation, str):
            continue
        try:
            TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
        except PydanticSchemaGenerationError:
            continue
        except ValidationError as error:
            raise request.fail(f"{name}={value!r}: {error.errors(include_url=False)[0]['msg']}") from error


def options_model(
    request: HostingRequest, signature: inspect.Signature, defaults: Mapping[str, Any], hidden: Collection[str] = ()
) -> type[EnvironmentOptions]:
    """Return a model of the arguments that callers may choose: switches, numbers and closed choices, never text.

    Text could name a path or a module. The setting `options` restricts the model to the arguments that it names.

    Args:
        defaults: values that replace the constructor's defaults.
        hidden: arguments that callers may not choose.
    """
    fields: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        default = defaults.get(name, parameter.default)
        annotation = parameter.annotation
        if annotation is inspect.Parameter.empty or isinstance(annotation, str):
            annotation = type(default)
        if default is not None and type(None) in (members := get_args(annotation)) and len(members) == 2:
            # None for a number selects its default
            annotation = next(member for member in members if member is not type(None))
        is_closed = annotation in (bool, int, float) or get_origin(annotation) is Literal
        if is_closed and default is not parameter.empty and name not in hidden and not hasattr(BaseModel, name):
            fields[name] = annotation, Field(default=default, description=f"{name} of {request.name}'s constructor.")
    if "options" in request.settings:
        option_names = [name for name in request.settings["options"].split(",") if name]
        for name in option_names:
            if name not in fields:
                raise request.fail(f"{name!r} cannot be open to callers{nearest(name, fields)}")
        fields = {name: fields[name] for name in option_names}
    return create_model("Options", __base__=EnvironmentOptions, **fields)
