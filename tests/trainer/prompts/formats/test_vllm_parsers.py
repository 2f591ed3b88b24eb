"""Our parsers of tool calls beside vLLM's, on 500 replies per format. Every difference has a name and a check.

Well-formed replies are read alike, except for marks inside arguments, which end a call in vLLM's parsers. Of a broken
reply, ours keeps every whole call and all text; vLLM's parsers guess, or give up on the whole reply.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from starpod.trainer.prompts.formats.base import CallFormat, ReplyParser
from starpod.trainer.prompts.formats.table import FORMATS
from tests.trainer.prompts.formats.replies import TOOLS, Sample, reply
from tests.trainer.prompts.formats.test_formats import joined

pytestmark = pytest.mark.vllm

VLLM_NAMES = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm47",
    "kimi_k2": "kimi_k2",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "llama3_json": "llama3_json",
    "llama3_pythonic": "pythonic",
    "mistral": "mistral",
}
KNOWN = {tool["function"]["name"] for tool in TOOLS}


class Raw(str):
    """Arguments that are no JSON object, which vLLM passes on."""

    __slots__ = ()


class Read(NamedTuple):
    calls: list[tuple[str, Any]]
    text: str


SURROGATES = re.compile("[\ud800-\udfff]")


def decoded(arguments: str) -> Any:
    try:
        value = json.loads(arguments, strict=False)
    except ValueError:
        return Raw(arguments)
    return value if isinstance(value, dict) else Raw(arguments)


class Vocabulary:
    """A tokenizer with nothing but the marks of a format."""

    chat_template = None

    def __init__(self, marks: list[str]) -> None:
        self.ids = {mark: index for index, mark in enumerate(marks)}

    def get_vocab(self) -> dict[str, int]:
        return self.ids


def vllm_reader(form: CallFormat) -> Callable[[str], Read]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    logging.disable(logging.CRITICAL)  # it logs every broken reply with a traceback
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "go"}], tools=TOOLS)
    if form.name == "harmony":
        return harmony_reader(request)
    kind: Any = ToolParserManager.get_tool_parser(VLLM_NAMES[form.name])
    tokenizer = Vocabulary([*filter(None, form.all_marks), "<|python_tag|>"])

    def read(text: str) -> Read:
        found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [(call.function.name, decoded(call.function.arguments)) for call in found.tool_calls]
        return Read(calls, (found.content or "").strip())

    return read


def harmony_reader(request: Any) -> Callable[[str], Read]:
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.harmony import HarmonyParser
    from vllm.tool_parsers.gptoss_tool_parser import GptOssToolParser

    encoding = get_encoding()

    class Tokenizer(Vocabulary):
        def decode(self, ids: list[int]) -> str:
            return str(encoding.decode(ids))

    class Parser(HarmonyParser):  # type: ignore[misc]
        tool_parser_cls = GptOssToolParser

    def read(text: str) -> Read:
        ids = encoding.encode(text, allowed_special="all")
        _, content, calls = Parser(Tokenizer([]), request.tools).parse(text, request, model_output_token_ids=ids)
        return Read([(call.name, decoded(call.arguments)) for call in calls or ()], (content or "").strip())

    return read


def explain(form: CallFormat, sample: Sample, text: str, ours: Read, vllm: Read) -> str:
    """Return the name of a difference whose check holds; empty if there is none.

    Args:
        form: The format.
        sample: The reply.
        text: The part of the reply that vLLM's parser got.
        ours: What our parser reads.
        vllm: What vLLM's parser reads.
    """
    if sample.original is None:
        shown = json.dumps(sample.calls, ensure_ascii=False)
        # Our parsers also end a text between tags too early if it contains two marks in a valid order.
        right = ours.calls == sample.calls or not form.typed
        if right and any(mark and mark in shown for mark in form.all_marks):
            return "a mark inside an argument ends vLLM's call"
        return "vLLM reads one list of calls" if right and "pythonic" in form.name and sample.kind == "between" else ""
    known = [call for call in ours.calls if call[0] in KNOWN]
    only_whole_calls = all(call in (sample.original.calls or []) for call in known)
    if ours.calls == vllm.calls:
        if len(vllm.text) <= len(ours.text):
            return "vLLM drops text beside calls and half marks"
        return "a cut call is no text" * sample.original.text.startswith(sample.text)
    if json.dumps(ours.calls, ensure_ascii=False) == SURROGATES.sub(
        "\ufffd", json.dumps(vllm.calls, ensure_ascii=False)
    ):
        return "vLLM passes on half a pair of surrogates, which no message can hold"
    if not only_whole_calls:  # a mark between tags is missing, or a value is another one
        return "vLLM guesses missing tags" * (not form.typed)
    if known != ours.calls or any(name not in KNOWN for name, _ in vllm.calls):
        return "a tool's name or the mark after it is broken"
    if not vllm.calls:
        return "vLLM takes all for text where one call is malformed" * (vllm.text in text)
    if any(isinstance(values, Raw) for _, values in vllm.calls):
        return "vLLM passes on arguments that are no object"
    if len(vllm.calls) > len(ours.calls):
        return "vLLM completes a call without its end"
    return "vLLM skips a call with a broken mark, or gives its name to the next one"


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_calls_are_read_as_vllm_reads_them(form: CallFormat, capsys: pytest.CaptureFixture[str]) -> None:
    read = vllm_reader(form)
    reasons: Counter[str] = Counter()
    for seed in range(500):
        sample = reply(form, seed)
        text = sample.text
        parts = form.parse(text, TOOLS)
        if parts.thought is not None and form.name != "harmony":
            text = text.partition(form.thought[1])[2]  # vLLM's parsers of calls get the text after the thought
        ours = Read([(call.name, call.values) for call in parts.calls], parts.text.strip())
        vllm = read(text)
        reason = "equal" if ours == vllm else explain(form, sample, text, ours, vllm)
        assert reason, (seed, sample, ours, vllm)
        reasons[reason] += 1
        parser = ReplyParser(form, TOOLS)
        pieces = [part for character in sample.text for part in parser.feed(character)] + parser.finish()
        whole = ReplyParser(form, TOOLS)
        assert joined(pieces) == joined([*whole.feed(sample.text), *whole.finish()])
    with capsys.disabled():
        print(f"\n{form.name}: " + ", ".join(f"{reason} x{count}" for reason, count in reasons.most_common()))
    assert reasons["equal"] >= 400
