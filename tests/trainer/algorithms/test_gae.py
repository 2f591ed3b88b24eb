"""GAE over sampled tokens, over turns, and with one baseline per episode."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from starpod.trainer.algorithms.advantages import compute_advantages, whiten
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.gae import bilevel_gae, first_token, gae, trajectory_baseline
from starpod.trainer.algorithms.turns import turn_table
from tests.trainer.algorithms.builders import a_rollout, assert_close, doubles, random_doubles, random_layout

# Two turns of two sampled tokens, with two tokens of an observation between them.
REWARDS = (0.0, 0.2, 0.0, 0.0, 0.0, 1.0)
VALUES = (0.1, 0.2, 9.0, 9.0, 0.3, 0.4)
MASK = (1, 1, 0, 0, 1, 1)
TURNS = (0, 0, -1, -1, 1, 1)


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return doubles(REWARDS), doubles(VALUES), torch.tensor([MASK], dtype=torch.bool)


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        (1.0, 0.95, (0.989675, 0.9365, 0, 0, 0.67, 0.6)),
        (0.99, 0.95, (0.961390, 0.918012, 0, 0, 0.660300, 0.6)),
        (1.0, 1.0, (1.1, 1.0, 0, 0, 0.7, 0.6)),
    ],
)
def test_gae_skips_tokens_between_sampled_tokens(gamma: float, lam: float, expected: tuple[float, ...]) -> None:
    rewards, values, mask = tensors()
    assert_close(gae(rewards, values, mask, gamma=gamma, lam=lam), *expected)


def test_a_reward_where_no_token_was_sampled_is_refused_with_what_to_do() -> None:
    rollout = a_rollout([[0, 0, 0.2, 0, 0, 1]], groups=[0], mask=[MASK], turns=[TURNS], values=[VALUES])
    with pytest.raises(ValueError, match=r"episode 0 .* 0\.2 at position 2"):
        compute_advantages(AlgorithmConfig(), rollout)


def test_what_the_critic_should_have_said_is_advantage_plus_value() -> None:
    rollout = a_rollout([REWARDS], groups=[0], mask=[MASK], turns=[TURNS], values=[VALUES])
    advantages = compute_advantages(AlgorithmConfig(whiten=False), rollout)
    assert_close(advantages.advantages_BT, 1.1, 1.0, 0, 0, 0.7, 0.6)
    assert advantages.returns_BT is not None
    assert_close(advantages.returns_BT, 1.2, 1.2, 0, 0, 1.0, 1.0)
    assert advantages.value_mask_BT.tolist() == [[True, True, False, False, True, True]]


@pytest.mark.parametrize(
    ("turn_gamma", "turn_lam", "expected"),
    [(0.95, 0.95, (1.01675, 0.91675, 0, 0, 0.7, 0.6)), (1.0, 1.0, (1.1, 1.0, 0, 0, 0.7, 0.6))],
)
def test_bilevel_gae_gives_turns_their_credit_first(
    turn_gamma: float, turn_lam: float, expected: tuple[float, ...]
) -> None:
    rewards, values, mask = tensors()
    advantages = bilevel_gae(rewards, values, mask, torch.tensor([TURNS]), turn_gamma=turn_gamma, turn_lam=turn_lam)
    assert_close(advantages, *expected)


@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_equals_the_sum_that_defines_it(seed: int, gamma: float, lam: float) -> None:
    mask, _ = random_layout(seed, 3, 9)
    rewards, values = random_doubles(seed, 3, 9), random_doubles(seed + 1, 3, 9)
    bootstrap = random_doubles(seed + 2, 3)
    advantages = gae(rewards, values, mask, bootstrap_B=bootstrap, gamma=gamma, lam=lam)
    for row in range(3):
        places = mask[row].nonzero().flatten().tolist()
        r, v = rewards[row, places].tolist(), [*values[row, places].tolist(), bootstrap[row].item()]
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
        for i, place in enumerate(places):
            expected = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(r)))
            assert advantages[row, place].item() == pytest.approx(expected, abs=1e-9)
    assert not advantages[~mask].any()


@given(seed=st.integers(0, 10_000))
def test_with_nothing_discounted_both_levels_are_return_minus_value(seed: int) -> None:
    mask, turns = random_layout(seed, 3, 9)
    # A KL penalty rewards every token, not only the last ones of turns.
    rewards, values = torch.where(mask, random_doubles(seed, 3, 9), 0.0), random_doubles(seed + 1, 3, 9)
    bootstrap = random_doubles(seed + 2, 3)
    flat = gae(rewards, values, mask, bootstrap_B=bootstrap)
    torch.testing.assert_close(bilevel_gae(rewards, values, mask, turns, bootstrap_B=bootstrap, turn_gamma=1.0), flat)
    to_go = rewards.flip(1).cumsum(1).flip(1) + bootstrap.unsqueeze(1)
    torch.testing.assert_close(flat, torch.where(mask, to_go - values, 0.0))


@given(seed=st.integers(0, 10_000))
def test_the_first_token_of_a_turn_has_the_turns_advantage(seed: int) -> None:
    mask, turns = random_layout(seed, 3, 9)
    # Some turns earn nothing, and are turns all the same.
    rewards, values = (
        torch.where(mask & (turns % 2 == 0), random_doubles(seed, 3, 9), 0.0),
        random_doubles(seed + 1, 3, 9),
    )
    bootstrap = random_doubles(seed + 2, 3)
    table = turn_table(mask, turns)
    advantages = bilevel_gae(rewards, values, mask, turns, bootstrap_B=bootstrap, turn_gamma=0.8, turn_lam=0.7)
    own_values = table.total(torch.where(table.first_BT, values, 0.0))
    of_turns = gae(table.total(rewards), own_values, table.mask_BK, bootstrap_B=bootstrap, gamma=0.8, lam=0.7)
    torch.testing.assert_close(table.total(torch.where(table.first_BT, advantages, 0.0)), of_turns)


def test_turns_that_go_back_or_are_missing_are_refused() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    for turns in ([0, 1, 0], [0, -1, 1]):
        with pytest.raises(ValueError, match="never decreasing"):
            turn_table(mask, torch.tensor([turns]))


def test_a_turn_table_finds_first_and_last_tokens_around_holes() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0, 1]], dtype=torch.bool)
    table = turn_table(mask, torch.tensor([[0, 0, 7, 2, -1, 2]]))
    assert table.first_BT.tolist() == [[True, False, False, True, False, False]]
    assert table.last_BT.tolist() == [[False, True, False, False, False, True]]
    assert table.mask_BK.tolist() == [[True, False, True]]


def test_the_trajectory_baseline_is_the_first_tokens_value_alone() -> None:
    rewards, values, mask = tensors()
    mask[0, 0] = False
    rewards[0, 0] = 0.0
    advantages, returns = trajectory_baseline(rewards, values, mask)
    assert_close(advantages, 0, 1.0, 0, 0, 1.0, 1.0)
    assert_close(returns, 0, 1.2, 0, 0, 1.2, 1.2)
    values[0, 4:] = 77.0
    torch.testing.assert_close(trajectory_baseline(rewards, values, mask)[0], advantages)
    cut, _ = trajectory_baseline(rewards, values, mask, bootstrap_B=torch.tensor([8.0]), gamma=0.5)
    assert_close(cut[0, :2], 0, 0.2 + 0.25 * 1.0 + 0.125 * 8.0 - 0.2)


def test_with_a_trajectory_baseline_the_critic_learns_at_the_first_token() -> None:
    rollout = a_rollout([REWARDS], groups=[0], mask=[MASK], turns=[TURNS], values=[VALUES])
    advantages = compute_advantages(AlgorithmConfig(advantage={"baseline": "trajectory"}, whiten=False), rollout)
    assert_close(advantages.advantages_BT, 1.1, 1.1, 0, 0, 1.1, 1.1)
    assert torch.equal(advantages.value_mask_BT, first_token(rollout.mask_BT))


def test_whitening_looks_at_sampled_tokens_alone() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    white = whiten(doubles([1.0, 2.0, 1e9], [6.0, -1e9, 5.0]), mask)
    assert white[mask].mean().item() == pytest.approx(0, abs=1e-9) and white[mask].std().item() == pytest.approx(1)
    assert not white[~mask].any()
    # Rounding is not blown up, and one token gives zero.
    for items in ([0.3, 0.3, 0.3], [0.3, 0.3, 0.3 + 1e-12]):
        assert whiten(doubles(items), torch.ones(1, 3, dtype=torch.bool)).abs().max() < 1e-6
    assert not whiten(doubles([3.0, 4.0]), torch.tensor([[True, False]])).any()
