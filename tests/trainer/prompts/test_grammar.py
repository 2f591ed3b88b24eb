"""The response grammar: rules, robustness, and parity with the original's parser."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.client import answers
from starpod.trainer.prompts.grammar import MOST_ACTIONS, Grammar, Parsed
from tests.golden import Parity, golden

MOVES = ("Up", "Down", "Left", "Right")

# Where ours reads a reply otherwise than the original.
CHOSEN: dict[str, str] = {
    "reply-kept": "the original trains on a rewritten reply; here the sampled ids are kept and nothing is rewritten",
}


# --- rules ------------------------------------------------------------------------------------------------------------


KNOWN = Grammar(actions=MOVES)
ANSWER = Grammar(thinking=False, actions=MOVES)
UNREAD = Parsed(None, (), (), False)


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (KNOWN, "<think>go</think><answer>Up</answer>", Parsed("go", ("Up",), (), True)),
        (KNOWN, "<think> go\n</think>\n \u3000<answer> up || DOWN ||</answer>", Parsed("go", ("Up", "Down"), (), True)),
        (KNOWN, "noise <think>a</think><answer>Up</answer> noise", Parsed("a", ("Up",), (), True)),
        (
            KNOWN,
            "<think>a</think> so <answer>Left</answer></think><answer>Up</answer>",
            Parsed("a so Left", ("Up",), (), True),
        ),
        (KNOWN, "<think></think><answer></answer>", Parsed("", (), (), False)),
        (KNOWN, "<think>a</think><answer>Up<|im_end|></answer>", Parsed("a", ("Up",), (), True)),
        *((KNOWN, text, UNREAD) for text in ("", "Up", "<answer>Up</answer>", "<think>a</think><answer>Up")),
        (KNOWN, "<THINK>a</THINK>", UNREAD),
        # Without thinking, only the answer counts.
        (ANSWER, "so <answer>Up</answer>", Parsed(None, ("Up",), (), True)),
        # Unknown actions are kept and told, where there are known ones.
        (
            KNOWN,
            "<think>a</think><answer>Jump || up || Fly</answer>",
            Parsed("a", ("Jump", "Up", "Fly"), ("Jump", "Fly"), False),
        ),
        (Grammar(), "<think>a</think><answer>Jump</answer>", Parsed("a", ("Jump",), (), True)),
    ],
)
def test_reads(grammar: Grammar, text: str, expected: Parsed) -> None:
    assert grammar.parse(text) == expected


MAIL = 'send_mail {"to": "a", "body": "x || y </answer> {\\" || \n"}'


@pytest.mark.parametrize(
    ("answer", "actions"),
    [
        (MAIL, (MAIL,)),
        (f"{MAIL} || finish", (MAIL, "finish")),
        (f"finish || {MAIL}||{MAIL} ||", ("finish", MAIL, MAIL)),
        ('{"a": "||"} || {"b": {"c": ["||"]}}', ('{"a": "||"}', '{"b": {"c": ["||"]}}')),
        ('say {hi} {"a": "||"} || on', ('say {hi} {"a": "||"}', "on")),
        ('{"a": "||', ('{"a": "',)),
        ("{ || }", ("{", "}")),
    ],
)
def test_marks_inside_a_json_object_belong_to_the_action(answer: str, actions: tuple[str, ...]) -> None:
    parsed = Grammar().parse(f"<think>a</think><answer>{answer}</answer>")
    assert parsed == Parsed("a", actions, (), True)
    assert Grammar().parse(Grammar().compose("a", actions)).actions == actions


def test_an_answer_of_many_braces_is_read_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    class Decoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            tries.append(idx)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(answers, "_DECODER", Decoder(strict=False))
    text = f"<answer>{'{' * 50_000}||{'{ || ' * 50_000}</answer>"
    assert len(Grammar(thinking=False).parse(text).actions) == MOST_ACTIONS
    assert len(tries) <= 3 * answers._MOST_BROKEN, "one pass each to find the end, to clean and to split"


def test_the_limit_cuts_silently_and_is_described() -> None:
    assert ANSWER.parse("<answer>Up || Down || Jump</answer>", 2) == Parsed(None, ("Up", "Down"), (), True)
    assert len(ANSWER.parse(f"<answer>{'Up||' * 2000}</answer>").actions) == MOST_ACTIONS
    assert ANSWER.opening == "<answer>"
    one, five = Grammar().describe(1), Grammar().describe(5)
    assert "one action" in one and "||" not in one and "up to 5 actions, separated by ||" in five
    assert "<think>" in five and "<think>" not in Grammar(thinking=False).describe(5)


# --- any text -----------------------------------------------------------------------------------------------------

TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>", "||", "|", " ", "\n", "Up", "up"]
replies = st.lists(st.one_of(st.sampled_from(TAGS), st.text(max_size=4)), max_size=30).map("".join)


@given(replies, st.booleans(), st.one_of(st.none(), st.integers(1, 4)))
def test_any_text_is_read(text: str, thinking: bool, max_actions: int | None) -> None:
    grammar = Grammar(thinking=thinking, actions=MOVES)
    parsed = grammar.parse(text, max_actions)
    assert len(parsed.actions) <= (max_actions or MOST_ACTIONS)
    assert set(parsed.unknown) == set(parsed.actions) - set(MOVES)
    assert parsed.well_formed == (bool(parsed.actions) and not parsed.unknown)
    assert all(action == action.strip() != "" for action in parsed.actions)
    assert thinking or parsed.thought is None


words = st.text(st.characters(exclude_characters="<>|"), min_size=1).map(str.strip).filter(bool)


@given(words, st.lists(words, min_size=1, max_size=5), st.booleans())
def test_what_is_written_is_read(thought: str, actions: list[str], thinking: bool) -> None:
    grammar = Grammar(thinking=thinking)
    parsed = grammar.parse(grammar.compose(thought, actions))
    assert parsed == Parsed(thought if thinking else None, tuple(actions), (), True)


@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", "<think></think>", "</think> ", "<answer>", "</think>\n<answer>"]
)
def test_long_replies_take_no_longer_than_their_length(piece: str) -> None:
    """The grammar does not backtrack. A pattern with two open ends would need hours for such a reply."""
    text = "<think>" + piece * 200_000
    assert not Grammar().parse(text).well_formed


# --- parity with the original ----------------------------------------------------------------------------------------


def test_recorded_parser_cases(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(CHOSEN)
    for record in golden("parser_cases"):
        parity.episodes += 1
        for case in record["parse"]:
            grammar = Grammar(thinking=case["enable_think"])
            where = f"{record['id']} {case['enable_think']} {case['max_actions_per_turn']} {case['prefixed']}"
            if case["prefixed"]:
                assert case["input"] == grammar.opening + record["text"]
            compare(where, grammar, case["input"], case, parity)
        for turn in record["manager"]:
            names = MOVES if turn["env"] == "SimpleSokoban" else ()
            grammar = Grammar(thinking=turn["enable_think"], actions=names)
            text = grammar.opening + record["text"] if turn["prefixed"] else record["text"]
            compare_lookup(f"{record['id']} manager", grammar, text, turn["max_actions_per_turn"], turn, parity)
    parity.report("parser", capsys)


def test_recorded_turns(capsys: pytest.CaptureFixture[str]) -> None:
    parity = Parity(CHOSEN)
    for record in golden("manager_trajectories"):
        parity.episodes += 1
        names = action_names(record)
        grammar = Grammar(thinking=record["enable_think"], actions=names)
        plain = Grammar(thinking=record["enable_think"])
        limit = record["max_actions_per_turn"]
        for turn in record["turns"]:
            where = f"{record['id']} turn {turn['turn']}"
            text = turn["llm_raw_response"]
            assert text == grammar.opening + turn["generated_text"], where
            case = {"actions": turn["parsed_actions"], "max_actions_per_turn": limit, **turn}
            compare(where, plain, text, case, parity)
            compare_lookup(where, grammar, text, limit, turn, parity)
    parity.report("manager turns", capsys)


def compare(where: str, grammar: Grammar, text: str, case: Any, parity: Parity) -> None:
    """The parse, without names: what was thought and which texts are actions."""
    parity.steps += 1
    parsed = grammar.parse(text, case["max_actions_per_turn"])
    parity.equal(f"{where} actions", list(parsed.actions), case["actions"])
    rewritten = case["llm_response"]
    if parsed.thought is not None:
        assert rewritten.startswith(f"<think>{parsed.thought}</think><answer>"), where
    parity.equal(f"{where} reply", text, rewritten, "reply-kept")


def compare_lookup(where: str, grammar: Grammar, text: str, limit: int, turn: Any, parity: Parity) -> None:
    """The look-up of names, and whether the turn was fined."""
    parity.steps += 1
    parsed = grammar.parse(text, limit)
    known = [action for action in parsed.actions if action not in parsed.unknown]
    mapped = turn["mapped_actions"]
    if grammar.actions:
        assert len(known) == len(mapped), where
        # The original's ids count from the first name, from 0 or from 1.
        ids = [grammar.actions.index(action) for action in known]
        assert len({mine - theirs for mine, theirs in zip(ids, mapped, strict=True)}) <= 1, where
    else:
        assert known == mapped, where
    assert parsed.well_formed is not turn["format_penalty_applied"], where


def action_names(record: Any) -> tuple[str, ...]:
    """The original's action names, in the order of its ids."""
    variant = record["variant"]
    if "Bandit" in variant:
        return tuple(record["layout"]["action_lookup"].values())
    if "FrozenLake" in variant:
        return ("Left", "Down", "Right", "Up")
    if "Sokoban" in variant:
        return MOVES
    if variant == "game_2048":
        return ("Up", "Right", "Down", "Left")
    if variant == "rubikscube":
        return CUBE
    return ()


