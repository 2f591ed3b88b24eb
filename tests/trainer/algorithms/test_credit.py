"""Estimators without a critic: credit terms, the presets made of them, and what the dispatcher adds to all of them."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from starpod.trainer.algorithms.advantages import compute_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import compare_with_peers, credit
from starpod.trainer.algorithms.terms import TERMS, CreditTerm
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode
from tests.trainer.algorithms.builders import a_rollout, doubles, random_doubles
from tests.trainer.turns import a_turn

ESTIMATORS = sorted({*TERMS} - {"vineppo"})  # which needs values of states


def of(name: str, returns: list[float], groups: list[int]) -> list[float]:
    """The estimator's only term on these returns."""
    (term,) = TERMS[name]
    return compared(term, returns, groups)


def compared(term: CreditTerm, values: list[float], peers: list[int]) -> list[float]:
    items: list[float] = compare_with_peers(term, doubles(values)[0], torch.tensor(peers)).tolist()
    return items


def gigpo(rollout: RolloutBatch, **options: float) -> Tensor:
    return compute_advantages(AlgorithmConfig(preset="gigpo", kl="off", advantage=options), rollout).advantages_BT


@pytest.mark.parametrize(
    ("name", "size"), [("grpo", 0.866024), ("rloo", 0.666667), ("loop", 0.666667), ("dr_grpo", 0.5), ("maxrl", 1.0)]
)
def test_two_of_four_succeed_and_an_episode_alone_in_its_group_has_advantage_zero(name: str, size: float) -> None:
    expected = [0.0, size, -size, -size, size]
    assert of(name, [5, 1, 0, 0, 1], [3, 7, 7, 7, 7]) == pytest.approx(expected, abs=5e-7)


@pytest.mark.parametrize(
    ("name", "returns", "groups", "expected"),
    [
        # PyVision-RL: a right answer without tools is pushed down where all are right, and whole groups cancel.
        ("dr_grpo", [1.2, 1.0, 1.0, 1.1], [0] * 4, [0.125, -0.075, -0.075, 0.025]),
        ("maxrl", [0, 0, -0.1, -0.3], [0, 0, 1, 1], [0] * 4),  # no signal without a success
        ("loop", [1.0, 1.004, 0.5, 0.8], [0, 0, 1, 1], [0, 0, -0.3, 0.3]),  # small advantages are left out
    ],
)
def test_golden_comparisons(name: str, returns: list[float], groups: list[int], expected: list[float]) -> None:
    assert of(name, returns, groups) == pytest.approx(expected, abs=1e-6)


def as_trained(rewards: list[list[float]]) -> RolloutBatch:
    """One group, a turn of one token for each reward, in the precisions of a real update."""
    turns = [[a_turn(reward=reward, state_key=b"A") for reward in own] for own in rewards]
    batch = Batch([Episode(0, member, "lake", turns=own, end="terminal") for member, own in enumerate(turns)])
    rollout = RolloutBatch.of(batch)
    return replace(rollout, values_BT=torch.zeros_like(rollout.old_logprobs_BT))


@pytest.mark.parametrize(
    "rewards",
    [
        *([[value]] * size for value in (10.9, 10.3, 9.9, 8.7, 0.1, -0.5) for size in (3, 8, 16)),
        # 10.9 less 0.1 for each move, the moves divided into turns in other ways: the sums differ in their last bits.
        [[-0.1, -0.1, -0.1, -0.1, 10.9], [-0.1 * 4 + 10.9], [-0.2, -0.1 * 2 + 10.9], [-0.3, -0.1 + 10.9]] * 4,
        [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]],
    ],
)
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "maxrl", "rloo", "loop", "gigpo"])
def test_equal_returns_have_advantage_zero_whatever_was_rounded(name: str, rewards: list[list[float]]) -> None:
    gigpo = {"weight": 0.0, "normalise": True} if name == "gigpo" else {}
    advantages = compute_advantages(
        AlgorithmConfig(preset="dapo", advantage={"kind": name, **gigpo}), as_trained(rewards)
    )
    assert not advantages.advantages_BT.any()
    assert advantages.advantages_BT.dtype == torch.float32


def test_the_parts_of_a_split_episode_count_once_in_the_baseline() -> None:
    """KLong's golden rollouts, of two parts and of three: over rollouts, not over parts, which gives 0.6 and -0.4."""
    rollout = as_trained([[0.0, 1.0], [0.0, 0.0, 0.0]])  # whose turns begin a sample each
    advantages = compute_advantages(AlgorithmConfig(preset="dr-grpo"), rollout)
    assert advantages.advantages_BT.tolist() == [[0.5, 0.5, 0.0], [-0.5] * 3]


