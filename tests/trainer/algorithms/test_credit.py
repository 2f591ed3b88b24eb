"""Estimators without a critic: credit terms, the presets made of them, and what the dispatcher adds to all of them."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from starpod.trainer.algorithms.advantages import compute_advantages, soft_weights
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import compare, credit, group_statistics
from starpod.trainer.algorithms.terms import TERMS, CreditTerm
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode
from tests.trainer.algorithms.builders import a_rollout, doubles, random_doubles
from tests.trainer.turns import a_turn

PER_EPISODE = ("grpo", "dr_grpo", "maxrl", "rloo", "loop")
ESTIMATORS = sorted({*get_args(AlgorithmConfig.model_fields["advantage"].annotation)} - {"terms"})


def of(name: str, returns: list[float], groups: list[int]) -> list[float]:
    """The estimator's only term on these returns."""
    (term,) = TERMS[name]
    items: list[float] = compare(term, torch.tensor(returns, dtype=torch.float64), torch.tensor(groups)).tolist()
    return items


def gigpo(rollout: RolloutBatch, **options: float) -> Tensor:
    return compute_advantages(
        AlgorithmConfig(preset="gigpo", kl={"where": "off"}, gigpo=options), rollout
    ).advantages_BT


@pytest.mark.parametrize(
    ("name", "size"), [("grpo", 0.866024), ("rloo", 0.666667), ("loop", 0.666667), ("dr_grpo", 0.5), ("maxrl", 1.0)]
)
def test_two_of_four_succeed(name: str, size: float) -> None:
    assert of(name, [1, 0, 0, 1], [7] * 4) == pytest.approx([size, -size, -size, size], abs=5e-7)


@pytest.mark.parametrize("name", PER_EPISODE)
def test_an_episode_alone_in_its_group_has_advantage_zero(name: str) -> None:
    assert of(name, [5.0, 1.0, 0.0], [3, 9, 9])[0] == 0.0


@pytest.mark.parametrize("name", PER_EPISODE)
@given(data=st.data())
@settings(max_examples=25)
def test_groups_are_told_by_id_and_order_does_not_matter(name: str, data: st.DataObject) -> None:
    returns = data.draw(st.lists(st.floats(0, 10), min_size=1, max_size=12))
    groups = data.draw(st.lists(st.sampled_from([-4, 0, 3, 10**12]), min_size=len(returns), max_size=len(returns)))
    order = data.draw(st.permutations(range(len(returns))))
    straight = of(name, returns, groups)
    permuted = of(name, [returns[i] for i in order], [groups[i] for i in order])
    assert permuted == pytest.approx([straight[i] for i in order], rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.floats(-50, 50))
@settings(max_examples=40)
def test_leave_one_out_is_what_it_says_and_ignores_a_shift(returns: list[float], shift: float) -> None:
    expected = [r - (sum(returns) - r) / (len(returns) - 1) for r in returns]
    assert of("rloo", returns, [0] * len(returns)) == pytest.approx(expected, abs=1e-9)
    assert of("rloo", [r + shift for r in returns], [0] * len(returns)) == pytest.approx(expected, abs=1e-9)


def test_standard_deviations_are_of_samples() -> None:
    statistics = group_statistics(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([1, 1, 2]))
    assert statistics.std_n.tolist() == pytest.approx([math.sqrt(2), math.sqrt(2), 0.0])
    assert statistics.mean_n.tolist() == [2.0, 2.0, 5.0]