CUBE = tuple(face + turn for face in "UDLRFB" for turn in ("", "'"))


# --- blocks -----------------------------------------------------------------------------------------------------------

PLAN = Grammar(actions=MOVES, blocks=("switch", "subgoal"))


def test_further_blocks_are_read_between_reasoning_and_answer() -> None:
    text = PLAN.compose("go", ["Up"], {"switch": "KEEP", "subgoal": "to the box"})
    assert text == "<think>go</think><switch>KEEP</switch><subgoal>to the box</subgoal><answer>Up</answer>"
    parsed = PLAN.parse(text)
    assert parsed == Parsed("go", ("Up",), (), True, {"switch": "KEEP", "subgoal": "to the box"})
    assert "then KEEP or SWITCH, then your subgoal, then one action" in PLAN.describe(1)


@pytest.mark.parametrize("missing", ["<switch>KEEP</switch>", "<subgoal> box </subgoal>"])
def test_without_a_further_block_the_actions_count_and_the_reply_is_not_well_formed(missing: str) -> None:
    whole = "<think>go</think> <switch>KEEP</switch> <subgoal> box </subgoal>\n<answer>Up</answer>"
    parsed = PLAN.parse(whole.replace(missing, ""))
    assert (parsed.actions, parsed.well_formed, len(parsed.blocks)) == (("Up",), False, 1)
    assert PLAN.parse(whole.replace("</subgoal>", "")) == Parsed(None, (), (), False)


