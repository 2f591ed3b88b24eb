"""bandit-v1: names, payouts, what counts as success."""

import functools
import io
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from starpod.env_server.environment import UNKNOWN_NAME
from starpod.env_server.episode import Limits, Want
from starpod.environments.bandit import PAIRS, Bandit
from tests.environments import episodes

SEEDS = st.integers(0, 2**64 - 1)


start = functools.partial(episodes.start, Bandit, limits=Bandit.spec.limits)


def test_name_pairs_as_published() -> None:
    assert {split: len(pairs) for split, pairs in PAIRS.items()} == {"train": 12, "test": 8}
    names = [name for pairs in PAIRS.values() for pair in pairs for name in pair]
    assert len(set(names)) == 40


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_pair_in_both_orders_equally(split: str) -> None:
    drawn = Counter(start(seed, split=split).environment.arms for seed in range(2400))
    pairs = PAIRS[split]
    assert set(drawn) == {*pairs, *((high, low) for low, high in pairs)}
    low_first = sum(drawn[pair] for pair in pairs)
    assert 1100 < low_first < 1300
    assert min(drawn.values()) > 0.6 * 2400 / len(drawn)


@given(seed=SEEDS, dynamics_seeds=st.lists(SEEDS, min_size=2, max_size=8))
def test_a_group_sees_one_start(seed: int, dynamics_seeds: list[int]) -> None:
    members = [start(seed, luck) for luck in dynamics_seeds]
    assert len({(m.environment.observe(), m.environment.high, m.environment.state_key()) for m in members}) == 1


@pytest.mark.parametrize("low_reward", [0.1, 0.15])
def test_the_low_arm_is_steady(low_reward: float) -> None:
    for luck in range(50):
        episode = start(3, luck, low_reward=low_reward)
        low = next(arm for arm in episode.environment.arms if arm != episode.environment.high)
        transition = episode.turn([low], Want())
        assert (transition.reward, transition.success, transition.terminated) == (low_reward, False, True)
        assert transition.observation.parts == f"{low}: {low_reward} points"


def test_the_high_arm_wins_a_quarter_and_is_always_right() -> None:
    paid = []
    for luck in range(4000):
        episode = start(3, luck)
        transition = episode.turn([episode.environment.expert_action()], Want())
        assert transition.success is True
        paid.append(transition.reward)
    assert set(paid) == {0.0, 1.0}
    assert 0.25 - 0.03 < sum(paid) / len(paid) < 0.25 + 0.03


def test_names_match_in_any_case_and_others_are_invalid() -> None:
    episode = start(5)
    environment = episode.environment
    for nonsense in ("", "left", "1", environment.arms[0] + "s"):
        outcome = environment.step(nonsense)
        assert (outcome.valid, outcome.effective, outcome.terminated, outcome.reward) == (False, False, False, 0.0)
    assert environment.pulled is None
    assert environment.valid_actions() == environment.arms
    assert environment.step(f" {environment.arms[0].upper()} ").terminated
    assert environment.valid_actions() == ()
    assert environment.expert_action() is None


def test_an_unknown_name_uses_up_the_one_turn() -> None:
    transition = start(5).turn(["left"], Want())
    assert transition.truncated
    assert transition.success is False
    patient = start(5)
    patient.limits = Limits()
    assert not patient.turn(["left"], Want()).outcomes[0].valid
    assert patient.turn([patient.environment.high], Want()).success


def test_an_unknown_name_uses_up_no_action() -> None:
    episode = start(5)
    episode.limits = Limits(max_turns=3, max_actions_per_turn=1, max_actions=1)
    for nonsense in (["left"], ["left", "right"], []):
        unchanged = episode.fork(None).turn(nonsense, Want())
        assert not unchanged.end_reason
        assert all(outcome is UNKNOWN_NAME for outcome in unchanged.outcomes)
        assert unchanged.details is None
    late = episode.turn(["left", episode.environment.high, "right"], Want())
    assert late.success
    assert episode.actions == 1
    assert [outcome is None for outcome in late.outcomes] == [False, False, True]


@pytest.mark.parametrize("pair", [None, ("Phoenix", "Dragon")])
def test_swapped_names_mislead(pair: tuple[str, str] | None) -> None:
    for seed in range(20):
        telling, misleading = (start(seed, pair=pair, swapped=swapped).environment for swapped in (False, True))
        assert telling.high != misleading.high
        assert {*telling.arms} == {*misleading.arms} == {telling.high, misleading.high}


def test_an_own_pair_is_low_then_high() -> None:
    for seed in range(20):
        environment = start(seed, pair=("Phoenix", "Dragon")).environment
        assert environment.high == "Dragon"
        assert sorted(environment.arms) == ["Dragon", "Phoenix"]


def test_swapped_meanings_look_the_same_and_are_not() -> None:
    one = start(1, pair=("Phoenix", "Dragon")).environment
    seeds = (seed for seed in range(99) if start(seed, pair=("Dragon", "Phoenix")).environment.arms == one.arms)
    other = start(next(seeds), pair=("Dragon", "Phoenix")).environment
    assert one.observe() == other.observe()
    assert one.render("png") == other.render("png")
    assert one.state_key() != other.state_key()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pair": ("Cat", "cat")}, "differ in more than case"),
        ({"pair": ("Cat", " Dog")}, "cannot name an arm"),
        ({"low_reward": 0.3}, "the high arm pays 0.25 on average"),
        ({"high_probability": 1.5}, "less than or equal to 1"),
        ({"split": "validation"}, "'train' or 'test'"),
        ({"arms": 3}, "Extra inputs are not permitted"),
    ],
)
def test_bad_options_say_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Bandit.Options(**options)


def test_pictures() -> None:
    episode = start(2)
    before = episode.environment.render("png")
    assert Image.open(io.BytesIO(before)).size == (480, 300)
    assert all(arm in episode.environment.render("text") for arm in episode.environment.arms)
    episode.turn([episode.environment.high], Want())
    assert episode.environment.render("png") != before
