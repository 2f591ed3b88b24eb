"""Formats in which every argument of a call stands between tags: texts as they are, other values as JSON.

Only the schema of an argument tells whether `12` is a text. It is a number if the tool is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starpod.trainer.prompts.formats.base import CallFormat, Calls, ReplyCall, Schemas, call_of, decode
from starpod.trainer.prompts.formats.source import Source


class Qwen3Coder(CallFormat):
    """Qwen3-Coder, Qwen 3.5 and later: `<function=name>` and `<parameter=name>`."""

    name = "qwen3_coder"
    signs = ("<function=", "<parameter=")
    opens: tuple[str, ...] = ("<tool_call>", "<function=")
    close = "</tool_call>"
    marks: tuple[str, ...] = ("</function>", "<parameter=", "</parameter>")
    typed = False
    argument = "<parameter={}>\n{}\n</parameter>\n"
    xgrammar = "qwen_3_coder"
    end = "</function>\n</tool_call>"
    """Text after the last argument."""

    @property
    def example(self) -> str:  # type: ignore[override]
        argument = self.argument.format("<argument-name>", "<value>")
        return f"{self.begin_call('<function-name>')}\n{argument}<further-arguments>\n{self.end}"

    def read_calls(self, source: Source, mark: str, schemas: Schemas) -> Calls:
        if mark == self.opens[0] and not (yield from source.accept(self.opens[1])):
            return None
        name, ending = yield from source.before(">", "\n")
        arguments: dict[str, Any] = {}
        while ending == ">" and (yield from source.accept("<parameter=")):
            key, ending = yield from source.before(">", "\n")
            value = yield from source.value("</parameter>", "<parameter=", "</function>")
            arguments[key] = _typed_argument(value.removeprefix("\n").removesuffix("\n"), schemas.get(name), key)
        if ending != ">" or not (yield from source.accept("</function>")):
            return None
        if mark == self.opens[0] and not (yield from source.closes(self.close)):
            return None
        call = call_of(name, arguments)
        return [call] if call else None

    def write_calls(self, calls: Sequence[ReplyCall]) -> str:
        return "\n".join(f"{self.begin_call(call.name)}\n{self._write_arguments(call)}{self.end}" for call in calls)

    def _write_arguments(self, call: ReplyCall) -> str:
        values = call.values
        texts = (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values.values()
        )
        return "".join(self.argument.format(name, text) for name, text in zip(values, texts, strict=True))

    def begin_call(self, name: str) -> str:
        return f"<tool_call>\n<function={f'{name}>' if name else ''}"


class Glm(Qwen3Coder):
    """GLM 4.5 and later: `<arg_key>` and `<arg_value>` after the name."""

    name = "glm"
    signs = ("<arg_key>", "<arg_value>")
    opens = ("<tool_call>",)
    marks = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    argument = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    end = "</tool_call>"
    stops = ("<|observation|>",)
    xgrammar = "glm_4_7"

    def read_calls(self, source: Source, mark: str, schemas: Schemas) -> Calls:
        yield from source.blanks()
        name, tag = yield from source.before("<arg_key>", self.close, "\n", " ")
        name = name.strip()
        arguments: dict[str, Any] = {}
        while (tag := tag.strip() or (yield from source.accept("<arg_key>", self.close))) == "<arg_key>":
            key, _ = yield from source.before("</arg_key>")
            if not (yield from source.accept("<arg_value>")):
                return None
            value = yield from source.value("</arg_value>", "<arg_key>", self.close)
            arguments[key.strip()] = _typed_argument(value, schemas.get(name), key.strip())
            tag = ""
        call = call_of(name, arguments)
        return [call] if call and tag else None

    def begin_call(self, name: str) -> str:
        return f"<tool_call>{name}"


_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
"""Values as those chat templates write them that leave it to Python."""
_TYPE_NAMES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


def _typed_argument(text: str, properties: Mapping[str, Any] | None, name: str) -> Any:
    return guess_type(text) if properties is None else as_typed(text, properties.get(name))


def guess_type(text: str) -> Any:
    """Return the value that a text stands for if there is no schema."""
    return as_typed(text, {"type": [*_TYPE_NAMES.values(), "null"]})


def as_typed(text: str, schema: object) -> Any:
    """Return the value that a text stands for if the schema allows its type; otherwise the text."""
    types = _types_of(schema)
    json_text = _PYTHON_NAMES.get(text.strip(), text)
    value = decode(json_text) if types - {"string"} else text
    if value is None:
        return None if "null" in types and json_text.strip() == "null" else text
    kinds = {_TYPE_NAMES[type(value)], *(["number"] if type(value) is int else [])}
    return value if kinds & types else text


def _types_of(schema: object) -> set[object]:
    """Return the names of the JSON types that a schema allows."""
    types: set[object] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            lists = [[one[key]] if isinstance(one.get(key), str) else one.get(key) for key in ("type", "enum")]
            names, values = (value if isinstance(value, list) else [] for value in lists)
            types |= {name for name in names if isinstance(name, str)}
            types |= {_TYPE_NAMES.get(type(value), "null") for value in values}
            for key in ("anyOf", "oneOf", "allOf"):
                waiting += choices if isinstance(choices := one.get(key), list) else []
    return types
