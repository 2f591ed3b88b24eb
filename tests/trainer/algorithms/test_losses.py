"""Losses: golden numbers of the clipped loss, the readings of a clip per turn, gradients by finite differences, and
averages that no split into micro-batches can change."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.losses import (
    PolicyLoss,
    clamped_difference,
    kl_divergence,
    stretch_log_ratio,
    token_weights,
    value_loss,
)
from tests.trainer.algorithms.builders import doubles, loss_of, random_doubles, random_layout

KINDS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dual": {"dual_clip": 1.5},
    "decay": {"clip_decay": 0.5},
    "bounds": {"clip_low": [0.3, 0.1], "clip_high": [0.1, 0.4, 0.0]},
    "gspo": {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    "dppo": {"kind": "dppo"},
}


def a_config(**options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(preset="dapo", loss=options)


def at_ratios(
    config: AlgorithmConfig, ratios: list[float], advantages: list[float], turns: list[int] | None = None
) -> PolicyLoss:
    """One episode whose tokens have these ratios."""
    return loss_of(config, doubles(ratios).log(), 0.0, advantages, turns=turns)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "loss"),
    [
        (1.5, 1.0, None, -1.28),
        (0.5, -1.0, None, 0.8),
        (5.0, -1.0, 3.0, 3.0),
        (5.0, -1.0, None, 5.0),
        (0.5, 1.0, None, -0.5),
        (1.0, 2.0, 3.0, -2.0),
    ],
)
def test_the_clip_at_one_token(ratio: float, advantage: float, dual: float | None, loss: float) -> None:
    result = at_ratios(a_config(dual_clip=dual), [ratio], [advantage])
    assert result.per_token_BT.item() == pytest.approx(loss)
    assert result.ratio_BT.item() == pytest.approx(ratio)


def test_clipped_tokens_are_reported_by_bound() -> None:
    ratios = [1.5, 0.5, 1.5, 0.5, 1.25, 0.75, 5.0]
    result = at_ratios(a_config(dual_clip=3.0), ratios, [1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    assert result.clipped_high_BT.tolist() == [[True, False, False, False, False, False, True]]
    assert result.clipped_low_BT.tolist() == [[False, True, False, False, False, True, False]]


def test_log_ratios_are_held_within_twenty() -> None:
    items = clamped_difference(torch.tensor([-500.0, 3.0, 500.0]), torch.tensor([0.0, 1.0, 0.0]))
    assert items.tolist() == [-20.0, 2.0, 20.0]
    assert at_ratios(a_config(), [math.exp(600)], [-1.0]).per_token_BT.item() == pytest.approx(math.exp(20))


def test_the_ratio_of_an_episode_is_the_geometric_mean_of_its_tokens() -> None:
    log_ratio = doubles([0.1, 9.0, -0.05, 0.02])
    mask = torch.tensor([[True, False, True, True]])
    ratio = stretch_log_ratio(log_ratio, mask, torch.zeros(1, 4, dtype=torch.int64)).exp()
    assert ratio[0, [0, 2, 3]].tolist() == pytest.approx([1.023608] * 3, abs=5e-7)
    config = AlgorithmConfig(preset="dapo", loss="gspo")
    result = loss_of(config, log_ratio, 0.0, [1] * 4, mask=[1, 0, 1, 1], turns=[0, -1, 0, 1])
    assert result.per_token_BT.tolist() == [pytest.approx([-1.0004, 0, -1.0004, -1.0004])]


# --- CISPO and DPPO ---------------------------------------------------------------------------------------------------


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    config = a_config(kind="cispo", clip_high=1.0)
    logprobs_BT = doubles([-1.0, -1.0, -1.0]).requires_grad_()
    old_BT = doubles([-1.0, -4.0, 0.0])  # ratios of 1 and about 20
    loss = loss_of(config, logprobs_BT, old_BT, [2.0, -3.0, 1.0], mask=[1, 1, 0])
    # -min(rho, 2) A log p: -1 x 2 x -1 and -2 x -3 x -1.
    assert loss.per_token_BT.tolist() == [[2.0, -6.0, 0.0]]
    loss.per_token_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs_BT.grad is not None and logprobs_BT.grad.tolist() == [[-2.0, 6.0, 0.0]]
    assert loss.clipped_high_BT.tolist() == [[False, True, False]]


@pytest.mark.parametrize(
    ("options", "old", "new", "advantage", "loss"),
    [
        # A rare token may become ten times as likely, as its probability moves by 0.09; PPO would clip at 1.28.
        ({}, 0.01, 0.1, 1.0, -10.0),
        # A likely one may not move from 0.6 to 0.8, a ratio of 1.33, nor back.
        ({}, 0.6, 0.8, 1.0, 0.0),
        ({}, 0.8, 0.6, -2.0, 0.0),
        # Back towards the old policy it may.
        ({}, 0.6, 0.8, -3.0, 4.0),
        ({}, 0.8, 0.6, 1.0, -0.75),
        ({"divergence_low": 0.05}, 0.5, 0.4, -1.0, 0.0),
        ({"divergence_high": 0.05}, 0.5, 0.4, -1.0, 0.8),
        # KL: 0.5 ln(0.5 / 0.6) + 0.5 ln(0.5 / 0.4) = 0.0204; 0.5 ln(0.5 / 0.7) + 0.5 ln(0.5 / 0.3) = 0.0872.
        ({"divergence": "kl"}, 0.5, 0.6, 1.0, -1.2),
        ({"divergence": "kl"}, 0.5, 0.7, 1.0, 0.0),
        ({"divergence": "kl", "divergence_high": 0.087}, 0.5, 0.7, 1.0, 0.0),
        ({"divergence": "kl", "divergence_high": 0.0873}, 0.5, 0.7, 1.0, -1.4),
        ({"divergence": "kl"}, 1.0, 1.0, 1.0, -1.0),
    ],
)
def test_dppo_bounds_the_divergence(
    options: dict[str, Any], old: float, new: float, advantage: float, loss: float
) -> None:
    result = loss_of(a_config(kind="dppo", **options), doubles([new]).log(), math.log(old), [advantage])
    assert result.per_token_BT.item() == pytest.approx(loss)
    assert result.clipped_high_BT.item() == (loss == 0 and advantage > 0)
    assert result.clipped_low_BT.item() == (loss == 0 and advantage < 0)


# --- per turn ---------------------------------------------------------------------------------------------------------

# Two tokens in each of three turns.
RATIOS, TURNS = [1.5, 1.5, 1.5, 1.5, 1.5, 1.05], [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("options", "above", "ratio", "below"),
    [
        (
            {"clip_low": 0.2, "clip_high": 0.4, "clip_decay": 0.5},
            [-1.4, -1.4, -1.2, -1.2, -1.1, -1.05],
            0.5,
            [0.8, 0.8, 0.9, 0.9, 0.95, 0.95],
        ),
        (
            {"clip_low": [0.5, 0.1], "clip_high": [0.1, 0.3]},
            [-1.1, -1.1, -1.3, -1.3, -1.3, -1.05],
            0.4,
            [0.5, 0.5, 0.9, 0.9, 0.9, 0.9],
        ),
    ],
    ids=["decay", "listed"],
)
def test_bounds_by_turn(options: dict[str, Any], above: list[float], ratio: float, below: list[float]) -> None:
    config = a_config(**options)
    assert at_ratios(config, RATIOS, [1.0] * 6, TURNS).per_token_BT.tolist() == [pytest.approx(above)]
    assert at_ratios(config, [ratio] * 6, [-1.0] * 6, TURNS).per_token_BT.tolist() == [pytest.approx(below)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_while_the_ratio_is_one_every_reading_is_plain_ppo(kind: str, seed: int) -> None:
    mask, turns = random_layout(seed, 4, 7)
    old = random_doubles(seed, 4, 7)
    # One advantage per episode, where the ratio of a stretch has the gradient of its tokens'.
    advantages = random_doubles(seed + 1, 4, 1).expand(4, 7)
    weights = token_weights(mask, "seq-mean-token-mean", max_length=7).double()

    def gradient(config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
        logprobs = old.clone().requires_grad_()
        result = config.policy_loss(logprobs, old, advantages, mask_BT=mask, turns_BT=turns)
        loss = (weights * result.per_token_BT).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert logprobs.grad is not None
        return loss.detach(), logprobs.grad

    plain, other = gradient(a_config()), gradient(a_config(**KINDS[kind]))
    torch.testing.assert_close(other, plain)
    torch.testing.assert_close(plain[1], -weights * advantages)


# --- gradients by finite differences ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradient_of_the_policy_loss(kind: str, seed: int) -> None:
    """The gradient is that of the stretch's own ratio where advantage and weight are constant."""
    mask, turns = random_layout(seed, 3, 6)
    of_stretches = kind == "gspo"
    old, advantages = random_doubles(seed, 3, 6), random_doubles(seed + 1, 3, 1 if of_stretches else 6).expand(3, 6)
    weights = token_weights(mask, "seq-mean-token-mean", max_length=6).double()
    config = a_config(**KINDS[kind])
    new = (old + 0.3 * random_doubles(seed + 2, 3, 6)).requires_grad_()

    def loss(logprobs: Tensor) -> Tensor:
        result = config.policy_loss(logprobs, old, advantages, mask_BT=mask, turns_BT=turns)
        return (weights * result.per_token_BT).sum()

    loss(new).backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    # autograd's own finite differences do not see through the stop-gradient, so take them here.
    for place in mask.nonzero().tolist():
        step = torch.zeros_like(new)
        step[tuple(place)] = 1e-6
        slope = ((loss(new + step) - loss(new - step)) / 2e-6).item()
        assert new.grad[tuple(place)].item() == pytest.approx(slope, abs=1e-6)


