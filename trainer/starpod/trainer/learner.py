"""Updates of all policies from collected groups: advantages of whole episodes, then steps of each policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.advantages import sibling_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import agent_units
from starpod.trainer.checkpoints.state import join_agents, split_agents
from starpod.trainer.data.batch import Advantages, Batch, RolloutBatch, split
from starpod.trainer.data.episode import Group, branches_of, episodes_of, turns_of
from starpod.trainer.data.updates import UpdateRecord
from starpod.trainer.diagnostics.gradients import agent_report, gradient_norm, gradient_report
from starpod.trainer.models.policies import Policies
from starpod.trainer.optimizer import OptimizerConfig
from starpod.trainer.section import ConfigError
from starpod.trainer.turn_order import turn_steps
from starpod.trainer.update import PolicyTrainer, Step, Stream, advantages_by_kind


class Learner:
    """Learner that updates policies from groups of episodes. Each policy learns from the turns of its own agent.

    Advantages are computed from whole episodes. Mini-batches and means of the loss only contain the agent's tokens.
    All trainers have the same configuration. If there are several, none has a critic.

    Args:
        by_agent: Trainer of each agent's policy, or of the policy of all agents, named "".
    """

    def __init__(self, by_agent: Mapping[str, PolicyTrainer]) -> None:
        self.by_agent = dict(by_agent)
        self.policies = Policies({agent: trainer.policy for agent, trainer in self.by_agent.items()})

    def configure(
        self,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        criteria_weights: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Use another algorithm, other rates and other weights from now on. The optimisers keep their states."""
        for trainer in self.by_agent.values():
            trainer.configure(algorithm, optimizer, criteria_weights)

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
        """Update the policies from these groups. An agent without turns is skipped.

        Args:
            groups: Groups to train on.
            version: Current version of the policies. The sampler's log-probabilities of tokens of this version are
                checked.
            scale: Factor of the loss.
            rate: Factor of the learning rates.
            record: Receives each token's advantage, ratio and clipping.

        Returns:
            Metrics: the mean over the steps, or the maximum if the name ends in `_max`. With several policies,
            `agents/<agent>/<metric>` belongs to one of them, and `<metric>` is the mean or maximum over all.

        Raises:
            LogprobGap: Sampler and trainer differ too much.
            ConfigError: An agent has no policy.
        """
        record = record or UpdateRecord()
        rates = {agent: trainer.set_rate(rate) for agent, trainer in self.by_agent.items()}
        plan = batch_steps if _first_of(self.by_agent).algorithm.order == "together" else turn_steps
        results: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
        for step in plan(self.by_agent, groups, version, record):
            results[step.agent].append(self.by_agent[step.agent].take(step, version=version, scale=scale))
        _first_of(self.by_agent).parallel.sum(record.ratios_and_marks_2BT)
        metrics = {agent: _combine(steps) | {"update/learning_rate": rates[agent]} for agent, steps in results.items()}
        named = {f"agents/{agent}/{name}": value[name] for agent, value in metrics.items() if agent for name in value}
        return named | _combine(metrics.values())

    def gradients(self, groups: Sequence[Group], *, version: int, buckets: int) -> dict[str, float]:
        """Return norms of the policies' gradients, without taking an optimiser step.

        Norms are returned per loss component for buckets of groups with similar reward deviation, over all policies. If
        there are several agents, norms per agent are returned as well.
        """
        usable_groups = [group for group in groups if episodes_of([group])]
        batch = Batch(episodes_of(usable_groups), _first_of(self.by_agent).parallel.device)
        rollout, shares = _share_out(self.by_agent, batch, version, dict.fromkeys(self.by_agent, False))
        # Compute advantages over the whole batch, as in an update. A bucket without deviation would show a gradient if
        # it were whitened separately.
        advantages = advantages_by_kind(_first_of(self.by_agent).algorithm, rollout)
        row_by_id = {id(episode): row for row, episode in enumerate(batch.episodes)}

        def backward(part: Sequence[Group], component: str) -> None:
            row_set = {row_by_id[id(episode)] for episode in episodes_of(part)}
            for share in shares.values():
                if rows := [index for index, row in enumerate(share.rows) if row in row_set]:
                    share.trainer.accumulate(share.stream(advantages), rows, scale=1.0, components=(component,))

        def norm(agent: str, given_BT: Tensor) -> float:
            share = shares[agent if agent in shares else ""]
            stream = share.stream(replace(advantages, advantages_BT=given_BT))
            add = partial(share.trainer.accumulate, stream, range(len(share.rows)), scale=1.0, components=("task",))
            return gradient_norm(share.trainer.policy, add)

        metrics = gradient_report(self.policies, usable_groups, backward, buckets=buckets)
        metrics |= agent_report(rollout, advantages.advantages_BT, norm)
        self.policies.zero_grad(set_to_none=True)
        return metrics

    # --- checkpoints: the tensors and values of each agent ------------------------------------------------------------

    def policy_state(self) -> Mapping[str, Tensor]:
        """Return the policies' tensors by name on rank 0, without weights that adapters leave frozen. Collective."""
        return join_agents({agent: trainer.policy_state() for agent, trainer in self.by_agent.items()})

    def load_policy(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors from `policy_state`."""
        parts = split_agents(state, self.by_agent)
        for agent, trainer in self.by_agent.items():
            trainer.load_policy(parts[agent])

    def freeze_reference(self, state: Mapping[str, Tensor] | None) -> None:
        """Set the KL term's reference policies from `reference_state`; to the current policies if `state` is None."""
        parts = None if state is None else split_agents(state, self.by_agent)
        for agent, trainer in self.by_agent.items():
            trainer.freeze_reference(None if parts is None else parts[agent])

    def reference_state(self) -> Mapping[str, Tensor]:
        """Return the reference policies' tensors by name on rank 0; empty if there are none. Collective."""
        return join_agents({agent: trainer.reference_state() for agent, trainer in self.by_agent.items()})

    def state(self) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Return the optimisers' tensors by name, and JSON values. All ranks take part."""
        states = {agent: trainer.state() for agent, trainer in self.by_agent.items()}
        values = {agent: values for agent, (_, values) in states.items()}
        return join_agents({agent: tensors for agent, (tensors, _) in states.items()}), values.get("", values)

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the values from `state`."""
        parts = split_agents(tensors, self.by_agent)
        for agent, trainer in self.by_agent.items():
            trainer.load_state(parts[agent], values[agent] if agent else values)


def batch_steps(
    trainers: Mapping[str, PolicyTrainer], groups: Sequence[Group], version: int, record: UpdateRecord
) -> Iterator[Step]:
    """Yield each policy's steps on random mini-batches of its episodes. Branches have a separate mean of the loss."""
    main, branches, unscored = episodes_of(groups), branches_of(groups), dict[str, bool]()
    first = _first_of(trainers)
    streams: defaultdict[str, list[tuple[_Share, Stream]]] = defaultdict(list)
    for episodes, weight in ((main, 1.0), (branches, first.branches.weight)):
        if not episodes:
            continue
        batch = Batch(episodes, first.parallel.device)
        rollout, shares = _share_out(trainers, batch, version, unscored)
        if episodes is branches:
            parents = [episode.parent for episode in branches]
            advantages = sibling_advantages(first.algorithm, rollout, parents, first.branches.scale)
        else:
            advantages = advantages_by_kind(first.algorithm, rollout)
        is_recorded = not streams
        if is_recorded:
            record.begin(batch, advantages.advantages_BT)
        for agent, share in shares.items():
            part = UpdateRecord() if is_recorded else None
            streams[agent].append((share, replace(share.stream(advantages, part), weight=weight)))
    for agent, pairs in streams.items():
        trainer, (share, stream) = trainers[agent], pairs[0]
        metrics, finds = share.metrics | _critic_metrics(stream), share.unscored
        for _ in range(trainer.algorithm.epochs):
            orders = [torch.randperm(len(share.rows), generator=trainer.generator).tolist() for share, _ in pairs]
            parts = [split(order, trainer.algorithm.steps(len(orders[0]))) for order in orders]
            for rows_of in zip_longest(*parts, fillvalue=()):
                yield Step(agent, list(zip((stream for _, stream in pairs), rows_of, strict=True)), metrics, finds)
                metrics, finds = {}, False
        if stream.record is not None:
            record.copy_part(stream.record, share.inside_BT)


@dataclass(frozen=True, slots=True)
class _Share:
    """The turns of one policy in a batch of whole episodes [B, T], as a separate batch."""

    trainer: PolicyTrainer
    rows: Sequence[int]
    """Rows of the whole batch in which the policy's agent speaks."""
    inside_BT: Tensor
    """Mask of the policy's tokens in the whole batch (bool)."""
    batch: Batch
    rollout: RolloutBatch
    metrics: dict[str, float]
    unscored: bool
    """Whether the batch's log-probabilities are the sampler's; see `AlgorithmConfig.scores_first`."""

    def stream(self, advantages: Advantages, record: UpdateRecord | None = None) -> Stream:
        """Return the policy's turns with their advantages, which are taken from those of the whole batch.

        Tokens are matched by position, because both batches order them by row and turn.

        record: receives the policy's part of the update.
        """

        def select(items_BT: Tensor) -> Tensor:
            selected_BT = items_BT.new_zeros(self.batch.mask_BT.shape)
            selected_BT[self.batch.mask_BT] = items_BT[self.inside_BT]
            return selected_BT

        returns_BT = None if advantages.returns_BT is None else select(advantages.returns_BT)
        part = Advantages(select(advantages.advantages_BT), returns_BT, select(advantages.value_mask_BT))
        if record is not None:
            record.begin(self.batch, part.advantages_BT)
        return Stream(self.batch, self.rollout, part, record=record)


def _share_out(
    trainers: Mapping[str, PolicyTrainer], batch: Batch, version: int, unscored: dict[str, bool]
) -> tuple[RolloutBatch, dict[str, _Share]]:
    """Return a batch of whole episodes, scored by all policies, and each policy's share of it.

    unscored: whether to use the sampler's log-probabilities, by agent. Missing entries are set from `scores_first`.
    Raises LogprobGap, and ConfigError for an agent without a policy.
    """

    def share(agent: str, agent_batch: Batch, rows: Sequence[int], inside_BT: Tensor) -> _Share:
        trainer = trainers[agent]
        skips = unscored.setdefault(agent, not trainer.algorithm.scores_first(len(rows)))
        rollout, metrics = (trainer.unscored(agent_batch), {}) if skips else trainer.prepare(agent_batch, version)
        return _Share(trainer, rows, inside_BT, agent_batch, rollout, metrics, skips)

    if "" in trainers:
        only_share = share("", batch, range(len(batch)), batch.mask_BT)
        return only_share.rollout, {"": only_share}
    rollout = _first_of(trainers).unscored(batch)
    scores = {"old_logprobs_BT": rollout.old_logprobs_BT.clone()}
    units, agents = agent_units(rollout)
    shares = {}
    if unknown_agents := [agent for agent in agents if agent not in trainers]:
        raise ConfigError(
            f"an episode has turns of agent {unknown_agents[0]!r}, but script.policies names {', '.join(trainers)}"
        )
    for index, agent in enumerate(agents):
        episodes = [turns_of(episode, agent) for episode in batch.episodes]
        if not (rows := [row for row, episode in enumerate(episodes) if episode.sampled_tokens]):
            continue
        agent_batch = Batch([episodes[row] for row in rows], batch.device)
        inside_BT = units.mask_BT & (units.index_BT == index)
        shares[agent] = share(agent, agent_batch, rows, inside_BT)
        for name in ("old_logprobs_BT", "ref_logprobs_BT"):
            if (logprobs_BT := getattr(shares[agent].rollout, name)) is not None:
                scores_BT = scores.setdefault(name, torch.zeros_like(rollout.old_logprobs_BT))
                scores_BT[inside_BT] = logprobs_BT[agent_batch.mask_BT]
    old_BT, ref_BT = scores["old_logprobs_BT"], scores.get("ref_logprobs_BT")
    return replace(rollout, old_logprobs_BT=old_BT, ref_logprobs_BT=ref_BT), shares


def _first_of(trainers: Mapping[str, PolicyTrainer]) -> PolicyTrainer:
    """Return the first trainer, for values that are the same in all of them."""
    return next(iter(trainers.values()))


def _combine(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric, or its maximum if its name ends in `_max`."""
    lists: defaultdict[str, list[float]] = defaultdict(list)
    for metrics in reports:
        for name, value in metrics.items():
            lists[name].append(value)
    return {name: max(values) if name.endswith("_max") else sum(values) / len(values) for name, values in lists.items()}


def _critic_metrics(stream: Stream) -> dict[str, float]:
    values_BT, advantages = stream.rollout.values_BT, stream.advantages
    if values_BT is None or advantages.returns_BT is None:
        return {}
    share = explained_variance(values_BT, advantages.returns_BT, advantages.value_mask_BT)
    return {"critic/explained_variance": share}


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that only knows the mean."""
    returns = returns_BT[mask_BT]
    spread = returns.var(correction=0)
    return float(1 - (returns - values_BT[mask_BT]).var(correction=0) / spread) if spread > 0 else 0.0
