"""Division of each collection among the environments of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from starpod.trainer.configuration.seeds import SeedCursor, SeedRange, SeedsConfig, derive
from starpod.trainer.configuration.tasks import TaskConfig
from starpod.trainer.data.episode import Episode, reports_success
from starpod.trainer.data.group import Group
from starpod.trainer.rollout.collect import Start
from starpod.trainer.rollout.curriculum import Levels, make_curriculum
from starpod.trainer.rollout.saved_starts import SavedStart, read_starts

TRAINING = SeedsConfig().train
"""Default seeds of training."""


class Mixture:
    """Division of collections among environments by weight, and each environment's curriculum.

    Each group goes to the environment that is furthest behind its share of all groups so far; ties go to the first. A
    replacement for a lost group is played in the same environment and does not count.
    """

    def __init__(self, tasks: Sequence[TaskConfig], seeds: SeedRange = TRAINING, run_seed: int = 0) -> None:
        weights = {task.name: Fraction(task.weight) for task in tasks}
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items()}
        self._group_counts = dict.fromkeys(weights, 0)
        self._saved_starts = {
            task.name: read_starts(task.environment.starts, task.environment.id)
            for task in tasks
            if task.environment.starts
        }
        self._saved_shares = {task.name: Fraction(task.environment.starts_share) for task in tasks}
        self._curricula = {
            task.name: make_curriculum(task.environment.curriculum, seeds, derive(run_seed, "curriculum", task.name))
            for task in tasks
        }
        self._begun = dict.fromkeys(weights, 0)
        # Id of the next group, and the first group id at each task's current level.
        self._next, self._level_from = 0, dict.fromkeys(weights, 0)

    def divide(self, count: int) -> list[str]:
        """Return the task of each of the next `count` groups."""
        names = []
        for _ in range(count):
            number = sum(self._group_counts.values()) + 1
            name = max(self._shares, key=lambda name: self._shares[name] * number - self._group_counts[name])
            self._group_counts[name] += 1
            names.append(name)
        return names

    def starts(self, names: Sequence[str], cursor: SeedCursor) -> list[Start]:
        """Return a start for each named task, as its curriculum chooses it, by default with the next seeds."""
        first, seeds = cursor.taken, cursor.take(len(names))
        self._next = cursor.taken
        return [
            Start(
                number,
                self._curricula[name].choose_seed(number, seed),
                name,
                self._curricula[name].options,
                self._saved_start(name),
            )
            for number, (name, seed) in enumerate(zip(names, seeds, strict=True), first)
        ]

    def _saved_start(self, name: str) -> SavedStart | None:
        """Return the saved start of a task's next group; None to begin in its seed's start state.

        It is chosen by the group's number among the task's groups.
        """
        starts, share, number = self._saved_starts.get(name, ()), self._saved_shares[name], self._begun[name]
        self._begun[name] += 1
        count = math.floor((number + 1) * share)
        return starts[(count - 1) % len(starts)] if starts and count > math.floor(number * share) else None

    def levels(self) -> dict[str, int]:
        """Return the level of each task whose curriculum has levels."""
        return {name: each.level for name, each in self._curricula.items() if isinstance(each, Levels) and each.enabled}

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics of each task's curriculum."""
        return {name: curriculum.metrics() for name, curriculum in self._curricula.items()}

    def update(self, groups: Sequence[Group]) -> list[str]:
        """Update the curricula with an iteration's groups, and return the tasks that rise to the next level.

        Groups that began at an earlier level do not count.
        """
        current: dict[str, list[Group]] = {}
        for group in groups:
            if group.episodes and group.id >= self._level_from[task := group.episodes[0].task]:
                current.setdefault(task, []).append(group)
        names = [name for name, own_groups in current.items() if self._curricula[name].update(own_groups)]
        self._level_from |= dict.fromkeys(names, self._next)
        return names

    def silent(self, groups: Sequence[Group]) -> list[str]:
        """Return the tasks with a curriculum whose episodes do not report success."""
        played: dict[str, list[Episode]] = {}
        for group in groups:
            for episode in group.episodes:
                played.setdefault(episode.task, []).append(episode)
        return [name for name, own in played.items() if self._curricula[name].enabled and not reports_success(own)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "shares": {name: str(share) for name, share in self._shares.items()},
            "given": dict(self._group_counts),
            "begun": dict(self._begun),
            "curricula": {name: curriculum.state_dict() for name, curriculum in self._curricula.items()},
            "level_from": dict(self._level_from),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values from `state_dict`. If the shares have changed, the division begins anew."""
        if state["shares"] == {name: str(share) for name, share in self._shares.items()}:
            self._group_counts = dict(state["given"])
        for name, curriculum in self._curricula.items():
            if name in state["curricula"]:
                self._begun[name] = state["begun"][name]
                curriculum.load_state_dict(state["curricula"][name])
                self._level_from[name] = state["level_from"][name]
