"""bandit-v1: names, payouts, what counts as success."""

import functools
from collections import Counter

import pytest

from starpod.env_server.authoring.environment import UNKNOWN_NAME
from starpod.env_server.episodes.live_episode import Limits, Want
from starpod.environments.bandit import PAIRS, Bandit
from tests.environments import episodes

start = functools.partial(episodes.start, Bandit, limits=Bandit.spec.limits)


def test_name_pairs_as_published() -> None:
    assert {split: len(pairs) for split, pairs in PAIRS.items()} == {"train": 12, "test": 8}
    names = [name for pairs in PAIRS.values() for pair in pairs for name in pair]
    assert len(set(names)) == 40


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_pair_in_both_orders_equally(split: str) -> None:
    drawn = Counter(start(seed, split=split).environment.arms for seed in range(1200))
    pairs = PAIRS[split]
    assert set(drawn) == {*pairs, *((high, low) for low, high in pairs)}
    low_first = sum(drawn[pair] for pair in pairs)
    assert 530 < low_first < 670
    assert min(drawn.values()) > 0.5 * 1200 / len(drawn)


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
    for luck in range(1500):
        episode = start(3, luck)
        transition = episode.turn([episode.environment.expert_action()], Want())
        assert transition.success is True
        paid.append(transition.reward)
    assert set(paid) == {0.0, 1.0}
    assert 0.21 < sum(paid) / len(paid) < 0.29


def test_an_unknown_name_uses_up_the_one_turn_and_names_match_in_any_case() -> None:
    transition = start(5).turn(["left"], Want())
    assert transition.truncated
    assert transition.success is False
    environment = start(5).environment
    assert environment.valid_actions() == environment.arms
    assert environment.step(f" {environment.high.upper()} ").success
    assert environment.valid_actions() == ()
    assert environment.expert_action() is None


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
        assert pair is None or telling.high == pair[1]


def test_swapped_meanings_look_the_same_and_are_not() -> None:
    one = start(1, pair=("Phoenix", "Dragon")).environment
    seeds = (seed for seed in range(99) if start(seed, pair=("Dragon", "Phoenix")).environment.arms == one.arms)
    other = start(next(seeds), pair=("Dragon", "Phoenix")).environment
    assert one.observe() == other.observe()
    assert one.render("png") == other.render("png")
    assert one.state_key() != other.state_key()
