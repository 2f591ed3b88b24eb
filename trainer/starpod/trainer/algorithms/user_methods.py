"""Estimators and losses from a user's file (`algorithm.advantage`, `algorithm.loss`: FILE.py:NAME).

    def estimator(rollout: RolloutBatch, rewards_BT: Tensor, **parameters) -> Tensor

    def loss(
        logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor,
        *, mask_BT: Tensor, turns_BT: Tensor, **parameters,
    ) -> PolicyLoss

An estimator returns advantages [B, T]. Its rewards_BT are the rollout's, minus the KL penalty if `algorithm.kl.where`
is reward. A loss gets the tensors of `LossInputs`. The parameters are `algorithm.advantage_parameters` and
`loss_parameters`. examples/own_methods.py has one of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.losses import PolicyLoss
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.section import ConfigError
from starpod.trainer.user_file import names_file, with_place


def check_user_methods(config: AlgorithmConfig) -> None:
    """Try the methods of a user's file on a made-up group of two episodes.

    Raises:
        ConfigError: A method cannot be loaded, fails, or returns something wrong.
    """
    rollout = _two_episodes()
    mask_BT, shape = rollout.mask_BT, rollout.mask_BT.shape
    size = f"[{shape[0]}, {shape[1]}] for {shape[0]} episodes of at most {shape[1]} tokens"
    if names_file(config.advantage):
        setting = f"algorithm.advantage {config.advantage}"

        def estimate(rollout: RolloutBatch) -> Tensor:
            advantages = _call(
                setting, config.estimator.estimate, config.estimator_settings, rollout, rollout.rewards_BT
            )
            return advantages.advantages_BT  # type: ignore[no-any-return]

        advantages_BT = estimate(rollout)
        if not (_has_shape(advantages_BT, shape) and advantages_BT[mask_BT].isfinite().all()):
            raise ConfigError(
                f"{setting} must return a tensor of one finite advantage per token, {size}; it returned "
                f"{advantages_BT!r}"
            )
        _check_padding(setting, advantages_BT[mask_BT], lambda example: estimate(example)[example.mask_BT], rollout)
    if names_file(config.loss):
        setting = f"algorithm.loss {config.loss}"

        def lose(rollout: RolloutBatch) -> tuple[Any, Tensor]:
            logprobs_BT = rollout.old_logprobs_BT.clone().requires_grad_()
            advantages_BT = torch.where(rollout.mask_BT, torch.tensor([[1.0], [-1.0]]), 0.0)
            tensors = logprobs_BT, rollout.old_logprobs_BT, advantages_BT
            masks = {"mask_BT": rollout.mask_BT, "turns_BT": rollout.turns_BT}
            return _call(setting, config.policy_loss, *tensors, **masks), logprobs_BT

        loss, logprobs_BT = lose(rollout)
        tensors = [getattr(loss, item.name, None) for item in fields(PolicyLoss)]
        gradient_BT = None
        if all(_has_shape(tensor, shape) for tensor in tensors) and loss.per_token_BT.requires_grad:
            losses = loss.per_token_BT[mask_BT]
            (gradient_BT,) = _call(setting, torch.autograd.grad, losses.sum(), logprobs_BT, allow_unused=True)
        if gradient_BT is None:
            raise ConfigError(
                f"{setting} must return a PolicyLoss of tensors {size}, whose per_token_BT depends on logprobs_BT; it "
                f"returned {loss!r}"
            )
        if not (losses.isfinite().all() and gradient_BT[mask_BT].isfinite().all()):
            raise ConfigError(
                f"{setting} must return finite losses with finite gradients, on two made-up episodes whose old and new "
                f"log-probabilities are equal; it returned {loss.per_token_BT!r} with the gradient {gradient_BT!r}"
            )
        _check_padding(setting, losses, lambda example: lose(example)[0].per_token_BT[example.mask_BT], rollout)


_PADDING = {
    "mask_BT": False,
    "turns_BT": -1,
    "rewards_BT": 0.0,
    "old_logprobs_BT": 0.0,
    "sampler_logprobs_BT": 0.0,
}
"""Values of padding in a RolloutBatch."""


def _pad(tensor_BT: Tensor, fill: float) -> Tensor:
    """Append three positions of padding to each row."""
    return torch.nn.functional.pad(tensor_BT, (0, 3), value=fill)


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, Tensor) and value.shape == shape


def _check_padding(
    setting: str, values: Tensor, method: Callable[[RolloutBatch], Tensor], rollout: RolloutBatch
) -> None:
    """Raise ConfigError if more padding, as beside a longer episode, changes `values`, the method's result.

    A method that draws random numbers returns something else each time. It is not refused.
    """
    padded: dict[str, Any] = {name: _pad(getattr(rollout, name), fill) for name, fill in _PADDING.items()}
    if not torch.allclose(values, method(replace(rollout, **padded))) and torch.allclose(values, method(rollout)):
        raise ConfigError(
            f"{setting} depends on padding: its result at the sampled tokens changed when both made-up episodes were "
            "padded further, as beside a longer episode; leave out positions where mask_BT is False, e.g. in means"
        )


def _call(setting: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    try:
        return function(*arguments, **keywords)
    except ConfigError:  # it cannot be loaded
        raise
    except Exception as error:
        raise ConfigError(f"{setting} fails on two made-up episodes: {with_place(error)}") from error


def _two_episodes() -> RolloutBatch:
    """Return a group of two episodes with one and two turns of one token each. The second one earns 1 at its end."""
    episodes = [Episode(0, member, "made-up") for member in range(2)]
    for episode in episodes:
        for index, key in enumerate((b"a", b"b")[: episode.member + 1]):
            parts = {"environment": float(index)}
            turn = Turn(fresh=True, prompt=[1], reply=[2], logprobs=[-1.0], versions=[0], state_key=key, parts=parts)
            episode.turns.append(turn)
    return RolloutBatch.of(Batch(episodes))