def as_trained(rewards: list[list[float]]) -> RolloutBatch:
    """One group, a turn of one token for each reward, in the precisions of a real update."""
    turns = [[a_turn(reward=reward) for reward in own] for own in rewards]
    batch = Batch([Episode(0, member, "lake", turns=own, end="terminal") for member, own in enumerate(turns)])
    logprobs_BT = batch.sampler_logprobs_BT()
    return RolloutBatch(
        mask_BT=batch.mask_BT,
        turns_BT=batch.turns_BT(),
        rewards_BT=batch.rewards_BT(),
        groups_B=torch.zeros(len(batch), dtype=torch.int64),
        old_logprobs_BT=logprobs_BT,
        sampler_logprobs_BT=logprobs_BT,
        bootstrap_B=torch.zeros(len(batch)),
        values_BT=torch.zeros_like(logprobs_BT),
        state_keys=[[b"A"] * len(own) for own in rewards],
    )


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
    gigpo = {"gigpo": {"weight": 0.0, "normalise": True}} if name == "gigpo" else {}
    advantages = compute_advantages(AlgorithmConfig(preset="dapo", advantage=name, **gigpo), as_trained(rewards))
    assert not advantages.advantages_BT.any()
    assert advantages.advantages_BT.dtype == torch.float32


def test_a_right_answer_without_tools_is_pushed_down_where_all_are_right_and_whole_groups_cancel() -> None:
    """PyVision-RL's golden group; a target of ten episodes would take two of these four and leave 0.05."""
    assert of("dr_grpo", [1.2, 1.0, 1.0, 1.1], [0] * 4) == pytest.approx([0.125, -0.075, -0.075, 0.025])


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


def test_maxrl_has_no_signal_without_a_success() -> None:
    assert of("maxrl", [0, 0, -0.1, -0.3], [0, 0, 1, 1]) == [0, 0, 0, 0]


def test_loop_leaves_out_small_advantages() -> None:
    assert of("loop", [1.0, 1.004, 0.5, 0.8], [0, 0, 1, 1]) == pytest.approx([0, 0, -0.3, 0.3])


def test_reinforce_plus_plus_is_the_discounted_reward_to_go_whitened() -> None:
    rollout = a_rollout([[0, 0, 1, 4]], groups=[0], mask=[[1, 0, 1, 1]])
    discounted = AlgorithmConfig(preset="dapo", advantage="reinforce_plus_plus", gamma=0.5).credit_terms
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

