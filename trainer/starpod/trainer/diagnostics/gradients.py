"""Gradient norms by reward deviation of the groups, by term of the loss and by agent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean, variance

import torch
from torch import Tensor, nn

from starpod.trainer.algorithms.credit import agent_units, credit
from starpod.trainer.algorithms.filters import ZERO
from starpod.trainer.algorithms.terms import CreditTerm
from starpod.trainer.data.batch import RolloutBatch, split
from starpod.trainer.data.episode import Group
from starpod.trainer.parallel import reshard, whole

COMPONENTS = ("task", "entropy", "kl")
POOLED = CreditTerm(unit="agent", score="reward", scale="std")
OWN = CreditTerm(unit="agent", score="reward", scale="std", key=("agent",))
"""What an agent earned, compared with all agents or with itself in the group's other episodes."""


def reward_buckets(groups: Sequence[Group], count: int) -> dict[str, list[Group]]:
    """Groups by reward deviation: "zero", then up to `count` equal parts from low to high, "1" onwards.

    Groups without any deviation are apart because they have no task gradient at all under group-relative advantages.
    """
    ranked = sorted(groups, key=lambda group: group.reward_std)
    zero = [group for group in ranked if group.reward_std <= ZERO]
    parts = split(ranked[len(zero) :], count)
    return ({"zero": zero} if zero else {}) | {str(index): list(part) for index, part in enumerate(parts, start=1)}


def gradient_report(
    model: nn.Module,
    groups: Sequence[Group],
    backward: Callable[[Sequence[Group], str], None],
    *,
    buckets: int = 6,
    components: Sequence[str] = COMPONENTS,
) -> dict[str, float]:
    """Gradient norms by bucket and component, as metrics `gradients/<bucket>/...`. Takes no optimiser step.

    backward: adds the gradient of one component of the loss over these groups to the parameters' `.grad`.
    Per bucket: groups, reward_std_low and _high; per component: the norm, and `<component>_per_token` (over sampled
    tokens). Gradients that were there before are lost; none are left.
    """
    metrics: dict[str, float] = {}
    try:
        for name, bucket in reward_buckets(groups, buckets).items():
            prefix = f"gradients/{name}"
            tokens = sum(episode.sampled_tokens for group in bucket for episode in group.episodes)
            metrics[f"{prefix}/groups"] = float(len(bucket))
            metrics[f"{prefix}/reward_std_low"] = bucket[0].reward_std
            metrics[f"{prefix}/reward_std_high"] = bucket[-1].reward_std
            for component in components:
                norm = gradient_norm(model, partial(backward, bucket, component))
                metrics[f"{prefix}/{component}"] = norm
                metrics[f"{prefix}/{component}_per_token"] = norm / max(tokens, 1)
    finally:
        model.zero_grad(set_to_none=True)
    return metrics


def gradient_norm(model: nn.Module, backward: Callable[[], object]) -> float:
    """Norm of the gradient that `backward` adds to the parameters, which is left there. What was there is lost."""
    reshard(model)  # gradients are on the shards
    model.zero_grad(set_to_none=True)
    backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(whole(nn.utils.get_total_norm(gradients)))


def agent_report(
    rollout: RolloutBatch, advantages_BT: Tensor, norm: Callable[[str, Tensor], float]
) -> dict[str, float]:
    """Metrics `gradients/agents/<agent>/...` where there are several: the norm of its gradient, and by what factor its
    second moment grows where all agents share one mean and deviation of rewards, predicted (`pooled_factor`) and
    measured.

    norm: of an agent's gradient with these advantages. The second moment is the sum of squared norms over episodes.
    Two passes measure it, one with each normalisation and both with the same random sign for each episode: what the
    gradients of two episodes have in common then adds to the squared norm as often as it takes from it.
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
        # Tokens with an advantage of 0 have no gradient: those of the agents add up to the whole.
        inside_BT = units.mask_BT & (units.index_BT == index)
        task, pooled, own = (
            norm(agent, torch.where(inside_BT, each_BT, 0.0)) for each_BT in (advantages_BT, pooled_BT, own_BT)
        )
        metrics[f"gradients/agents/{agent}/task"] = task
        if own > 0:
            metrics[f"gradients/agents/{agent}/measured_factor"] = (pooled / own) ** 2
    row_n, agent_n = (places.tolist() for places in units.mask_BK.nonzero(as_tuple=True))
    earned_n = units.total(rollout.rewards_BT)[units.mask_BK].tolist()
    of_n = rollout.groups_B[row_n].tolist()
    factors = pooled_factors(zip(of_n, (agents[index] for index in agent_n), earned_n, strict=True))
    return metrics | {f"gradients/agents/{agent}/pooled_factor": factor for agent, factor in factors.items()}


def pooled_factors(scores: Iterable[tuple[int, str, float]]) -> dict[str, float]:
    """What each agent's mean squared advantage is multiplied by where all agents share one mean and deviation (Dr. MAS,
    arXiv 2602.08847): the sum of (std_k^2 + (mean_k - mean)^2) / std^2 over episodes, by the number of those in groups
    in which the agent has a deviation of its own. In one group, the formula itself.

    scores: group, agent and score, of one episode each. A gradient grows by about the factor's root. An agent that
    earns the same in all episodes of a group has no advantage of its own there, and one of the others' scale. Agents
    without a deviation in any group have no factor.
    """
    groups: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group, agent, score in scores:
        groups[group][agent].append(score)
    shared: defaultdict[str, float] = defaultdict(float)
    alone: defaultdict[str, int] = defaultdict(int)
    for agents in groups.values():
        pooled = [score for own in agents.values() for score in own]
        spread = variance(pooled) if len(pooled) > 1 else 0.0
        for agent, own in agents.items():
            if spread > ZERO and len(own) > 1:
                shared[agent] += len(own) * (variance(own) + (fmean(own) - fmean(pooled)) ** 2) / spread
                alone[agent] += len(own) if variance(own) > ZERO else 0
    return {agent: shared[agent] / count for agent, count in alone.items() if count}