def test_small_differences_of_large_returns_are_no_rounding() -> None:
    advantages = compute_advantages(AlgorithmConfig(preset="dapo"), as_trained([[1000.0], [1000.0], [1000.01]]))
    third = 0.01 / math.sqrt(3)
    expected = [-third / math.sqrt(3) / (third + 1e-6)] * 2 + [2 * third / math.sqrt(3) / (third + 1e-6)]
    assert advantages.advantages_BT.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_reinforce_plus_plus_is_the_discounted_reward_to_go_whitened() -> None:
    rollout = a_rollout([[0, 0, 1, 4]], groups=[0], mask=[[1, 0, 1, 1]])
    discounted = AlgorithmConfig(preset="dapo", advantage={"kind": "reinforce_plus_plus", "gamma": 0.5}).credit_terms
    assert credit(discounted, rollout, rollout.rewards_BT).tolist() == [[1.5, 0, 3, 4]]
    rollout = a_rollout([[0, 1], [0, 0]], groups=[0, 0])
    advantages = compute_advantages(AlgorithmConfig(preset="dapo", advantage="reinforce_plus_plus"), rollout)
    assert advantages.advantages_BT.std().item() == pytest.approx(1, abs=1e-6)
    based = AlgorithmConfig(preset="dapo", advantage="reinforce_plus_plus_baseline")
    rollout = a_rollout([[3.0], [1.0], [10.0], [8.0]], groups=[0, 0, 1, 1])
    assert compute_advantages(based, rollout).advantages_BT.flatten().tolist() == pytest.approx(
        [math.sqrt(3) / 2, -math.sqrt(3) / 2] * 2
    )


# --- GiGPO ------------------------------------------------------------------------------------------------------------

GIGPO_KEYS = [[b"A", b"B", b"C"], [b"A", b"B", b"B"]]
GIGPO = doubles([0.5 + 0.45125, 0.5 + 0.633333, 0.5], [-0.5 - 0.45125, -0.5 - 0.316667, -0.5 - 0.316667])
GRPO, DR_GRPO = (doubles([size] * 3, [-size] * 3) for size in (0.5 / (math.sqrt(0.5) + 1e-6), 0.5))
UNIQUE = [[b"1", b"2", b"3"], [b"4", b"5", b"6"]]


def of_gigpo(keys: list[list[bytes]], groups: tuple[int, int] = (0, 0), **options: float) -> Tensor:
    return gigpo(a_rollout([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], groups=groups, state_key=keys), **options)


@pytest.mark.parametrize(
    ("keys", "options", "expected"),
    [
        (GIGPO_KEYS, {}, GIGPO),  # turns that began in the same state are compared
        (GIGPO_KEYS, {"weight": 0.5}, (GIGPO + DR_GRPO) / 2),
        # Without its steps it is GRPO.
        *((keys, {"normalise": True, **off}, GRPO) for keys, off in (([], {"weight": 0.0}), (UNIQUE, {}))),
        *((keys, {"normalise": False, **off}, DR_GRPO) for keys, off in (([], {"weight": 0.0}), (UNIQUE, {}))),
        # States of different groups are never compared.
        ([[b"A", b"B", b"C"], [b"A", b"B", b"D"]], {"groups": (0, 1)}, torch.zeros(2, 3).double()),
    ],
)
def test_gigpo(keys: list[list[bytes]], options: dict[str, Any], expected: Tensor) -> None:
    torch.testing.assert_close(of_gigpo(keys, **options), expected, atol=5e-7, rtol=0)


def test_gigpo_divides_by_the_deviation_if_asked() -> None:
    # Two members: +-1/sqrt(2) in the episode and in the bucket of state A alike.
    assert of_gigpo(GIGPO_KEYS, normalise=True)[0, 0].item() == pytest.approx(2 * math.sqrt(0.5), abs=1e-5)


def test_gigpo_counts_a_turns_tokens_once_and_spreads_its_advantage_on_them() -> None:
    rollout = a_rollout(
        [[0, 0, 0, 1], [0, 0, 0, 0]],
        groups=[0, 0],
        mask=[[1, 0, 1, 1], [1, 1, 1, 1]],
        turns=[[0, 0, 0, 1], [0, 1, 1, 1]],
        state_key=[[b"A", b"B"], [b"A", b"B"]],
    )
    torch.testing.assert_close(gigpo(rollout, gamma=0.5), doubles([0.75, 0, 0.75, 1.0], [-0.75, -1.0, -1.0, -1.0]))


