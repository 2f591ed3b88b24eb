"""Learners of several policies, one per agent, with the interface of one learner."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import agent_units
from starpod.trainer.checkpoints.state import join_parts, split_parts
from starpod.trainer.data.batch import Advantages, Batch, RolloutBatch
from starpod.trainer.data.episode import Group, episodes_of, turns_of
from starpod.trainer.data.updates import UpdateRecord
from starpod.trainer.diagnostics.gradients import agent_report, gradient_norm, gradient_report
from starpod.trainer.models.first_adapters import FirstAdapters
from starpod.trainer.models.policies import Policies
from starpod.trainer.models.policy import Policy
from starpod.trainer.optimizer import OptimizerConfig
from starpod.trainer.section import ConfigError
from starpod.trainer.update import Accumulated, Learner, Stream, advantages_by_kind


@dataclass(frozen=True, slots=True)
class _Share:
    """One agent's turns of a batch of whole episodes [B, T], as a separate batch."""

    learner: Learner
    rows: list[int]
    """Rows of the whole batch in which the agent speaks."""
    inside_BT: Tensor
    """Mask of its tokens in the whole batch (bool)."""
    batch: Batch
    rollout: RolloutBatch
    metrics: dict[str, float]
    unscored: bool

    def advantages(self, advantages_BT: Tensor) -> Advantages:
        """Return the whole batch's advantages at this agent's tokens. Both batches order tokens by row and turn."""
        own_BT = torch.zeros_like(self.rollout.old_logprobs_BT)
        own_BT[self.rollout.mask_BT] = advantages_BT[self.inside_BT]
        return Advantages(own_BT, None, self.rollout.mask_BT)

    def accumulate(self, advantages_BT: Tensor, rows: Sequence[int], component: str) -> Accumulated:
        """Add a gradient as in `Learner.accumulate`. rows: rows of this agent's batch."""
        advantages = self.advantages(advantages_BT)
        return self.learner.accumulate(self.batch, self.rollout, advantages, rows, scale=1.0, components=(component,))


