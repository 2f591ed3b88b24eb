"""Estimators that compare the episodes of a group, and what the dispatcher adds to all of them."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starpod.trainer.algorithms.advantages import ESTIMATORS, compute_advantages, soft_weights
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.gigpo import gigpo
from starpod.trainer.algorithms.group_baseline import (
    dr_grpo,
    group_statistics,
    grpo,
    loop,
    maxrl,
    reinforce_plus_plus,
    rloo,
)
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode
from tests.trainer.algorithms.builders import a_rollout, doubles, random_doubles
from tests.trainer.turns import a_turn

PER_EPISODE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "maxrl": maxrl,
    "rloo": rloo,
    "loop": loop,
}


def of(estimate: Callable[[Tensor, Tensor], Tensor], returns: list[float], groups: list[int]) -> list[float]:
    items: list[float] = estimate(torch.tensor(returns, dtype=torch.float64), torch.tensor(groups)).tolist()
    return items


@pytest.mark.parametrize(
    ("name", "size"), [("grpo", 0.866024), ("rloo", 0.666667), ("loop", 0.666667), ("dr_grpo", 0.5), ("maxrl", 1.0)]
)
def test_two_of_four_succeed(name: str, size: float) -> None:
    assert of(PER_EPISODE[name], [1, 0, 0, 1], [7] * 4) == pytest.approx([size, -size, -size, size], abs=5e-7)


@pytest.mark.parametrize("name", PER_EPISODE)
def test_an_episode_alone_in_its_group_has_advantage_zero(name: str) -> None:
    assert of(PER_EPISODE[name], [5.0, 1.0, 0.0], [3, 9, 9])[0] == 0.0


@pytest.mark.parametrize("name", PER_EPISODE)
@given(data=st.data())
@settings(max_examples=25)
def test_groups_are_told_by_id_and_order_does_not_matter(name: str, data: st.DataObject) -> None:
    returns = data.draw(st.lists(st.floats(0, 10), min_size=1, max_size=12))
    groups = data.draw(st.lists(st.sampled_from([-4, 0, 3, 10**12]), min_size=len(returns), max_size=len(returns)))
    order = data.draw(st.permutations(range(len(returns))))
    straight = of(PER_EPISODE[name], returns, groups)
    permuted = of(PER_EPISODE[name], [returns[i] for i in order], [groups[i] for i in order])
    assert permuted == pytest.approx([straight[i] for i in order], rel=1e-6, abs=1e-6)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20), st.floats(-50, 50))
@settings(max_examples=40)
def test_leave_one_out_is_what_it_says_and_ignores_a_shift(returns: list[float], shift: float) -> None:
    expected = [r - (sum(returns) - r) / (len(returns) - 1) for r in returns]
    assert of(rloo, returns, [0] * len(returns)) == pytest.approx(expected, abs=1e-9)
    assert of(rloo, [r + shift for r in returns], [0] * len(returns)) == pytest.approx(expected, abs=1e-9)


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


def test_small_differences_of_large_returns_are_no_rounding() -> None:
    advantages = compute_advantages(AlgorithmConfig(preset="dapo"), as_trained([[1000.0], [1000.0], [1000.01]]))
    third = 0.01 / math.sqrt(3)
    expected = [-third / math.sqrt(3) / (third + 1e-6)] * 2 + [2 * third / math.sqrt(3) / (third + 1e-6)]
    assert advantages.advantages_BT.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_maxrl_has_no_signal_without_a_success() -> None:
    assert of(maxrl, [0, 0, -0.1, -0.3], [0, 0, 1, 1]) == [0, 0, 0, 0]


def test_loop_leaves_out_small_advantages() -> None:
    assert of(loop, [1.0, 1.004, 0.5, 0.8], [0, 0, 1, 1]) == pytest.approx([0, 0, -0.3, 0.3])


def test_reinforce_plus_plus_is_the_discounted_reward_to_go_whitened() -> None:
    mask = torch.tensor([[1, 0, 1, 1]], dtype=torch.bool)
    assert reinforce_plus_plus(doubles([0, 0, 1, 4]), mask, gamma=0.5).tolist() == [[1.5, 0, 3, 4]]
    rollout = a_rollout([[0, 1], [0, 0]], groups=[0, 0])
    advantages = compute_advantages(AlgorithmConfig(preset="dapo", advantage="reinforce_plus_plus"), rollout)
    assert advantages.advantages_BT.std().item() == pytest.approx(1, abs=1e-6)
    based = AlgorithmConfig(preset="dapo", advantage="reinforce_plus_plus_baseline")
    rollout = a_rollout([[3.0], [1.0], [10.0], [8.0]], groups=[0, 0, 1, 1])
    assert compute_advantages(based, rollout).advantages_BT.flatten().tolist() == pytest.approx(
        [math.sqrt(3) / 2, -math.sqrt(3) / 2] * 2
    )


# --- GiGPO ------------------------------------------------------------------------------------------------------------

GIGPO_REWARDS = doubles([0, 0, 1], [0, 0, 0])
GIGPO_KEYS = [[b"A", b"B", b"C"], [b"A", b"B", b"B"]]


def of_gigpo(keys: list[list[bytes]], groups: tuple[int, int] = (0, 0), **options: float) -> Tensor:
    turns = torch.arange(3).expand(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    return gigpo(GIGPO_REWARDS, mask, turns, torch.tensor(groups), keys, **options)  # type: ignore[arg-type]


def test_gigpo_compares_turns_that_began_in_the_same_state() -> None:
    expected = doubles([0.5 + 0.45125, 0.5 + 0.633333, 0.5], [-0.5 - 0.45125, -0.5 - 0.316667, -0.5 - 0.316667])
    torch.testing.assert_close(of_gigpo(GIGPO_KEYS), expected, atol=5e-7, rtol=0)
    half = of_gigpo(GIGPO_KEYS, weight=0.5)
    torch.testing.assert_close(half, (expected + of_gigpo(GIGPO_KEYS, weight=0.0)) / 2, atol=5e-7, rtol=0)


@pytest.mark.parametrize(("normalise", "same"), [(True, grpo), (False, dr_grpo)])
def test_gigpo_without_its_steps_is_grpo(normalise: bool, same: Callable[[Tensor, Tensor], Tensor]) -> None:
    expected = same(GIGPO_REWARDS.sum(1), torch.tensor([0, 0])).unsqueeze(1).expand(2, 3)
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
    rewards = doubles([0, 0, 0, 1], [0, 0, 0, 0])
    turns = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 1]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    advantages = gigpo(rewards, mask, turns, torch.tensor([0, 0]), [[b"A", b"B"], [b"A", b"B"]], gamma=0.5)
    torch.testing.assert_close(advantages, doubles([0.75, 0, 0.75, 1.0], [-0.75, -1.0, -1.0, -1.0]))


def test_gigpo_needs_the_key_of_every_state() -> None:
    for keys in ([], [[b"A", b"", b"C"], [b"A", b"B", b"B"]]):
        with pytest.raises(ValueError, match="state_key"):
            of_gigpo(keys)


# --- what the dispatcher adds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_runs_and_leaves_unsampled_tokens_alone(name: str) -> None:
    mask = [[1, 1, 0, 1], [1, 0, 0, 1]]
    rollout = a_rollout(
        [[0, 0.5, 0, 1], [0, 0, 0, 0.25]],
        groups=[4, 4],
        mask=mask,
        turns=[[0, 0, -1, 1], [0, -1, -1, 1]],
        values=[[0.1, 0.2, 9, 0.3], [0.1, 9, 9, 0.2]],
        state_keys=[[b"A", b"B"], [b"A", b"B"]],
    )
    config = AlgorithmConfig(preset="dapo", advantage=name)
    advantages = compute_advantages(config, rollout)
    assert advantages.advantages_BT.shape == (2, 4)
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
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    rewards, values = random_doubles(seed, 6, 3).tolist(), random_doubles(seed + 1, 6, 3).tolist()
    groups, keys = [0, 0, 0, 1, 1, 1], [[b"A", b"B", b"C"], [b"A", b"B", b"B"]] * 3
    straight = a_rollout(rewards, groups=groups, values=values, state_keys=keys)
    shuffled = a_rollout(
        [rewards[i] for i in order],
        groups=[groups[i] for i in order],
        values=[values[i] for i in order],
        state_keys=[keys[i] for i in order],
    )
    for name in ESTIMATORS:
        config = AlgorithmConfig(preset="dapo", advantage=name)
        torch.testing.assert_close(
            compute_advantages(config, shuffled).advantages_BT,
            compute_advantages(config, straight).advantages_BT[order],
        )
