"""A custom policy loss, advantage estimator and reply grammar, named in a configuration or on the command line:

starpod train frozen_lake algorithm=dapo algorithm.loss=examples/own_methods.py:sapo
starpod train frozen_lake algorithm=dapo algorithm.advantage=examples/own_methods.py:median
starpod train frozen_lake prompt.grammar=examples/own_methods.py:ReAct
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from starpod.trainer.algorithms.losses import PolicyLoss, clamped_difference
from starpod.trainer.data.batch import RolloutBatch
from starpod.trainer.prompts.grammar import Further, Grammar, Inside


def sapo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    *,
    mask_BT: Tensor,
    turns_BT: Tensor,
    positive: float = 1.0,
    negative: float = 1.05,
) -> PolicyLoss:
    """Return SAPO's loss (arXiv 2511.20347): -4 / tau sigmoid(tau (rho - 1)) A.

    PPO's clip takes the gradient away at a bound. Here it fades as the ratio moves away from 1, sooner for a larger
    temperature tau, which is `positive` or `negative` by the sign of the advantage.
    """
    ratio_BT = torch.where(mask_BT, clamped_difference(logprobs_BT, old_logprobs_BT), 0.0).exp()
    tau_BT = torch.where(advantages_BT > 0, positive, negative)
    loss_BT = -4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1)) * advantages_BT
    never_BT = torch.zeros_like(mask_BT)
    return PolicyLoss(torch.where(mask_BT, loss_BT, 0.0), never_BT, never_BT, ratio_BT.detach())


def median(rollout: RolloutBatch, rewards_BT: Tensor, *, scale: bool = True) -> Tensor:
    """Return advantages by the group's median over its mean absolute deviation, robust to one lucky episode."""
    returns_B = torch.where(rollout.mask_BT, rewards_BT, 0.0).sum(1)
    advantages_B = torch.zeros_like(returns_B)
    for group in rollout.groups_B.unique():
        members_B = rollout.groups_B == group
        from_median = returns_B[members_B] - returns_B[members_B].quantile(0.5)
        size = from_median.abs().mean() if scale else 1.0
        advantages_B[members_B] = from_median / size if size else from_median
    return torch.where(rollout.mask_BT, advantages_B.unsqueeze(1), 0.0)


class ReAct(Grammar):
    """Replies as in ReAct (arXiv 2210.03629): `Thought: the goal is below. Action: Down`."""

    @property
    def opening(self) -> str:
        return "Thought:" if self.thinking else "Action:"

    def find_blocks(self, text: str) -> list[Inside] | None:
        thought, action = text.find("Thought:"), text.find("Action:")
        if action < 0 or (self.thinking and not 0 <= thought < action):
            return None
        answer = Inside("answer", action, action + len("Action:"), len(text))
        return [Inside("think", thought, thought + len("Thought:"), action), answer] if self.thinking else [answer]

    def compose(self, thought: str | None, actions: Iterable[str], blocks: Mapping[Further, str] | None = None) -> str:
        prefix = f"Thought: {thought or ''} " if self.thinking else ""
        return f"{prefix}Action: {' || '.join(actions)}"

    def describe(self, max_actions: int | None = None) -> str:
        hint = "" if max_actions == 1 else " Put || between actions."
        return f"Reply in the form: {self.compose('your reasoning', ['your action'])}.{hint}"
