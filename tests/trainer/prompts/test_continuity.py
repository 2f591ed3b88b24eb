"""The part of the past that a chat template changes is named, and shown by an example."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.prompts.continuity import Rewrite, compare_past
from starpod.trainer.prompts.template import Template
from tests.trainer.chat_templates import tokenizer

THOUGHTS = "the thoughts of earlier replies"


@pytest.mark.parametrize("name", ["Qwen2.5", "Llama-3", "Gemma", "SmolLM2", "tools_last"])
def test_published_templates_that_keep_the_past(name: str) -> None:
    assert Template(tokenizer(name)).rewrite is None


def test_the_moved_part_is_named_and_shown() -> None:
    rewrites = {name: Template(tokenizer(name)).rewrite for name in ("Qwen3", "gpt-oss", "wandering")}
    assert rewrites["Qwen3"] == Rewrite(
        THOUGHTS,
        "assistant\n<think>starpod-thought</think><answer>starpod-action",
        "assistant\n<answer>starpod-action",
    )
    assert rewrites["gpt-oss"] == Rewrite(
        "the text around messages",
        ">assistant<think>starpod-thought",
        ">assistant<|channel|>final<|message|><think>starpod-thought",
    )
    assert rewrites["wandering"] == Rewrite(
        "the system message", "[INST]starpod-system\n\nstarpod-question-0[/", "[INST]starpod-question-0[/"
    )
    assert str(rewrites["wandering"]).startswith("changes the system message as a conversation grows: '[INST]starpod-s")
    assert Template(tokenizer("Qwen3"), prefill="<answer>").rewrite is None, "it drops thoughts alone"


TEXTS = st.lists(st.sampled_from(["a", "b", " ", "<", "starpod-system", "\n"]), max_size=40).map("".join)


@given(TEXTS, TEXTS, TEXTS)
def test_the_example_is_from_both_texts_and_holds_their_difference(start: str, old: str, new: str) -> None:
    rewrite = compare_past(start + old, start + new)
    if old == new:
        assert rewrite is None
        return
    assert rewrite is not None and rewrite.before != rewrite.after
    for example, text in ((rewrite.before, start + old), (rewrite.after, start + new)):
        assert all(part in text for part in example.split("..."))
