"""Actions as tool calls: every action survives every format, and a limit and unknown actions count as with tags."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from starpod.trainer.prompts.calls import CallGrammar
from starpod.trainer.prompts.formats.table import FORMATS
from starpod.trainer.prompts.prompt import PromptConfig

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.sampled_from(["", "a", "12", "true", '"', "<b>"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
CALLS = st.builds(
    lambda name, values: f"{name} {json.dumps(values, ensure_ascii=False)}",
    st.sampled_from(["move", "write_file"]),
    st.dictionaries(st.sampled_from(["to", "text"]), VALUES, max_size=2),
)
PROGRAM = 'def f(a):\n    return {"a": a}["a"] or """</think>"""\n'
ACTIONS = CALLS | st.sampled_from(["Up", "2", "search[a || b]", "finish", PROGRAM])


@given(st.sampled_from(list(FORMATS)), st.booleans(), st.lists(ACTIONS, min_size=1, max_size=3))
def test_every_action_survives(form: str, thinking: bool, actions: list[str]) -> None:
    grammar = PromptConfig(grammar=form, thinking=thinking).make_grammar()
    text = grammar.compose("why", actions)
    parsed = grammar.parse(text)
    assert parsed.actions == tuple(actions) and parsed.well_formed
    assert parsed.thought == ("why" if thinking else None)
    assert text.startswith(grammar.opening)
    blocks = grammar.cut(text)
    assert [name for name, _ in blocks] == ["think"] * thinking + ["answer"] and blocks[-1][1] == len(text)


@pytest.mark.parametrize("form", FORMATS)
def test_limits_and_unknown_actions(form: str) -> None:
    grammar = CallGrammar(FORMATS[form], True, ["Up", "Down"])
    text = grammar.compose("", ["up", "Left", "Down"])
    assert grammar.parse(text).unknown == ("Left",) and not grammar.parse(text).well_formed
    assert grammar.parse(text, 1).actions == ("Up",) and grammar.parse(text, 1).well_formed
    without = CallGrammar(FORMATS[form], False).compose(None, ["Up"])
    assert grammar.parse(without).actions == ("Up",) and not grammar.parse(without).well_formed
    assert grammar.cut("no call") == [("", 7)] and grammar.parse("no call").actions == ()
    assert FORMATS[form].example in grammar.describe(2)


def test_a_format_is_suggested_and_has_no_further_blocks() -> None:
    with pytest.raises(ValidationError, match="did you mean qwen3_coder"):
        PromptConfig(grammar="qwen3coder")
    with pytest.raises(ValidationError, match=r"drop prompt\.blocks"):
        PromptConfig(grammar="glm", blocks=("subgoal",))