def test_without_thinking_a_reply_begins_with_its_first_block() -> None:
    grammar = Grammar(thinking=False, actions=MOVES, blocks=("subgoal",))
    assert grammar.opening == "<subgoal>"
    text = "so <subgoal>box</subgoal><answer>Up</answer>!"
    assert grammar.parse(text) == Parsed(None, ("Up",), (), True, {"subgoal": "box"})
    assert grammar.cut(text) == [("subgoal", text.index("<answer>")), ("answer", len(text))]


@given(
    st.lists(st.sampled_from([*TAGS, "<switch>", "</switch>", "<subgoal>", "</subgoal>", "a"]), max_size=30),
    st.booleans(),
)
def test_any_text_is_cut_into_blocks_that_fill_it(pieces: list[str], thinking: bool) -> None:
    text = "".join(pieces)
    grammar = Grammar(thinking=thinking, actions=MOVES, blocks=("switch", "subgoal"))
    blocks, parsed = grammar.cut(text), grammar.parse(text)
    ends = [end for _, end in blocks]
    assert ends == sorted(ends) and ends[-1] == len(text)
    names = [name for name, _ in blocks]
    read = [*(["think"] if parsed.thought is not None else []), *parsed.blocks]
    assert names == [""] or names == [*read, "answer"]
    if names == [""]:
        assert parsed == Parsed(None, (), (), False)
