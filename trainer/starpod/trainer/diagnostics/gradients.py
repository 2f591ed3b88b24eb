"""Gradient norms by reward deviation of groups, by loss term and by agent, and the gradient's signal and noise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean, variance
from typing import Any

import torch
from torch import Tensor, nn

from starpod.trainer.algorithms.credit import agent_units, credit
from starpod.trainer.algorithms.filters import ZERO
from starpod.trainer.algorithms.terms import CreditTerm
from starpod.trainer.data.batch import RolloutBatch
from starpod.trainer.data.group import Group
from starpod.trainer.data.sample import split
from starpod.trainer.parallel.sharding import reshard, whole

GRADIENT_TERMS = ("task", "entropy", "kl")
POOLED = CreditTerm(unit="agent", score="reward", scale="std")
OWN = CreditTerm(unit="agent", score="reward", scale="std", key=("agent",))
"""Advantages of an agent: its reward compared with all agents' rewards (POOLED) or with its own rewards (OWN) in the
group."""


def reward_buckets(groups: Sequence[Group], count: int) -> dict[str, list[Group]]:
    """Split groups by reward deviation into "zero" and up to `count` equal parts from low to high, named from "1".

    Groups without deviation are separate because group-relative advantages give them no task gradient.
    """
    sorted_groups = sorted(groups, key=lambda group: group.reward_std)
    zero = [group for group in sorted_groups if group.reward_std <= ZERO]
    parts = split(sorted_groups[len(zero) :], count)
    return ({"zero": zero} if zero else {}) | {str(index): list(part) for index, part in enumerate(parts, start=1)}


def gradient_report(
    model: nn.Module,
    groups: Sequence[Group],
    backward: Callable[[Sequence[Group], str], None],
    *,
    buckets: int = 6,
) -> dict[str, float]:
    """Return gradient norms by bucket and component, as metrics `gradients/<bucket>/...`. No optimiser step is taken.

    Each bucket has metrics groups, reward_std_low and reward_std_high; each component has its norm and
    `<component>_per_token` (per sampled token). Existing gradients are cleared, and none are left.

    Args:
        groups: Groups to split into buckets by reward deviation.
        backward: Adds the gradient of one loss component over some groups to the parameters' `.grad`.
        buckets: Maximum number of buckets, besides the one without deviation.
    """
    metrics: dict[str, float] = {}
    try:
        for name, bucket in reward_buckets(groups, buckets).items():
            prefix = f"gradients/{name}"
            tokens = sum(episode.sampled_tokens for group in bucket for episode in group.episodes)
            metrics[f"{prefix}/groups"] = float(len(bucket))
            metrics[f"{prefix}/reward_std_low"] = bucket[0].reward_std
            metrics[f"{prefix}/reward_std_high"] = bucket[-1].reward_std
            for component in GRADIENT_TERMS:
                norm = gradient_norm(model, partial(backward, bucket, component))
                metrics[f"{prefix}/{component}"] = norm
                metrics[f"{prefix}/{component}_per_token"] = norm / max(tokens, 1)
    finally:
        model.zero_grad(set_to_none=True)
    return metrics


def gradient_norm(model: nn.Module, backward: Callable[[], object]) -> float:
    """Clear the gradients, call `backward`, and return the norm of the new gradient, which stays on the parameters."""
    reshard(model)  # gradients are sharded
    model.zero_grad(set_to_none=True)
    backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(whole(nn.utils.get_total_norm(gradients)))


PARTS = 16
"""Maximum number of parts of a batch whose gradients are compared. The estimate's variance is about proportional to
parts / (parts - 1): 7 % above its minimum with 16 parts, and twice the minimum with two halves."""


def signal_and_noise(
    model: nn.Module, groups: Sequence[Group], backward: Callable[[Sequence[Group]], None], *, collected: int
) -> tuple[float, float]:
    """Return estimates of |E g|^2 and E|g - E g|^2 for the gradient g of a collection. No optimiser step is taken.

    They are unbiased for independent groups (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1), and the first one
    may be negative. The batch sizes that the paper compares are here one part of the groups and all of them, which
    gives the mean over all splits into halves. It takes two passes over the groups, and no gradient has to be stored.
    Existing gradients are cleared, and none are left.

    Args:
        groups: Groups that the filter kept. Whole groups are compared, so that baselines stay correct.
        backward: Adds the share of some groups in the gradient of all of them to the parameters' `.grad`.
        collected: Number of groups before the filter, at least 2. Dropped groups are parts without a gradient.
    """
    parts = split(groups, PARTS)
    try:
        whole_square = gradient_norm(model, partial(backward, groups)) ** 2
        part_squares = sum(gradient_norm(model, partial(backward, part)) ** 2 for part in parts)
    finally:
        model.zero_grad(set_to_none=True)
    # Sum of the squared shares of the parts: E of `part_squares` is this times |E g|^2, plus the noise.
    overlap = (sum(len(part) ** 2 for part in parts) + collected - len(groups)) / collected**2
    signal = (whole_square - part_squares) / (1 - overlap)
    return signal, part_squares - overlap * signal


class NoiseScale:
    """Running means of a gradient's signal and noise, because a single measurement is very uncertain."""

    DECAY = 0.98
    """Weight of a measurement relative to the next one: about the last 50 count. With 5 groups, the standard error of
    the signal over 60 measurements was two thirds of the signal."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0, 0.0, 0.0]

    @property
    def is_settled(self) -> bool:
        """Whether there are enough measurements, about ten, for advice."""
        return self._sums[-1] > 9

    def update(self, signal: float, noise: float, episodes: float) -> dict[str, float]:
        """Add estimates for one collection, and return metrics.

        The signal-to-noise ratio is that of a collection. The critical batch is the number of episodes at which it is
        1, the paper's tr(covariance) / |E g|^2. It is left out unless the signal is positive.

        Args:
            signal: Estimate of |E g|^2 by `signal_and_noise`; may be negative.
            noise: Estimate of E|g - E g|^2 by `signal_and_noise`.
            episodes: Number of episodes of the collection, before the filter.
        """
        new = (signal, noise, noise * episodes, 1.0)
        self._sums = [self.DECAY * old + value for old, value in zip(self._sums, new, strict=True)]
        signal, noise, noise_of_one, _ = self._sums
        metrics = {"update/signal_to_noise": signal / noise} if noise > 0 else {}
        return metrics | ({"update/critical_batch_episodes": noise_of_one / signal} if signal > 0 else {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"sums": self._sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values from `state_dict`."""
        self._sums = list(state["sums"])


