"""Mutual information between prompts and reasoning."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.data.episode import Episode
from starpod.trainer.diagnostics.config import InformationConfig, MonitorConfig
from starpod.trainer.diagnostics.information import (
    InformationProbe,
    context_of,
    first_turns,
    information,
    random_turns,
    reasoning_of,
    regime,
)
from tests.trainer.diagnostics.synthetic import turn

TAGS = ("<think>", "</think>")


def square(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rows), torch.arange(len(rows))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[-3.0, -3.0], [-3.0, -3.0]], 0.0),
        ([[-1.0, -50.0], [-50.0, -1.0]], math.log(2)),
        ([[-1.0, -2.0], [-3.0, -1.0]], 0.473052),
    ],
)
def test_golden_numbers(rows: list[list[float]], expected: float) -> None:
    found = information(*square(rows))
    assert found.mutual_information == pytest.approx(expected, abs=1e-6)
    assert found.bound == pytest.approx(math.log(2))
    assert found.entropy == pytest.approx(found.conditional_entropy + found.mutual_information)


matrices = st.integers(2, 7).flatmap(
    lambda n: st.lists(st.lists(st.floats(-80, 0), min_size=n, max_size=n), min_size=n, max_size=n)
)


@given(matrices)
def test_information_never_passes_its_bound(rows: list[list[float]]) -> None:
    found = information(*square(rows))
    assert found.mutual_information <= found.bound + 1e-9
    assert found.bound == pytest.approx(math.log(len(rows)))
    shares = [found.retrieval[k] for k in (1, 2, 4, 8)]
    assert shares == sorted(shares) and all(0 <= share <= 1 for share in shares)


@given(matrices, st.data())
def test_a_constant_added_to_a_row_moves_entropy_alone(rows: list[list[float]], data: st.DataObject) -> None:
    L_NM, own_N = square(rows)
    row = data.draw(st.integers(0, len(rows) - 1))
    moved = L_NM.clone()
    moved[row] -= 5
    before, after = information(L_NM, own_N), information(moved, own_N)
    assert after.mutual_information == pytest.approx(before.mutual_information, abs=1e-4)
    assert after.entropy == pytest.approx(before.entropy + 5 / len(rows), abs=1e-4)


@given(matrices)
def test_merging_identical_prompts_changes_no_information(rows: list[list[float]]) -> None:
    L_NM, own_N = square(rows)
    # The first prompt twice: as two equal columns, and merged into one column with two samples.
    apart = torch.cat([torch.cat([L_NM, L_NM[:1]]), torch.cat([L_NM[:, :1], L_NM[:1, :1]])], dim=1)
    merged = torch.cat([L_NM, L_NM[:1]])
    one = information(apart, torch.arange(len(rows) + 1))
    two = information(merged, torch.cat([own_N, own_N[:1]]))
    assert two.mutual_information == pytest.approx(one.mutual_information, abs=1e-6)
    assert two.entropy == pytest.approx(one.entropy, abs=1e-6)


def test_retrieval_against_chance() -> None:
    template = information(*square([[-3.0] * 10] * 10))
    assert template.retrieval == pytest.approx(template.chance)
    assert template.chance == pytest.approx({1: 0.1, 2: 0.2, 4: 0.4, 8: 0.8})
    reversed_rows = torch.full((4, 4), -9.0)
    reversed_rows.fill_diagonal_(-1)
    perfect = information(reversed_rows, torch.arange(4))
    assert perfect.retrieval[1] == 1 and perfect.chance[8] == 1
    second = torch.tensor([[-2.0, -1.0, -5.0], [-1.0, -2.0, -5.0], [-1.0, -5.0, -2.0]])
    found = information(second, torch.arange(3))
    assert (found.retrieval[1], found.retrieval[2]) == (0, 1)


def test_the_four_regimes() -> None:
    names = [regime(high_entropy=h, high_information=i) for h in (True, False) for i in (True, False)]
    assert names == ["diverse reasoning", "template collapse", "compressed reasoning", "low-entropy collapse"]


# --- taking reasoning out of turns -----------------------------------------------------------------------------------

WORDS = ["<think>", "</think>", "<answer>", "</answer>", "up", "down", "go", ".</", "think>", "state:1", "state:2", ">"]


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def decode(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


@pytest.mark.parametrize(
    ("prompt", "reply", "expected"),
    [
        # The opening tag belongs to the prompt, where it may be prefilled, and no tag to the reasoning.
        ("state:1", "<think> go up </think> <answer> up </answer>", "goup"),
        ("state:1 <think>", "go up </think> <answer> up", "goup"),
        ("state:1", "<think> go .</ think> up", "go"),  # a token across the tag belongs to the tag
        *(("state:1", reply, "") for reply in ("<think> </think> up", "<think> go up", "up", "</think>")),
    ],
)
def test_reasoning_is_the_text_between_the_tags(prompt: str, reply: str, expected: str) -> None:
    sample = reasoning_of([turn(prompt=ids(prompt), reply=ids(reply))], 0, decode, TAGS)
    assert (decode(sample.reasoning) if sample else "") == expected
    assert sample is None or decode(sample.prompt) == "state:1<think>"


def test_the_context_goes_back_to_the_last_fresh_prompt() -> None:
    turns = [turn(prompt=[n], reply=[n + 1], fresh=n < 5) for n in (1, 3, 5, 7)]
    assert context_of(turns, 0) == [1]
    assert context_of(turns, 3) == [3, 4, 5, 6, 7]


# --- sampling and measuring ------------------------------------------------------------------------------------------


def batch(groups: int, members: int, *, template: bool) -> list[Episode]:
    """Two turns each; the reasoning names the state, or does not."""
    episodes = []
    for group in range(groups):
        for number in range(members):
            state = [100 + group]
            thought = [4] if template else [200 + group]
            made = [turn(prompt=[*state, 0], reply=[*thought, 1, 5], fresh=fresh) for fresh in (True, False)]
            episodes.append(Episode(group, number, "toy-v1", turns=made))
    return episodes


def toy_decode(tokens: list[int]) -> str:
    return "".join(WORDS[token] if token < 100 else f"[{token}]" for token in tokens)


def toy_score(prompts: list[list[int]], continuations: list[list[int]]) -> list[float]:
    """A token is likely if it names the state of the prompt, or none."""
    return [
        sum(-0.5 if token < 200 or token - 100 in prompt else -20.0 for token in continuation)
        for prompt, continuation in zip(prompts, continuations, strict=True)
    ]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_first_turns_spread_over_groups_and_random_turns_over_turns() -> None:
    episodes = batch(8, 4, template=False)
    drawn = first_turns(episodes, 8, generator())
    assert sorted(episode.group for episode, _ in drawn) == list(range(8)) and {index for _, index in drawn} == {0}
    assert len(first_turns(episodes, 99, generator())) == 32
    assert {index for _, index in random_turns(episodes, 32, generator())} == {0, 1}
    again = first_turns(episodes, 8, generator())
    assert [(e.group, e.member) for e, _ in again] == [(e.group, e.member) for e, _ in drawn]


def probe(**values: object) -> InformationProbe:
    return InformationProbe(MonitorConfig(information=InformationConfig(every=5, samples=16, **values)))  # type: ignore[arg-type]


def test_reasoning_about_the_state_is_distinguished_from_a_template() -> None:
    for template, nats, above, found in (
        (False, math.log(4), 0.75, "diverse reasoning"),
        (True, 0, 0, "template collapse"),
    ):
        watch = probe()
        metrics = watch.measure(batch(4, 4, template=template), toy_score, toy_decode, generator())
        expected = {"mutual_information": nats, "retrieval_at_1_above_chance": above, "bound": math.log(4)}
        expected["valid_thinking_rate"] = 1
        told = {name: metrics[f"information/first_turn/{name}"] for name in expected}
        assert told == pytest.approx(expected, abs=1e-6)
        assert watch.regimes == {"first_turn": found}


def test_both_samplers_and_what_has_no_reasoning() -> None:
    both = probe(random_turns=True)
    metrics = both.measure(batch(4, 4, template=False), toy_score, toy_decode, generator())
    assert metrics["information/random_turn/prompts"] > metrics["information/first_turn/prompts"] == 4
    mute = [Episode(1, 0, "toy-v1", turns=[turn(reply=[5])])] * 3
    assert probe().measure(mute, toy_score, toy_decode, generator()) == {
        "information/first_turn/valid_thinking_rate": 0.0
    }
    assert probe().measure([], toy_score, toy_decode, generator()) == {}


def test_at_the_first_step_and_at_regular_intervals() -> None:
    assert [step for step in range(1, 16) if probe().due(step)] == [1, 5, 10, 15]
    assert not InformationProbe(MonitorConfig()).due(1)


def test_averages_survive_a_restart() -> None:
    whole, first, second = probe(), probe(), probe()
    batches = [batch(4, 4, template=False), batch(3, 4, template=True), batch(5, 2, template=False)]
    expected = [whole.measure(episodes, toy_score, toy_decode, generator()) for episodes in batches]
    first.measure(batches[0], toy_score, toy_decode, generator())
    first.measure(batches[1], toy_score, toy_decode, generator())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.measure(batches[2], toy_score, toy_decode, generator()) == expected[2]
    assert second.regimes == whole.regimes