GIGPO_REWARDS = [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
GIGPO_KEYS = [[b"A", b"B", b"C"], [b"A", b"B", b"B"]]


def of_gigpo(keys: list[list[bytes]], groups: tuple[int, int] = (0, 0), **options: float) -> Tensor:
    return gigpo(a_rollout(GIGPO_REWARDS, groups=groups, state_keys=keys), **options)


def test_gigpo_compares_turns_that_began_in_the_same_state() -> None:
    expected = doubles([0.5 + 0.45125, 0.5 + 0.633333, 0.5], [-0.5 - 0.45125, -0.5 - 0.316667, -0.5 - 0.316667])
    torch.testing.assert_close(of_gigpo(GIGPO_KEYS), expected, atol=5e-7, rtol=0)
    half = of_gigpo(GIGPO_KEYS, weight=0.5)
    torch.testing.assert_close(half, (expected + of_gigpo(GIGPO_KEYS, weight=0.0)) / 2, atol=5e-7, rtol=0)


@pytest.mark.parametrize(("normalise", "same"), [(True, "grpo"), (False, "dr_grpo")])
def test_gigpo_without_its_steps_is_grpo(normalise: bool, same: str) -> None:
    expected = doubles(of(same, [1.0, 0.0], [0, 0])).T.expand(2, 3)
    torch.testing.assert_close(of_gigpo([], weight=0.0, normalise=normalise), expected)
    unique = [[b"1", b"2", b"3"], [b"4", b"5", b"6"]]
    torch.testing.assert_close(of_gigpo(unique, normalise=normalise), expected)


def test_gigpo_never_compares_states_of_different_groups() -> None:
    assert not of_gigpo([[b"A", b"B", b"C"], [b"A", b"B", b"D"]], groups=(0, 1)).any()


def test_gigpo_divides_by_the_deviation_if_asked() -> None:
    advantages = of_gigpo(GIGPO_KEYS, normalise=True)
    root = math.sqrt(0.5)
    # Two members: +-1/sqrt(2) in the episode and in the bucket of state A alike.
    assert advantages[0, 0].item() == pytest.approx(2 * root, abs=1e-5)


def test_gigpo_counts_a_turns_tokens_once_and_spreads_its_advantage_on_them() -> None:
    rollout = a_rollout(
        [[0, 0, 0, 1], [0, 0, 0, 0]],
        groups=[0, 0],
        mask=[[1, 0, 1, 1], [1, 1, 1, 1]],
        turns=[[0, 0, 0, 1], [0, 1, 1, 1]],
        state_keys=[[b"A", b"B"], [b"A", b"B"]],
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
SECOND_SCALED = [-0.239045, 0.956181, 0, -1.434271, -0.239045, 0.956181]


def a_checklist(scores: list[list[float]], **values: Any) -> RolloutBatch:
    """Members of one group whose turns, of a token each, have these rewards: of the part `criteria`, and in all."""
    rewards = [[*own, *[0.0] * (2 - len(own))] for own in scores]
    mask = [[1] * len(own) + [0] * (2 - len(own)) for own in scores]
    parts = [[{"criteria": score, "environment": 9.0} for score in own] for own in scores]
    return replace(a_rollout(rewards, groups=[0] * len(scores), mask=mask), parts=parts, **values)


def of_terms(terms: Sequence[CreditTerm], rollout: RolloutBatch) -> list[list[float]]:
    items: list[list[float]] = credit(terms, rollout, rollout.rewards_BT).tolist()
    return items


def columns(*turns: list[float]) -> list[Any]:
    return [pytest.approx(row, abs=1e-6) for row in zip(*turns, strict=True)]


def test_cm2_compares_the_same_turn_of_those_who_have_it() -> None:
    rollout = a_checklist(CHECKLIST)
    assert of_terms(TERMS["cm2_turn"], rollout) == columns(FIRST, SECOND)
    (term,) = TERMS["cm2_turn"]
    scaled = of_terms([term.model_copy(update={"scale": "std"})], rollout)
    assert scaled == columns([1.118031, -1.118031, 0, 1.118031, 0, -1.118031], SECOND_SCALED)
    assert of_terms([term.model_copy(update={"min_peers": 6})], rollout) == columns(FIRST, [0.0] * 6)


def test_cm2_trajectories_are_compared_by_the_checklist_alone() -> None:
    rollout = a_checklist([[0.75], *[[0.5]] * 5], rewards_BT=random_doubles(1, 6, 2))
    assert of_terms(TERMS["cm2_trajectory"], rollout) == columns([0.208333, *[-0.041667] * 5], [0.0] * 6)


def test_cm2_credits_a_criterion_to_the_turns_until_it_was_met() -> None:
    met_at = [0, 2, None, 1, None, 0]
    reported = [[{"row 1": at is not None and turn >= at} for turn in range(3)] for at in met_at]
    rollout = replace(a_rollout([[0.0] * 3] * 6, groups=[0] * 6), criteria=reported)
    (term,) = TERMS["cm2_step"]
    mean = (1 + 0.81 + 0.9 + 1) / 6  # each turn that it takes costs a tenth
    expected = [[1 - mean, 0, 0], [0.81 - mean] * 3, [-mean] * 3, [0.9 - mean] * 2 + [0], [-mean] * 3, [1 - mean, 0, 0]]
    assert of_terms([term.model_copy(update={"gamma": 0.9})], rollout) == [pytest.approx(row) for row in expected]


def test_cm2_a_criterion_is_open_from_its_first_report_and_one_without_is_not_false() -> None:
    (term,) = TERMS["cm2_step"]
    late = [[{}, {"row 1": row > 0}, {"row 1": True}] for row in range(6)]
    rollout = replace(a_rollout([[0.0] * 3] * 6, groups=[0] * 6), criteria=late)
    mean = (0.9 + 5) / 6
    expected = [[0, 0.9 - mean, 0.9 - mean], *[[0, 1 - mean, 0]] * 5]
    assert of_terms([term.model_copy(update={"gamma": 0.9})], rollout) == [pytest.approx(row) for row in expected]
    silent = replace(rollout, criteria=[*late[:5], [{}] * 3])
    mean = (0.9 + 4) / 5
    expected = [[0, 0.9 - mean, 0.9 - mean], *[[0, 1 - mean, 0]] * 4, [0, 0, 0]]
    assert of_terms([term.model_copy(update={"gamma": 0.9})], silent) == [pytest.approx(row) for row in expected]
    # Criteria add up.
    both = [[{**turn, "row 2": index > 1} for turn in own] for index, own in enumerate(late)]
    alone = [[{"row 2": index > 1}] * 3 for index in range(6)]
    sums = [of_terms([term], replace(rollout, criteria=each)) for each in (late, alone, both)]
    for first, second, together in zip(*sums, strict=True):
        assert together == pytest.approx([a + b for a, b in zip(first, second, strict=True)])


def test_mt_grpo_adds_the_turns_advantage_to_the_outcomes() -> None:
    third = 0.5 / (math.sqrt(0.1) + 1e-6)  # returns 1.5, 1, .5, 1, 1, 1
    outcome = [third, 0, -third, 0, 0, 0]
    first = [1.118031, -1.118031, 0, 1.118031, 0, -1.118031]
    expected = [
        [a + b for a, b in zip(outcome, first, strict=True)],
        [a + b if len(own) > 1 else 0.0 for a, b, own in zip(outcome, SECOND_SCALED, CHECKLIST, strict=True)],
    ]
    assert of_terms(TERMS["mt_grpo"], a_checklist(CHECKLIST)) == columns(*expected)


def of_agents(episodes: list[list[tuple[str, float]]], term: CreditTerm) -> list[list[float]]:
    """Each episode's turns, of a token each: the agent and its reward."""
    most = max(map(len, episodes))
    rollout = a_rollout(
        [[reward for _, reward in own] + [0.0] * (most - len(own)) for own in episodes],
        groups=[0] * len(episodes),
        mask=[[1] * len(own) + [0] * (most - len(own)) for own in episodes],
    )
    rollout = replace(rollout, agents=[[name for name, _ in own] for own in episodes])
    items = of_terms([term], rollout)
    return [own[: len(episode)] for own, episode in zip(items, episodes, strict=True)]


TEAM = [[("S", 0.0), ("V", 1.0)], [("S", 0.0), ("S", 0.0), ("V", 0.0)], [("S", 1.0)], [("S", 0.0), ("V", 0.0)]]


def test_dr_mas_compares_each_agent_with_itself_once_an_episode() -> None:
    (term,) = TERMS["dr_mas"]
    s, v = 0.866024, (1.154699, -0.577349)
    assert of_agents(TEAM, term) == columns_of([[s, v[0]], [-s, -s, v[1]], [s], [-s, v[1]]])


def test_dr_mas_by_calls_and_pooled_as_others_have_it() -> None:
    calls = CreditTerm(unit="turn", key=("agent",), scale="std")
    a, b, v = 1.095443, -0.730295, (1.154699, -0.577349)
    assert of_agents(TEAM, calls) == columns_of([[a, v[0]], [b, b, v[1]], [a], [b, v[1]]])
    pooled = CreditTerm(unit="turn", scale="std")
    a, b = 1.207612, -0.724567
    assert of_agents(TEAM, pooled) == columns_of([[a, a], [b, b, b], [a], [b, b]])


def test_dr_mas_takes_rewards_of_another_size_for_what_they_are() -> None:
    played = [[("S", s), ("V", v)] for s, v in zip([1.0, 0, 1, 0], [0.4, 0.1, 0.4, 0.1], strict=True)]
    own = CreditTerm(unit="agent", score="reward", key=("agent",), scale="std")
    assert of_agents(played, own) == columns_of([[0.866024, 0.866020], [-0.866024, -0.866020]] * 2)
    pooled = CreditTerm(unit="agent", score="reward", scale="std")
    assert of_agents(played, pooled) == columns_of([[1.500168, 0.060007], [-0.900101, -0.660074]] * 2)


def test_dr_mas_with_one_agent_is_grpo() -> None:
    alone = [[("", 1.0), ("", 0.0)], [("", 0.0)], [("", 0.5)]]
    advantages = of("grpo", [1.0, 0.0, 0.5], [0, 0, 0])
    expected = [[a] * len(own) for a, own in zip(advantages, alone, strict=True)]
    assert of_agents(alone, TERMS["dr_mas"][0]) == columns_of(expected)


def columns_of(rows: list[list[float]]) -> list[Any]:
    return [pytest.approx(row, abs=1e-6) for row in rows]


def test_groups_may_be_the_siblings_of_a_pivot_or_strata() -> None:
    """DEEP-GRPO's branches and Blockwise's outcome-conditioned baselines are comparisons as well."""
    siblings = [1.0, 0, 0, 0, 0, 0, 0, 1]
    assert of("dr_grpo", siblings, [4] * 8) == pytest.approx([0.75, *[-0.25] * 6, 0.75])
    assert of("grpo", siblings, [4] * 8) == pytest.approx([1.620182, *[-0.540061] * 6, 1.620182], abs=1e-6)
    brier, right = [-0.01, -0.36, -0.09, -0.64, -0.36, -0.09], [1, 1, 0, 0, 0, 1]
    strata = [0.143333, -0.206667, 0.273333, -0.276667, 0.003333, 0.063333]
    assert of("dr_grpo", brier, right) == pytest.approx(strata, abs=1e-6)
    pooled = [0.248333, -0.101667, 0.168333, -0.381667, -0.101667, 0.168333]
    assert of("dr_grpo", brier, [0] * 6) == pytest.approx(pooled, abs=1e-6)
    others = of("rloo", brier, right)
    assert [others[0], others[1], others[5]] == pytest.approx([0.215, -0.31, 0.095], abs=1e-6)


# --- properties of any term -------------------------------------------------------------------------------------------

terms = st.builds(
    CreditTerm,
    baseline=st.sampled_from(["mean", "others"]),
    scale=st.sampled_from(["none", "std"]),
    min_peers=st.integers(2, 4),
)
scores = st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=12)


def compared(term: CreditTerm, values: list[float], peers: list[int]) -> list[float]:
    items: list[float] = compare(term, torch.tensor(values, dtype=torch.float64), torch.tensor(peers)).tolist()
    return items


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
    parts = [of_terms([each], rollout) for each in (CreditTerm(), turn)]
    assert both == [
        pytest.approx([2 * a + b / 2 for a, b in zip(*rows, strict=True)]) for rows in zip(*parts, strict=True)
    ]
    assert of_terms([CreditTerm(smallest=0.4)], rollout) == [[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"unit": "criterion"}, "cannot have score return"),
        ({"score": "met"}, "cannot have score met"),
        ({"unit": "criterion", "score": "met", "key": ["turn"]}, "drop parts, without, key and strata"),
        ({"score": "to_go"}, "has one score, its return"),
        ({"unit": "agent", "score": "to_go"}, "nothing that is to go"),
        ({"unit": "agent", "key": ["state"]}, "has no state of its own"),
        ({"key": ["turn"]}, "has no turn of its own"),
        ({"key": ["agent"]}, "spans all agents"),
        ({"unit": "turn", "key": ["turn", "turn"]}, "names something twice"),
        ({"unit": "turn", "gamma": 0.9}, "discounts nothing"),
        ({"baseline": "none", "scale": "std"}, "compares with nobody"),
        ({"weight": 0}, "greater than 0"),
        ({"min_peers": 1}, "greater than or equal to 2"),
        ({"unit": "word"}, "'episode'"),
    ],
)
def test_a_term_without_a_meaning_is_refused_with_a_sentence(values: Any, sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        CreditTerm.model_validate(values)


# --- what the dispatcher adds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_runs_and_leaves_unsampled_tokens_alone(name: str) -> None:
    rollout = a_rollout(
        [[0, 0.5, 0, 1], [0, 0, 0, 0.25]] * 3,
        groups=[4] * 6,
        mask=[[1, 1, 0, 1], [1, 0, 0, 1]] * 3,
        turns=[[0, 0, -1, 1], [0, -1, -1, 1]] * 3,
        values=[[0.1, 0.2, 9, 0.3], [0.1, 9, 9, 0.2]] * 3,
        state_keys=[[b"A", b"B"], [b"A", b"B"]] * 3,
    )
    rollout = replace(
        rollout,
        agents=[["S", "V"]] * 6,
        parts=[[{"criteria": 1.0}, {}], [{}, {"criteria": 0.5}]] * 3,
        criteria=[[{"a": False}, {"a": True}], [{"a": False}, {}]] * 3,
        blocks_BT=torch.tensor([[0, 5, -1, 5], [0, -1, -1, 5]] * 3),
        switches_BT=torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]] * 3).bool(),
    )
    config = AlgorithmConfig(preset="dapo", advantage=name)
    advantages = compute_advantages(config, rollout)
    assert advantages.advantages_BT.shape == (6, 4)
    assert advantages.advantages_BT[~rollout.mask_BT].eq(0).all()
    assert advantages.advantages_BT[rollout.mask_BT].ne(0).any()
    assert (advantages.returns_BT is not None) == config.needs_critic


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