def agent_report(
    rollout: RolloutBatch, advantages_BT: Tensor, norm: Callable[[str, Tensor], float]
) -> dict[str, float]:
    """Return metrics `gradients/agents/<agent>/...`; empty if there is only one agent.

    They are the norm of the agent's gradient, and the factor by which its second moment grows if all agents share one
    mean and deviation of rewards: predicted (`pooled_factor`) and measured (`measured_factor`).

    The second moment is the sum of squared norms over episodes. It is measured by two passes, one per normalisation,
    which both multiply an episode's advantages by the same random sign. The signs cancel, in expectation, the products
    between gradients of different episodes.

    Args:
        norm: Returns the norm of an agent's gradient with given advantages [B, T].
    """
    units, agents = agent_units(rollout)
    if len(agents) < 2:
        return {}
    generator = torch.Generator().manual_seed(0)
    signs_BK = torch.randint(0, 2, units.mask_BK.shape, generator=generator).mul(2).sub(1)
    signs_BT = units.spread(signs_BK.to(advantages_BT))
    pooled_BT, own_BT = (
        signs_BT * credit((term,), rollout, rollout.rewards_BT).to(advantages_BT) for term in (POOLED, OWN)
    )
    metrics: dict[str, float] = {}
    for index, agent in enumerate(agents):
        # Tokens with an advantage of 0 have no gradient, so the agents' gradients add up to the whole.
        inside_BT = units.mask_BT & (units.index_BT == index)
        task_norm, pooled_norm, own_norm = (
            norm(agent, torch.where(inside_BT, item_BT, 0.0)) for item_BT in (advantages_BT, pooled_BT, own_BT)
        )
        metrics[f"gradients/agents/{agent}/task"] = task_norm
        if own_norm > 0:
            metrics[f"gradients/agents/{agent}/measured_factor"] = (pooled_norm / own_norm) ** 2
    row_n, agent_n = (indices.tolist() for indices in units.mask_BK.nonzero(as_tuple=True))
    rewards_n = units.total(rollout.rewards_BT)[units.mask_BK].tolist()
    groups_n = rollout.groups_B[row_n].tolist()
    factors = pooled_factors(zip(groups_n, (agents[index] for index in agent_n), rewards_n, strict=True))
    return metrics | {f"gradients/agents/{agent}/pooled_factor": factor for agent, factor in factors.items()}


def pooled_factors(scores: Iterable[tuple[int, str, float]]) -> dict[str, float]:
    """Return the factor by which each agent's mean squared advantage grows if all agents share one mean and deviation.

    Following Dr. MAS (arXiv 2602.08847), it is the sum of (std_k^2 + (mean_k - mean)^2) / std^2 over episodes, divided
    by the number of episodes in groups in which the agent has a deviation. mean_k and std_k are the agent's statistics
    in the group, mean and std those of all agents. A gradient grows by about the square root of the factor.

    If an agent earns the same in all episodes of a group, its own advantages there are 0, but the pooled ones are not.
    An agent without a deviation in any group has no factor.

    scores: (group, agent, score) of each episode.
    """
    groups: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group, agent, score in scores:
        groups[group][agent].append(score)
    sums: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for agents in groups.values():
        pooled_values = [score for values in agents.values() for score in values]
        spread = variance(pooled_values) if len(pooled_values) > 1 else 0.0
        for agent, values in agents.items():
            if spread > ZERO and len(values) > 1:
                sums[agent] += len(values) * (variance(values) + (fmean(values) - fmean(pooled_values)) ** 2) / spread
                counts[agent] += len(values) if variance(values) > ZERO else 0
    return {agent: sums[agent] / count for agent, count in counts.items() if count}