def test_gigpo_needs_the_key_of_every_state() -> None:
    for keys in ([], [[b"A", b"", b"C"], [b"A", b"B", b"B"]]):
        with pytest.raises(ValueError, match="state_key"):
            of_gigpo(keys)


# --- CM2, MT-GRPO, Dr. MAS, and groups of other kinds -----------------------------------------------------------------

CHECKLIST = [[1, 0.5], [0, 1], [0.5], [1, 0], [0.5, 0.5], [0, 1]]
"""Turn scores of six members, one of which ended a turn early."""
FIRST = [0.5, -0.5, 0, 0.5, 0, -0.5]
SECOND = [-0.1, 0.4, 0, -0.6, -0.1, 0.4]
FIRST_SCALED = [1.118031, -1.118031, 0, 1.118031, 0, -1.118031]
SECOND_SCALED = [-0.239045, 0.956181, 0, -1.434271, -0.239045, 0.956181]


def a_checklist(scores: list[list[float]], **values: Any) -> RolloutBatch:
    """Members of one group whose turns, of a token each, have these rewards: of the part `criteria`, and in all."""
    rewards = [[*own, *[0.0] * (2 - len(own))] for own in scores]
    mask = [[1] * len(own) + [0] * (2 - len(own)) for own in scores]
    parts = [[{"criteria": score, "environment": 9.0} for score in own] for own in scores]
    return replace(a_rollout(rewards, groups=[0] * len(scores), mask=mask, parts=parts), **values)


def of_terms(terms: Sequence[CreditTerm], rollout: RolloutBatch) -> list[list[float]]:
    items: list[list[float]] = credit(terms, rollout, rollout.rewards_BT).tolist()
    return items


def rows_of(rows: Sequence[Sequence[float]]) -> list[Any]:
    return [pytest.approx(list(row), abs=1e-6) for row in rows]


def columns(*turns: list[float]) -> list[Any]:
    return rows_of([*zip(*turns, strict=True)])


def test_cm2_compares_the_same_turn_of_those_who_have_it() -> None:
    rollout = a_checklist(CHECKLIST)
    assert of_terms(TERMS["cm2_turn"], rollout) == columns(FIRST, SECOND)
    (term,) = TERMS["cm2_turn"]
    assert of_terms([term.model_copy(update={"scale": "std"})], rollout) == columns(FIRST_SCALED, SECOND_SCALED)
    assert of_terms([term.model_copy(update={"min_peers": 6})], rollout) == columns(FIRST, [0.0] * 6)


def test_cm2_trajectories_are_compared_by_the_checklist_alone() -> None:
    rollout = a_checklist([[0.75], *[[0.5]] * 5], rewards_BT=random_doubles(1, 6, 2))
    assert of_terms(TERMS["cm2_trajectory"], rollout) == columns([0.208333, *[-0.041667] * 5], [0.0] * 6)


def test_cm2_credits_a_criterion_to_the_turns_until_it_was_met() -> None:
    met_at = [0, 2, None, 1, None, 0]
    reported = [[{"row 1": at is not None and turn >= at} for turn in range(3)] for at in met_at]
    mean = (1 + 0.81 + 0.9 + 1) / 6  # each turn that it takes costs a tenth
    expected = [[1 - mean, 0, 0], [0.81 - mean] * 3, [-mean] * 3, [0.9 - mean] * 2 + [0], [-mean] * 3, [1 - mean, 0, 0]]
    (term,) = TERMS["cm2_step"]
    rollout = a_rollout([[0.0] * 3] * 6, groups=[0] * 6, criteria=reported)
    assert of_terms([term.model_copy(update={"gamma": 0.9})], rollout) == rows_of(expected)


def test_mt_grpo_adds_the_turns_advantage_to_the_outcomes() -> None:
    third = 0.5 / (math.sqrt(0.1) + 1e-6)  # returns 1.5, 1, .5, 1, 1, 1
    outcome = [third, 0, -third, 0, 0, 0]
    turns = [[a + b for a, b in zip(outcome, own, strict=True)] for own in (FIRST_SCALED, SECOND_SCALED)]
    turns[1][2] = 0.0  # a member that ended a turn early
    assert of_terms(TERMS["mt_grpo"], a_checklist(CHECKLIST)) == columns(*turns)