class Learners:
    """Learners of all agents' policies, each from the agent's own turns, with the interface of `Learner`.

    Advantages are computed from whole episodes, as for one policy. Means of the loss and mini-batches only contain the
    agent's own tokens. All learners have the same configuration, without a critic. A metric `agents/<agent>/<metric>`
    belongs to one learner. `<metric>` is the mean over learners, or the maximum if its name ends in `_max`.
    """

    def __init__(self, policy: Policies, by_agent: Mapping[str, Learner]) -> None:
        self.policy = policy
        self.by_agent = dict(by_agent)

    @property
    def _first(self) -> Learner:
        """The first learner, for values that are the same in all learners."""
        return next(iter(self.by_agent.values()))

    @property
    def reference(self) -> Policy | FirstAdapters | None:
        """Reference policy of the first agent; None if no agent has one."""
        return self._first.reference

    def configure(
        self,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        criteria_weights: Mapping[str, Mapping[str, float]],
    ) -> None:
        for learner in self.by_agent.values():
            learner.configure(algorithm, optimizer, criteria_weights)

    # --- the update ---------------------------------------------------------------------------------------------------

    def learn(
        self,
        groups: Sequence[Group],
        *,
        version: int,
        scale: float = 1.0,
        rate: float = 1.0,
        record: UpdateRecord | None = None,
    ) -> dict[str, float]:
        """Update the policies as in `Learner.learn`. An agent without turns is skipped. Raises LogprobGap."""
        batch, rollout, shares = self._read(groups, version)
        advantages_BT = self._advantages(batch, rollout)
        if record is not None:
            record.begin(batch, advantages_BT)
        found = {}
        for agent, share in shares.items():
            own = None if record is None else UpdateRecord()
            given = share.advantages(advantages_BT)
            stream = Stream(share.batch, share.rollout, given, share.metrics, weight=1.0, unscored=share.unscored)
            found[agent] = share.learner.take_steps([stream], version=version, scale=scale, rate=rate, record=own)
            if record is not None and own is not None:
                record.found_2BT[:, share.inside_BT] = own.found_2BT[:, share.rollout.mask_BT]
        return _together(found)

    def _read(
        self, groups: Sequence[Group], version: int, *, scored: bool = False
    ) -> tuple[Batch, RolloutBatch, dict[str, _Share]]:
        """Return the episodes as a batch, scored by all policies, and each agent's share of them.

        scored: score all tokens even if the update does not need it. Raises ConfigError for an unknown agent.
        """
        episodes = episodes_of(groups)
        batch, rollout, _ = self._first.read(episodes, version, unscored=True)
        old_BT, ref_BT = rollout.old_logprobs_BT.clone(), torch.zeros_like(rollout.old_logprobs_BT)
        units, agents = agent_units(rollout)
        shares = {}
        if unknown := [agent for agent in agents if agent not in self.by_agent]:
            raise ConfigError(
                f"an episode has turns of agent {unknown[0]!r}, and script.policies names {', '.join(self.by_agent)}"
            )
        for index, agent in enumerate(agents):
            learner = self.by_agent[agent]
            said = [turns_of(episode, agent) for episode in episodes]
            rows = [row for row, each in enumerate(said) if each.sampled_tokens]
            if not rows:
                continue
            unscored = not (scored or learner.algorithm.scores_first(len(rows)))
            read = learner.read([said[row] for row in rows], version, unscored=unscored)
            inside_BT = units.mask_BT & (units.index_BT == index)
            share = shares[agent] = _Share(learner, rows, inside_BT, *read, unscored)
            old_BT[inside_BT] = share.rollout.old_logprobs_BT[share.rollout.mask_BT]
            if share.rollout.ref_logprobs_BT is not None:
                ref_BT[inside_BT] = share.rollout.ref_logprobs_BT[share.rollout.mask_BT]
        referred = ref_BT if self.reference is not None else None
        return batch, replace(rollout, old_logprobs_BT=old_BT, ref_logprobs_BT=referred), shares

    def _advantages(self, batch: Batch, rollout: RolloutBatch) -> Tensor:
        kinds = [episode.kind for episode in batch.episodes]
        return advantages_by_kind(self._first.algorithm, rollout, kinds).advantages_BT

    def gradients(self, groups: Sequence[Group], *, version: int, buckets: int) -> dict[str, float]:
        """Return gradient norms as in `Learner.gradients`: per bucket over all policies, per agent over its own."""
        kept = [group for group in groups if episodes_of([group])]
        batch, rollout, shares = self._read(kept, version, scored=True)
        advantages_BT = self._advantages(batch, rollout)
        place = {id(episode): row for row, episode in enumerate(batch.episodes)}

        def backward(part: Sequence[Group], component: str) -> None:
            chosen = {place[id(episode)] for episode in episodes_of(part)}
            for share in shares.values():
                if rows := [own for own, row in enumerate(share.rows) if row in chosen]:
                    share.accumulate(advantages_BT, rows, component)

        def norm(agent: str, given_BT: Tensor) -> float:
            share = shares[agent]
            add = partial(share.accumulate, given_BT, range(len(share.rows)), "task")
            return gradient_norm(share.learner.policy, add)

        metrics = gradient_report(self.policy, kept, backward, buckets=buckets)
        metrics |= agent_report(rollout, advantages_BT, norm)
        self.policy.zero_grad(set_to_none=True)
        return metrics

    # --- checkpoints: the tensors and values of each agent ------------------------------------------------------------

    def policy_state(self) -> dict[str, Tensor]:
        return join_parts({agent: learner.policy_state() for agent, learner in self.by_agent.items()})

    def load_policy(self, state: Mapping[str, Tensor]) -> None:
        parts = split_parts(state)
        for agent, learner in self.by_agent.items():
            learner.load_policy(parts[agent])

    def freeze_reference(self, state: Mapping[str, Tensor] | None) -> None:
        parts = None if state is None else split_parts(state)
        for agent, learner in self.by_agent.items():
            learner.freeze_reference(None if parts is None else parts[agent])

    def reference_state(self) -> dict[str, Tensor]:
        return join_parts({agent: learner.reference_state() for agent, learner in self.by_agent.items()})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        each = {agent: learner.state() for agent, learner in self.by_agent.items()}
        tensors = join_parts({agent: tensors for agent, (tensors, _) in each.items()})
        return tensors, {agent: values for agent, (_, values) in each.items()}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        parts = split_parts(tensors)
        for agent, learner in self.by_agent.items():
            learner.load_state(parts[agent], values[agent])


def _together(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return each learner's metrics, and their combination over all learners."""
    metrics = {f"agents/{agent}/{name}": value for agent, own in found.items() for name, value in own.items()}
    values: defaultdict[str, list[float]] = defaultdict(list)
    for own in found.values():
        for name, value in own.items():
            values[name].append(value)
    return metrics | {
        name: max(each) if name.endswith("_max") else sum(each) / len(each) for name, each in values.items()
    }
