"""What the algorithms see: episodes as rows of their sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rollout:
    """B episodes, right-padded to T sampled tokens. What lies between sampled tokens in a sequence is left out.

    mask_BT: bool, True where a token is. turns_BT: index of the token's turn in its episode, from 0; -1 elsewhere.
    rewards_BT: float64, non-zero only at the last sampled token of a turn.
    old_logprobs_BT: under the policy before the update. sampler_logprobs_BT: as the engine reported them; the same
        where nothing is stale. ref_logprobs_BT: under the reference policy; None where no KL term is used.
    values_BT: the critic's value of the context before each token; None without a critic.
    bootstrap_B: value of the state after the last turn; 0 where the task itself ended or nothing is bootstrapped.
    groups_B: id of the episode's group.
    state_keys: per episode and turn, the state's digest before the turn; b"" where unknown. agents: likewise.
    """

    mask_BT: Tensor
    turns_BT: Tensor
    rewards_BT: Tensor
    groups_B: Tensor
    old_logprobs_BT: Tensor
    sampler_logprobs_BT: Tensor
    bootstrap_B: Tensor
    values_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    state_keys: Sequence[Sequence[bytes]] = ()
    agents: Sequence[Sequence[str]] = ()

    @property
    def returns_B(self) -> Tensor:
        """Undiscounted return of each episode."""
        return torch.where(self.mask_BT, self.rewards_BT, 0.0).sum(1)
