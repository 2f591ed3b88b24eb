"""Formats in which a call is a head with the tool's name and a JSON object with the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starpod.trainer.prompts.formats.base import CallFormat, Calls, ReplyCall, Schemas, call_of, decode
from starpod.trainer.prompts.formats.source import Source


@dataclass(frozen=True, kw_only=True)
class HeadedCalls(CallFormat):
    """Calls of the form `begin`, `before_name`, name, `middle`, arguments, `after`, `close`."""

    name: str
    signs: tuple[str, ...]
    begin: str
    before_name: str = ""
    numbered: bool = False
    """Whether the name is followed by `:` and the number of the call in the reply."""
    middle: str
    after: str = ""
    close: str = ""
    section: tuple[str, ...] = ("", "")
    """Marks around all calls."""
    between: str = ""
    """Text between two calls."""
    xgrammar: str = ""

    @property
    def opens(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(mark for mark in (self.begin, *self.section) if mark)

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(
            mark for mark in (self.before_name.removeprefix("function"), self.middle) if mark[:1] in ("<", "[")
        )

    @property
    def example(self) -> str:  # type: ignore[override]
        return f"{self.begin_call('<function-name>')}<args-json-object>{self.after}{self.close}{self.section[1]}"

    def read_calls(self, source: Source, mark: str, schemas: Schemas) -> Calls:
        if mark in self.section:
            return ()
        head, middle = yield from source.before(
            self.middle, *self.opens, *((self.close,) if self.close else (" ", "\n", "{"))
        )
        if middle != self.middle or not (yield from source.accept("{")):
            return None
        name = head.strip().removeprefix(self.before_name).partition("[CALL_ID]")[0]
        call = call_of(name.rpartition(":")[0] if self.numbered else name, decode((yield from source.brackets())))
        for mark in (self.after.strip(), self.close):
            if mark and not (yield from source.closes(mark)):
                return None
        return [call] if call else None

    def write_calls(self, calls: Sequence[ReplyCall]) -> str:
        texts = [f"{self._head(call.name, n)}{call.json}{self.after}{self.close}" for n, call in enumerate(calls)]
        return f"{self.section[0]}{self.between.join(texts)}{self.section[1]}"

    def begin_call(self, name: str) -> str:
        return self.section[0] + (self._head(name, 0).rstrip() if name else f"{self.begin}{self.before_name}")

    def _head(self, name: str, number: int) -> str:
        return f"{self.begin}{self.before_name}{name}{f':{number}' * self.numbered}{self.middle}"


class Mistral(HeadedCalls):
    """Mistral, Magistral. Older versions write a list of objects instead."""

    thought = ("[THINK]", "[/THINK]")

    def read_calls(self, source: Source, mark: str, schemas: Schemas) -> Calls:
        if not (yield from source.accept("[")):
            return (yield from super().read_calls(source, mark, schemas))
        values = decode((yield from source.brackets()))
        if not isinstance(values, list):
            return None
        items = [value if isinstance(value, dict) else {} for value in values]
        calls = [call_of(item.get("name"), item.get("arguments", {})) for item in items]
        return [call for call in calls if call] if all(calls) else None


KIMI_K2 = HeadedCalls(
    name="kimi_k2",
    signs=("<|tool_calls_section_begin|>",),
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin="<|tool_call_begin|>",
    before_name="functions.",
    numbered=True,
    middle="<|tool_call_argument_begin|>",
    close="<|tool_call_end|>",
    xgrammar="kimi",
)


def _deepseek(name: str) -> str:
    """Return a special token of DeepSeek, which has wide bars and low lines."""
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


DEEPSEEK_V3 = HeadedCalls(
    name="deepseek_v3",
    signs=(_deepseek("tool sep"), "```json"),
    section=(_deepseek("tool calls begin"), _deepseek("tool calls end")),
    begin=_deepseek("tool call begin"),
    before_name=f"function{_deepseek('tool sep')}",
    middle="\n```json\n",
    after="\n```",
    close=_deepseek("tool call end"),
    between="\n",
    xgrammar="deepseek_r1",
)
DEEPSEEK_V31 = HeadedCalls(
    name="deepseek_v31",
    signs=(_deepseek("tool sep"),),
    section=(_deepseek("tool calls begin"), _deepseek("tool calls end")),
    begin=_deepseek("tool call begin"),
    middle=_deepseek("tool sep"),
    close=_deepseek("tool call end"),
    xgrammar="deepseek_v3_1",
)
MISTRAL = Mistral(name="mistral", signs=("[TOOL_CALLS]",), begin="[TOOL_CALLS]", middle="[ARGS]")