TEAM = [[("S", 0.0), ("V", 1.0)], [("S", 0.0), ("S", 0.0), ("V", 0.0)], [("S", 1.0)], [("S", 0.0), ("V", 0.0)]]
SIZES = [[("S", s), ("V", v)] for s, v in zip([1.0, 0, 1, 0], [0.4, 0.1, 0.4, 0.1], strict=True)]
"""An agent whose rewards are of another size."""
G, A, B, C, D, V = 0.866024, 1.095443, -0.730295, 1.207612, -0.724567, (1.154699, -0.577349)


@pytest.mark.parametrize(
    ("term", "episodes", "expected"),
    [
        # Each agent is compared with itself, once an episode; as others have it, by calls and pooled.
        (TERMS["dr_mas"][0], TEAM, [[G, V[0]], [-G, -G, V[1]], [G], [-G, V[1]]]),
        (CreditTerm(unit="turn", key=("agent",), scale="std"), TEAM, [[A, V[0]], [B, B, V[1]], [A], [B, V[1]]]),
        (CreditTerm(unit="turn", scale="std"), TEAM, [[C, C], [D, D, D], [C], [D, D]]),
        (
            CreditTerm(unit="agent", score="reward", key=("agent",), scale="std"),
            SIZES,
            [[0.866024, 0.866020], [-0.866024, -0.866020]] * 2,
        ),
        (
            CreditTerm(unit="agent", score="reward", scale="std"),
            SIZES,
            [[1.500168, 0.060007], [-0.900101, -0.660074]] * 2,
        ),
        # With one agent it is GRPO.
        (TERMS["dr_mas"][0], [[("", 1.0), ("", 0.0)], [("", 0.0)], [("", 0.5)]], [[0.999998] * 2, [-0.999998], [0]]),
    ],
)
def test_dr_mas(term: CreditTerm, episodes: list[list[tuple[str, float]]], expected: list[list[float]]) -> None:
    """Each episode's turns, of a token each: the agent and its reward."""
    most = max(map(len, episodes))
    rollout = a_rollout(
        [[reward for _, reward in own] + [0.0] * (most - len(own)) for own in episodes],
        groups=[0] * len(episodes),
        mask=[[1] * len(own) + [0] * (most - len(own)) for own in episodes],
        agent_id=[[name for name, _ in own] for own in episodes],
    )
    items = of_terms([term], rollout)
    assert [own[: len(episode)] for own, episode in zip(items, episodes, strict=True)] == rows_of(expected)


# --- properties of any term -------------------------------------------------------------------------------------------

terms = st.builds(
    CreditTerm,
    baseline=st.sampled_from(["mean", "others"]),
    scale=st.sampled_from(["none", "std"]),
    min_peers=st.integers(2, 4),
)
scores = st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=12)


@given(terms, scores, st.data())
def test_a_comparison_sums_to_zero_and_too_few_peers_say_nothing(
    term: CreditTerm, values: list[float], data: st.DataObject
) -> None:
    peers = data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values)))
    items = compared(term, values, peers)
    for one in set(peers):
        own = [item for item, peer in zip(items, peers, strict=True) if peer == one]
        assert sum(own) == pytest.approx(0, abs=1e-6)
        assert len(own) >= term.min_peers or own == [0.0] * len(own)


@given(terms, scores, st.integers(-50, 50), st.integers(1, 9))
def test_a_comparison_ignores_a_shift_and_follows_a_factor(
    term: CreditTerm, values: list[float], shift: int, factor: int
) -> None:
    peers = [0] * len(values)
    items = compared(term, values, peers)
    assert compared(term, [value + shift for value in values], peers) == pytest.approx(items, abs=1e-6)
    grown = 1 if term.scale == "std" else factor
    scaled = compared(term, [value * factor for value in values], peers)
    assert scaled == pytest.approx([item * grown for item in items], abs=1e-4)