OTHER, RETURNS = random_doubles(1, 3, 4), random_doubles(2, 3, 4)


@pytest.mark.parametrize(
    "function",
    [
        *(functools.partial(kl_divergence, estimator, ref_logprobs=OTHER) for estimator in ("k1", "k2", "k3")),
        *(
            functools.partial(value_loss, old_values_BT=OTHER, returns_BT=RETURNS, value_clip=clip)
            for clip in (None, 0.2)
        ),
    ],
)
def test_gradient_of_kl_and_of_the_value_loss(function: Callable[[Tensor], Tensor]) -> None:
    at = (OTHER + 0.3 * random_doubles(3, 3, 4)).requires_grad_()
    assert torch.autograd.gradcheck(lambda inputs: function(inputs).sum(), (at,), eps=1e-6, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "cispo"])
def test_what_is_masked_has_no_loss_and_no_gradient_whatever_it_holds(kind: str) -> None:
    mask, turns = random_layout(3, 3, 6)
    logprobs = torch.where(mask, random_doubles(3, 3, 6), float("nan")).requires_grad_()
    old = torch.where(mask, random_doubles(4, 3, 6), float("inf"))
    advantages = torch.where(mask, random_doubles(5, 3, 6), float("nan"))
    config = a_config(**KINDS.get(kind, {"kind": kind}))
    result = config.policy_loss(logprobs, old, advantages, mask_BT=mask, turns_BT=turns)
    result.per_token_BT.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert result.per_token_BT[~mask].eq(0).all() and result.per_token_BT.isfinite().all()
    assert logprobs.grad[~mask].eq(0).all() and logprobs.grad.isfinite().all()
    assert not (result.clipped_low_BT | result.clipped_high_BT)[~mask].any()
    assert result.ratio_BT[~mask].eq(1).all()


