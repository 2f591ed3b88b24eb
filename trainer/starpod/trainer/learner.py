"""Updates of all policies from collected groups: advantages of whole episodes, then steps of each policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import agent_units
from starpod.trainer.checkpoints.state import join_agents, split_agents
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group, branches_of, episodes_of
from starpod.trainer.data.sample import split
from starpod.trainer.diagnostics.gradients import (
    GRADIENT_TERMS,
    agent_report,
    gradient_norm,
    gradient_report,
    signal_and_noise,
)
from starpod.trainer.models.policies import Policies
from starpod.trainer.turn_order import turn_steps
from starpod.trainer.update import PolicyTrainer


class Learner:
    """Learner that updates policies from groups of episodes. Each policy learns from the turns of its own agent.

    Advantages are computed from whole episodes. Mini-batches and means of the loss only contain the agent's tokens.
    All trainers have the same configuration. If there are several, none has a critic.

    Args:
        by_agent: Trainer of each agent's policy, or of the policy of all agents, named "".
    """

    def __init__(self, by_agent: Mapping[str, PolicyTrainer]) -> None:
        self.by_agent = dict(by_agent)
        self.table: RolloutBatch | None = None
        """Table of the last update, with the advantage, ratio and marks of each token."""
        self.policies = Policies({agent: trainer.policy for agent, trainer in self.by_agent.items()})

    def configure(
        self,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        criteria_weights: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Use another algorithm, other rates and other weights from now on. The optimisers keep their states.

        Args:
            optimizer: Learning rates, clipping and micro-batches. Betas, eps and weight decay keep their first values.
            criteria_weights: Weights of criteria by task name ("" in a run with one environment), then by criterion.
        """
        for trainer in self.by_agent.values():
            trainer.configure(algorithm, optimizer, criteria_weights)

    # --- the update ---------------------------------------------------------------------------------------------------

    def learn(
        self, groups: Sequence[Group], *, version: int, scale: float = 1.0, rate: float = 1.0
    ) -> dict[str, float]:
        """Update the policies from these groups. An agent without turns is skipped.

        Args:
            version: Current version of the policies. The sampler's log-probabilities of tokens of this version are
                checked.
            scale: Factor of the loss.
            rate: Factor of the learning rates.

        Returns:
            Metrics: the mean over the steps, or the maximum if the name ends in `_max`. With several policies,
            `agents/<agent>/<metric>` belongs to one of them, and `<metric>` is the mean or maximum over all.

        Raises:
            LogprobGap: Sampler and trainer differ too much.
            ConfigError: An agent has no policy.
        """
        first = self._first
        rates = {agent: trainer.set_rate(rate) for agent, trainer in self.by_agent.items()}
        branches = branches_of(groups) if first.algorithm.order == "together" else []
        batch = Batch([*episodes_of(groups), *branches], first.parallel.device)
        table = self.table = first.tabulate(batch, branches=len(branches))
        take_steps = self._steps if first.algorithm.order == "together" else partial(turn_steps, first)
        results: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
        for agent, step_metrics in take_steps(batch, table, version=version, scale=scale):
            results[agent].append(step_metrics)
        for column_BT in (table.ratios_BT, table.marks_BT):
            assert column_BT is not None
            first.parallel.sum(column_BT)
        metrics = {agent: _combine(steps) | {"update/learning_rate": rates[agent]} for agent, steps in results.items()}
        named = {f"agents/{agent}/{name}": value[name] for agent, value in metrics.items() if agent for name in value}
        return named | _combine(metrics.values())

    def _steps(
        self, batch: Batch, table: RolloutBatch, *, version: int, scale: float
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Take each policy's steps on random mini-batches of its episodes, and yield the agent and metrics of each."""
        masks = self._masks(table)
        scoring: dict[str, dict[str, float]] = {}
        for agent, mask_BT in masks.items():
            trainer, (main, branches) = self.by_agent[agent], table.main_and_branches(_rows_with(mask_BT))
            if trainer.algorithm.scores_first(len(main or branches)):
                scoring[agent] = self._score(agent, batch, table, mask_BT, version)
        table.advantages = self._first.estimate(table)
        for agent, mask_BT in masks.items():
            trainer, finds = self.by_agent[agent], agent not in scoring
            parts = [part for part in table.main_and_branches(_rows_with(mask_BT)) if part]
            metrics = scoring.get(agent, {}) | _critic_metrics(table)
            for _ in range(trainer.algorithm.epochs):
                orders = [torch.randperm(len(part), generator=trainer.generator).tolist() for part in parts]
                cuts = [split(order, trainer.algorithm.steps(len(orders[0]))) for order in orders]
                for mini_batches in zip_longest(*cuts, fillvalue=()):
                    rows = [part[item] for part, items in zip(parts, mini_batches, strict=True) for item in items]
                    step_metrics = trainer.take_step(
                        batch, table, rows, mask_BT=mask_BT, version=version, scale=scale, finds=finds
                    )
                    yield agent, metrics | step_metrics
                    metrics, finds = {}, False

    def _masks(self, table: RolloutBatch) -> dict[str, Tensor]:
        """Return the mask [B, T] of each policy's tokens. Raises ConfigError for an agent without a policy."""
        if "" in self.by_agent:
            return {"": table.mask_BT}
        units, agents = agent_units(table)
        if unknown_agents := [agent for agent in agents if agent not in self.by_agent]:
            raise ConfigError(
                f"an episode has turns of agent {unknown_agents[0]!r}, but script.policies names "
                f"{', '.join(self.by_agent)}"
            )
        masks = {agent: units.mask_BT & (units.index_BT == index) for index, agent in enumerate(agents)}
        return {agent: mask_BT for agent, mask_BT in masks.items() if mask_BT.any()}

    def _score(self, agent: str, batch: Batch, table: RolloutBatch, mask_BT: Tensor, version: int) -> dict[str, float]:
        """Score an agent's tokens with its policy, and return metrics of the scores. Raises LogprobGap."""
        trainer = self.by_agent[agent]
        trainer.score(batch, table, mask_BT)
        metrics = trainer.check_sampler(batch, table, table.old_logprobs_BT, version, mask_BT)
        return metrics | trainer.algorithm.distillation.measure(table, mask_BT)

    @property
    def _first(self) -> PolicyTrainer:
        """The first trainer, for values that are the same in all of them."""
        return next(iter(self.by_agent.values()))

    def gradients(self, groups: Sequence[Group], *, version: int, buckets: int) -> dict[str, float]:
        """Return norms of the policies' gradients, without taking an optimiser step.

        Norms are returned per loss component for buckets of groups with similar reward deviation, over all policies. If
        there are several agents, norms per agent are returned as well.

        Args:
            groups: Groups to measure. Those without episodes are skipped.
            buckets: Maximum number of buckets, not counting the one of groups without deviation.
        """
        usable_groups = [group for group in groups if episodes_of([group])]
        batch, table, masks = scored = self._scored(usable_groups, [], version)
        advantages = table.advantages
        assert advantages is not None

        def backward(part: Sequence[Group], component: str) -> None:
            self._add_gradient(*scored, part, components=(component,))

        def norm(agent: str, given_BT: Tensor) -> float:
            agent = agent if agent in masks else ""
            other_table = replace(table, advantages=advantages._replace(advantages_BT=given_BT))
            trainer, mask_BT = self.by_agent[agent], masks[agent]
            rows = _rows_with(mask_BT)
            add = partial(trainer.accumulate, batch, other_table, rows, mask_BT=mask_BT, components=("task",))
            return gradient_norm(trainer.policy, add)

        metrics = gradient_report(self.policies, usable_groups, backward, buckets=buckets)
        metrics |= agent_report(table, advantages.advantages_BT, norm)
        self.policies.zero_grad(set_to_none=True)
        return metrics

    def signal_and_noise(
        self, groups: Sequence[Group], *, collected: int, version: int, scale: float = 1.0
    ) -> tuple[float, float]:
        """Return estimates for the gradient of `learn` before its first step, without the critic's loss.

        They are those of diagnostics/gradients.py, over all policies.

        Args:
            groups: Groups that the filter kept.
            collected: Number of groups before the filter, at least 2.
        """
        scored = self._scored(groups, branches_of(groups), version)
        backward = partial(self._add_gradient, *scored, by_share=True, scale=scale, components=GRADIENT_TERMS)
        return signal_and_noise(self.policies, groups, backward, collected=collected)

    def _scored(
        self, groups: Sequence[Group], branches: Sequence[Episode], version: int
    ) -> tuple[Batch, RolloutBatch, dict[str, Tensor]]:
        """Return a batch, its scored table with advantages, and each policy's mask [B, T], as before an update."""
        batch = Batch([*episodes_of(groups), *branches], self._first.parallel.device)
        table = self._first.tabulate(batch, branches=len(branches))
        masks = self._masks(table)
        for agent, mask_BT in masks.items():
            self._score(agent, batch, table, mask_BT, version)
        # Compute advantages over the whole batch, as in an update. A bucket without deviation would show a gradient if
        # it were whitened separately.
        table.advantages = self._first.estimate(table)
        return batch, table, masks

    def _add_gradient(
        self,
        batch: Batch,
        table: RolloutBatch,
        masks: Mapping[str, Tensor],
        groups: Sequence[Group],
        *,
        by_share: bool = False,
        **options: Any,
    ) -> None:
        """Add the gradient of some groups of a batch; with `by_share`, their share of the whole batch's gradient."""
        ids = {id(episode) for group in groups for episode in (*group.episodes, *group.branches)}
        for agent, mask_BT in masks.items():
            rows = _rows_with(mask_BT)
            if part := [row for row in rows if id(batch.episodes[row]) in ids]:
                whole = rows if by_share else part
                self.by_agent[agent].accumulate(batch, table, whole, part=part, mask_BT=mask_BT, **options)

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


def _rows_with(mask_BT: Tensor) -> list[int]:
    """Return the rows that have a token in the mask."""
    rows: list[int] = mask_BT.any(1).nonzero().flatten().tolist()
    return rows


def _combine(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric, or its maximum if its name ends in `_max`."""
    lists: defaultdict[str, list[float]] = defaultdict(list)
    for metrics in reports:
        for name, value in metrics.items():
            lists[name].append(value)
    return {name: max(values) if name.endswith("_max") else sum(values) / len(values) for name, values in lists.items()}


def _critic_metrics(table: RolloutBatch) -> dict[str, float]:
    advantages = table.advantages
    if table.values_BT is None or advantages is None or advantages.returns_BT is None:
        return {}
    share = explained_variance(table.values_BT, advantages.returns_BT, advantages.value_mask_BT)
    return {"critic/explained_variance": share}


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that only knows the mean.

    Args:
        returns_BT: Targets of the critic [B, T]. If they are all equal, the result is 0.
        mask_BT: True for the tokens that count (bool [B, T]).
    """
    returns = returns_BT[mask_BT]
    spread = returns.var(correction=0)
    return float(1 - (returns - values_BT[mask_BT]).var(correction=0) / spread) if spread > 0 else 0.0