def test_terms_add_up_by_their_weights_and_smallest_leaves_out() -> None:
    rollout = a_rollout([[1.0, 0.0], [0.0, 0.0], [0.0, 0.5]], groups=[0, 0, 0])
    turn = CreditTerm(unit="turn", score="reward", key=("turn",))
    both = of_terms([CreditTerm(weight=2), turn.model_copy(update={"weight": 0.5})], rollout)
    parts = [torch.tensor(of_terms([each], rollout)) for each in (CreditTerm(), turn)]
    torch.testing.assert_close(torch.tensor(both), 2 * parts[0] + parts[1] / 2)
    assert of_terms([CreditTerm(smallest=0.4)], rollout) == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"unit": "criterion"}, "cannot have score return"),
        ({"score": "met"}, "cannot have score met"),
        ({"unit": "criterion", "score": "met", "key": ["turn"]}, "drop parts, without, key and strata"),
        ({"score": "to_go"}, "has the score return"),
        ({"unit": "agent", "score": "to_go"}, "no rewards are to go"),
        ({"unit": "agent", "key": ["state"]}, "no single state"),
        ({"key": ["turn"]}, "no single turn"),
        ({"key": ["agent"]}, "spans all agents"),
        ({"unit": "turn", "key": ["turn", "turn"]}, "has an entry twice"),
        ({"unit": "turn", "gamma": 0.9}, "discounts nothing"),
        ({"baseline": "none", "scale": "std"}, "has no peers"),
        ({"weight": 0}, "greater than 0"),
        ({"min_peers": 1}, "greater than or equal to 2"),
        ({"unit": "word"}, "'episode'"),
        ({"unit": "block"}, "needs the key block"),
        ({"unit": "turn", "score": "reward", "block": "think"}, "needs the key block"),
        ({"strata": ["reasoning"]}, "is not part of a turn"),
        ({"parts": ["a"], "without": ["b"]}, "drop parts or without"),
    ],
)
def test_a_term_without_a_meaning_is_refused_with_a_sentence(values: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        CreditTerm.model_validate(values)


# --- what the dispatcher adds -----------------------------------------------------------------------------------------


def test_a_kl_penalty_is_taken_off_the_reward_of_every_sampled_token_first() -> None:
    rollout = a_rollout(
        [[0, 0, 1.0], [0, 0, 0.0]],
        groups=[0, 0],
        mask=[[1, 0, 1], [1, 0, 1]],
        old=[[-1.0, 0, -2.0], [-1.0, 0, -1.0]],
        reference=[[-1.5, 99, -2.0], [-1.0, -99, -1.0]],
    )
    config = AlgorithmConfig(preset="dr-grpo", kl={"where": "reward", "coefficient": 0.1})
    advantages = compute_advantages(config, rollout).advantages_BT
    # Returns are 1 - 0.1 * 0.5 and 0.
    torch.testing.assert_close(advantages, doubles([0.475, 0, 0.475], [-0.475, 0, -0.475]))
    quadratic = AlgorithmConfig(preset="dr-grpo", kl={"where": "reward", "estimator": "k2", "coefficient": 0.1})
    assert compute_advantages(quadratic, rollout).advantages_BT[0, 0].item() == pytest.approx((1 - 0.0125) / 2)


def test_without_the_reference_a_kl_penalty_is_an_error() -> None:
    with pytest.raises(ValueError, match="reference"):
        compute_advantages(AlgorithmConfig(preset="starpo-ppo"), a_rollout([[1.0]], groups=[0], values=[[0.0]]))


@given(seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_advantages_move_with_their_episodes_and_leave_unsampled_tokens_alone(seed: int) -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
    rewards, values = random_doubles(seed, 12, 4).abs(), random_doubles(seed + 1, 12, 4).tolist()
    rewards[:, 1] = 0.0  # where no token is sampled
    groups = [-4] * 6 + [10**12] * 6

    def in_order(places: Sequence[int]) -> RolloutBatch:
        rollout = a_rollout(
            rewards[places].tolist(),
            groups=[groups[i] for i in places],
            mask=[[1, 0, 1, 1]] * 12,
            turns=[[0, -1, 1, 2]] * 12,
            values=[values[i] for i in places],
            state_key=[[b"A", b"B", b"CB"[i % 2 :][:1]] for i in places],
            agent_id=[["S", "SV"[i % 2], "V"] for i in places],
            blocks=[[{}, {}, {"switch": "SWITCH"} if i % 3 == 0 else {}] for i in places],
            parts=[[{"criteria": reward} for reward in rewards[i, [0, 2, 3]].tolist()] for i in places],
            criteria=[[{"a": reward > 0.5, "b": reward > 1} for reward in rewards[i, [0, 2, 3]]] for i in places],
        )
        return replace(rollout, blocks_BT=torch.tensor([[0, -1, 5, 5 * (i % 2)] for i in places]))

    straight, shuffled = in_order(range(12)), in_order(order)
    for name in ESTIMATORS:
        config = AlgorithmConfig(preset="dapo", advantage=name)
        one, other = (compute_advantages(config, rollout) for rollout in (straight, shuffled))
        torch.testing.assert_close(other.advantages_BT, one.advantages_BT[order])
        assert not one.advantages_BT[:, 1].any(), name
        # Of random criteria, all steps that are compared may meet as many.
        assert one.advantages_BT[:, [0, 2, 3]].any() or name == "cm2_step", name
        assert (one.returns_BT is not None) == config.needs_critic
