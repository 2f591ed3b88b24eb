"""Formats in which a call is an object with name and arguments, written as JSON or as a call in Python."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Sequence
from typing import Any

from starpod.trainer.prompts.formats.base import CallFormat, Calls, ReplyCall, Schemas, call_of, decode
from starpod.trainer.prompts.formats.source import Source


class Hermes(CallFormat):
    """Hermes, Qwen 2.5 and Qwen 3, SmolLM 3: an object with `name` and `arguments` between tags."""

    name = "hermes"
    signs: tuple[str, ...] = ("<tool_call>",)
    example = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    opens: tuple[str, ...] = ("<tool_call>",)
    close = "</tool_call>"
    key = "arguments"
    xgrammar = "qwen_3"

    def read_calls(self, source: Source, mark: str, schemas: Schemas) -> Calls:
        if not (yield from source.accept("{")):
            return None
        call = self._call_in(decode((yield from source.brackets())), name_suffices=True)
        return [call] if call and (yield from source.closes(self.close)) else None

    def _call_in(self, value: Any, *, name_suffices: bool) -> ReplyCall | None:
        if not isinstance(value, dict):
            return None
        default: object = {} if name_suffices and len(value) == 1 else None
        return call_of(value.get("name"), value.get("arguments", value.get("parameters", default)))

    def write_calls(self, calls: Sequence[ReplyCall]) -> str:
        return "\n".join(f"{self.begin_call(call.name)} {call.json}}}\n{self.close}" for call in calls)

    def begin_call(self, name: str) -> str:
        return f"{self.opens[0]}\n{self._begin_object(name)}"

    def _begin_object(self, name: str) -> str:
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.key}":' if name else '{"name": "'


class LlamaJson(Hermes):
    """Llama 3.1 to 3.3: an object with `name` and `parameters`, without marks. Several are separated by `;`."""

    name = "llama3_json"
    signs = ('"parameters"', "<|start_header_id|>")
    example = '{"name": <function-name>, "parameters": <args-json-object>}'
    opens = ("<|python_tag|>",)
    bare, bare_sign = "{", '"name"'
    close = ""
    key = "parameters"
    stops = ("<|eom_id|>",)
    xgrammar = "llama"

    def read_calls(self, source: Source, mark: str, schemas: Schemas) -> Calls:
        if not (yield from source.accept("{")):
            return None
        # An answer in JSON may have a name, but it has no parameters.
        call = self._call_in(decode((yield from source.brackets())), name_suffices=False)
        if call is None:
            return None
        yield from source.closes(";")
        return [call]

    def write_calls(self, calls: Sequence[ReplyCall]) -> str:
        return "; ".join(f"{self.begin_call(call.name)} {call.json}}}" for call in calls)

    def begin_call(self, name: str) -> str:
        return self._begin_object(name)


class LlamaPythonic(CallFormat):
    """Llama 4 and ToolACE: a list of Python calls with literal keyword arguments, without marks."""

    name = "llama3_pythonic"
    signs = ("[func_name1(",)
    example = "[<function-name>(<argument>=<value>)]"
    opens = ("<|python_tag|>",)
    bare, bare_sign = "[", "("
    close = ")]"

    def read_calls(self, source: Source, mark: str, schemas: Schemas) -> Calls:
        if not (yield from source.accept("[")):
            return None
        text = yield from source.brackets("\"'")
        try:
            with warnings.catch_warnings(action="ignore"):  # of invalid escapes in strings
                node = _JsonNames().visit(ast.parse(text, mode="eval").body)
            items = [
                (ast.unparse(call.func), {word.arg: ast.literal_eval(word.value) for word in call.keywords})
                for call in node.elts
            ]
        except (AttributeError, ValueError, SyntaxError, MemoryError, RecursionError):  # not a list of such calls
            return None
        calls = [call_of(*item) for item in items if not any(call.args for call in node.elts)]
        return [call for call in calls if call] if calls and all(calls) else None

    def write_calls(self, calls: Sequence[ReplyCall]) -> str:
        texts = [(call.name, ", ".join(f"{key}={value!r}" for key, value in call.values.items())) for call in calls]
        return f"[{', '.join(f'{name}({arguments})' for name, arguments in texts)}]"

    def begin_call(self, name: str) -> str:
        return f"[{name}(" if name else "["


class _JsonNames(ast.NodeTransformer):
    """Replaces the names that JSON uses for true, false and null."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(json.loads(node.id)) if node.id in ("true", "false", "null") else node
