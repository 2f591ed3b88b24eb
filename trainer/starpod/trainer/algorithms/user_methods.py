"""Estimators and losses from a user's file (`algorithm.advantage`, `algorithm.loss`: FILE.py:NAME).

    def estimator(rollout: RolloutBatch, rewards_BT: Tensor, **parameters) -> Tensor

    def loss(
        logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor,
        *, mask_BT: Tensor, turns_BT: Tensor, **parameters,
    ) -> PolicyLoss

An estimator returns advantages [B, T]. Its rewards_BT are the rollout's, minus the KL penalty if `algorithm.kl.where`
is reward. A loss gets the tensors of `LossInputs`. Neither may write into its arguments. The parameters are
`algorithm.advantage.parameters` and `algorithm.loss.parameters`. examples/own_methods.py has one of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserCodeError, names_file
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode, Turn


def check_user_methods(config: AlgorithmConfig) -> None:
    """Try the methods of a user's file on a made-up group of two episodes. Raises ConfigError if one cannot be used."""
    rollout = _two_episodes()

    def estimate(rollout: RolloutBatch) -> Tensor:
        advantages = config.advantage.estimate(rollout, rollout.rewards_BT, whiten=config.whiten)
        return advantages.advantages_BT[rollout.mask_BT]

    def lose(rollout: RolloutBatch) -> Tensor:
        logprobs_BT = rollout.old_logprobs_BT.clone().requires_grad_()
        advantages_BT = torch.where(rollout.mask_BT, torch.tensor([[1.0], [-1.0]]), 0.0)
        tensors = logprobs_BT, rollout.old_logprobs_BT, advantages_BT
        loss = config.policy_loss(*tensors, mask_BT=rollout.mask_BT, turns_BT=rollout.turns_BT)
        return loss.per_token_BT[rollout.mask_BT]

    try:
        if names_file(config.advantage.kind):
            _check_padding(f"algorithm.advantage {config.advantage.kind}", estimate, rollout)
        if names_file(config.loss.kind):
            _check_padding(f"algorithm.loss {config.loss.kind}", lose, rollout)
    except UserCodeError as error:
        raise ConfigError(f"on two made-up episodes, {error}") from error


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


def _check_padding(setting: str, method: Callable[[RolloutBatch], Tensor], rollout: RolloutBatch) -> None:
    """Raise ConfigError if more padding, as beside a longer episode, changes the method's result.

    A method that draws random numbers returns something else each time. It is not refused.
    """
    values = method(rollout)
    padded: dict[str, Any] = {name: _pad(getattr(rollout, name), fill) for name, fill in _PADDING.items()}
    if not torch.allclose(values, method(replace(rollout, **padded))) and torch.allclose(values, method(rollout)):
        raise ConfigError(
            f"{setting} depends on padding: its result at the sampled tokens changed when both made-up episodes were "
            "padded further, as beside a longer episode; leave out positions where mask_BT is False, e.g. in means"
        )


def _two_episodes() -> RolloutBatch:
    """Return a group of two episodes with one and two turns of one token each. The second one earns 1 at its end."""
    episodes = [Episode(0, member, "made-up") for member in range(2)]
    for episode in episodes:
        for index, key in enumerate((b"a", b"b")[: episode.member + 1]):
            parts = {"environment": float(index)}
            turn = Turn(fresh=True, prompt=[1], reply=[2], logprobs=[-1.0], versions=[0], state_key=key, parts=parts)
            episode.turns.append(turn)
    return RolloutBatch.of(Batch(episodes))