def test_soft_reweighting_scales_by_the_groups_deviation_of_raw_returns() -> None:
    groups = [0, 0, 1, 1, 2, 2, 3]
    returns = torch.tensor([1.0, 0.0, 0.75, 0.25, 2.0, 2.0, 9.0])
    assert soft_weights(returns, torch.tensor(groups)).tolist() == pytest.approx([1, 1, 0.5, 0.5, 0, 0, 0])
    rollout = a_rollout([[r] for r in returns.tolist()], groups=groups)
    plain = compute_advantages(AlgorithmConfig(preset="dapo"), rollout).advantages_BT
    soft = compute_advantages(AlgorithmConfig(preset="dapo", soft_reweight=True), rollout).advantages_BT
    torch.testing.assert_close(soft, plain * doubles([1, 1, 0.5, 0.5, 0, 0, 0]).T)
    assert not soft_weights(torch.ones(4), torch.tensor([0, 0, 1, 1])).any()


@given(seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_advantages_move_with_their_episodes_when_the_batch_is_shuffled(seed: int) -> None:
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed)).tolist()
    rewards, values = random_doubles(seed, 12, 3).tolist(), random_doubles(seed + 1, 12, 3).tolist()
    groups = [0] * 6 + [1] * 6

    def in_order(places: Sequence[int]) -> RolloutBatch:
        rollout = a_rollout(
            [rewards[i] for i in places],
            groups=[groups[i] for i in places],
            values=[values[i] for i in places],
            state_keys=[[b"A", b"B", b"CB"[i % 2 :][:1]] for i in places],
        )
        return replace(
            rollout,
            agents=[["S", "SV"[i % 2], "V"] for i in places],
            parts=[[{"criteria": reward} for reward in rewards[i]] for i in places],
            criteria=[[{"a": reward > 0, "b": reward > 1} for reward in rewards[i]] for i in places],
            blocks_BT=torch.tensor([[0, 5, 5 * (i % 2)] for i in places]),
            switches_BT=torch.tensor([[False, i % 3 == 0, False] for i in places]),
        )

    straight, shuffled = in_order(range(12)), in_order(order)
    for name in ESTIMATORS:
        config = AlgorithmConfig(preset="dapo", advantage=name)
        torch.testing.assert_close(
            compute_advantages(config, shuffled).advantages_BT,
            compute_advantages(config, straight).advantages_BT[order],
        )