# --- KL and values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("difference", "expected"), [(0.5, (0.5, 0.125, 0.106531)), (-0.5, (-0.5, 0.125, 0.148721))])
def test_kl_estimators(difference: float, expected: tuple[float, ...]) -> None:
    for estimator, value in zip(("k1", "k2", "k3"), expected, strict=True):
        found = kl_divergence(estimator, doubles([difference]), doubles([0.0]))  # type: ignore[arg-type]
        assert found.item() == pytest.approx(value, abs=5e-7)


@given(st.floats(-1e4, 1e4, allow_nan=False))
def test_k3_is_never_negative_and_never_overflows(difference: float) -> None:
    estimate = kl_divergence("k3", torch.tensor(difference), torch.tensor(0.0)).item()
    assert 0 <= estimate <= math.exp(20.01)


def test_the_value_loss_takes_the_worse_of_the_clipped_and_the_free_value() -> None:
    values, old, returns = doubles([1.0, 0.1, 3.0]), doubles([0.0, 0.0, 0.0]), doubles([2.0, 2.0, 2.0])
    assert value_loss(values, old, returns, None).tolist() == [pytest.approx([0.5, 0.5 * 1.9**2, 0.5])]
    assert value_loss(values, old, returns, 0.5).tolist() == [pytest.approx([0.5 * 1.5**2, 0.5 * 1.9**2, 0.5 * 1.5**2])]


# --- averages ---------------------------------------------------------------------------------------------------------

AVERAGES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
MASK = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("average", "short", "long"),
    [*zip(AVERAGES, (1 / 6, 1 / 4, 1 / 2, 1 / 20), (1 / 6, 1 / 8, 1 / 2, 1 / 20), strict=True)],
)
def test_the_four_averages(average: str, short: float, long: float) -> None:
    weights = token_weights(MASK, average, max_length=10)
    assert weights.tolist() == [pytest.approx(row) for row in ([short, 0, short, 0], [long] * 4, [0] * 4)]
    assert not token_weights(torch.zeros(2, 3, dtype=torch.bool), average, max_length=3).any()


def test_an_unknown_average_is_refused() -> None:
    with pytest.raises(ValueError, match="sum-mean"):
        token_weights(MASK, "sum-mean", max_length=3)
