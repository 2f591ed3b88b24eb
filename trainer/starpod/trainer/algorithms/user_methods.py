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
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.section import ConfigError
from starpod.trainer.user_file import names_file


def check_user_methods(config: AlgorithmConfig) -> None:
    """Try the methods of a user's file on a made-up group of two episodes.

    Raises:
        ConfigError: A method cannot be loaded, fails, or returns something wrong.
    """
    rollout = _two_episodes()
    shape = rollout.mask_BT.shape
    if names_file(config.advantage):
        setting = f"algorithm.advantage {config.advantage}"
        advantages = _call_on_example(
            setting, config.estimator.estimate, config.estimator_settings, rollout, rollout.rewards_BT
        )
        advantages_BT = advantages.advantages_BT
        if not (isinstance(advantages_BT, Tensor) and advantages_BT.shape == shape and advantages_BT.isfinite().all()):
            raise ConfigError(
                f"{setting} must return a tensor of one finite advantage per token, [{shape[0]}, {shape[1]}] for "
                f"{shape[0]} episodes of {shape[1]} tokens; it returned {advantages_BT!r}"
            )
    if names_file(config.loss):
        setting = f"algorithm.loss {config.loss}"
        logprobs_BT = rollout.old_logprobs_BT.clone().requires_grad_()
        loss = _call_on_example(
            setting,
            config.policy_loss,
            logprobs_BT,
            rollout.old_logprobs_BT,
            torch.ones(shape),
            mask_BT=rollout.mask_BT,
            turns_BT=rollout.turns_BT,
        )
        per_token_BT = getattr(loss, "per_token_BT", None)
        if not (isinstance(per_token_BT, Tensor) and per_token_BT.shape == shape and per_token_BT.requires_grad):
            raise ConfigError(
                f"{setting} must return a PolicyLoss whose per_token_BT is [B, T] with a gradient; it returned {loss!r}"
            )


def _call_on_example(setting: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    try:
        return function(*arguments, **keywords)
    except ConfigError:  # it cannot be loaded
        raise
    except Exception as error:
        raise ConfigError(f"{setting} fails on two made-up episodes: {type(error).__name__}: {error}") from error


def _two_episodes() -> RolloutBatch:
    """Return a group of two episodes with two turns of one token each. One episode earns 1 at its end."""
    episodes = [Episode(0, member, "made-up") for member in range(2)]
    for episode in episodes:
        for index, key in enumerate((b"a", b"b")):
            parts = {"environment": float(index > episode.member)}
            turn = Turn(fresh=True, prompt=[1], reply=[2], logprobs=[-1.0], versions=[0], state_key=key, parts=parts)
            episode.turns.append(turn)
    return RolloutBatch.of(Batch(episodes))
