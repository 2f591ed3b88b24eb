"""Asynchronous collection: groups are admitted early and keep playing while the policy is updated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.rollout.collect import Collected, Collector, Start
from starpod.trainer.rollout.saved_starts import SavedStart


@dataclass(slots=True)
class Admitted:
    """A group that is being played, or that is finished and not yet taken."""

    start: Start
    stage: int
    """Stage of the run in which the group was admitted."""
    episodes: dict[int, Episode] = field(default_factory=dict)
    """The group's episodes so far, by member; empty on the ranks that do not play this group."""
    playing: asyncio.Task[Group] | None = None
    """The task that plays the group; None before it begins, and on the ranks that do not play this group."""


class Ahead:
    """Queue of the groups that were admitted and not yet taken, oldest first.

    Groups are taken in the order of admission, not in the order in which they end. Long episodes are therefore trained
    on as often as short ones. `Parallel.plays` divides the groups among the ranks.

    Attributes:
        stage: Stage in which groups are admitted now. They finish in it, also after a resumption.

    players: collector and group size of each stage of the run.
    """

    def __init__(self, players: Sequence[tuple[Collector[EngineAgents], int]], parallel: Parallel) -> None:
        self.stage = len(players) - 1
        self._players = players
        self._parallel = parallel
        self._admitted: dict[int, Admitted] = {}
        self._groups_in_play = 0
        self._busy_seconds = 0.0
        self._busy_since = 0.0

    def __len__(self) -> int:
        return len(self._admitted)

    @property
    def admitted(self) -> Sequence[Admitted]:
        """Return the admitted groups, oldest first."""
        return tuple(self._admitted.values())

    @property
    def busy_seconds(self) -> float:
        """Seconds so far during which at least one group was being played."""
        return self._busy_seconds + (perf_counter() - self._busy_since if self._groups_in_play else 0.0)

    def admit(self, starts: Iterable[Start]) -> None:
        """Start to play these groups, and also the groups that `load_state` restored."""
        self._admitted |= {start.id: Admitted(start, self.stage) for start in starts}
        for group in self._admitted.values():
            if group.playing is None and self._parallel.plays(group.start.id):
                group.playing = asyncio.ensure_future(self._play(group))

    def oldest(self, count: int) -> list[Start]:
        """Return the starts of the `count` oldest groups, or of all groups if there are fewer."""
        return [group.start for group in islice(self._admitted.values(), count)]

    def oldest_of(self, tasks: Sequence[str]) -> list[Start]:
        """Return the start of the oldest group of each task, of two groups if a task is listed twice, and so on."""
        names, starts = list(tasks), []
        for group in self._admitted.values():
            if group.start.task in names:
                names.remove(group.start.task)
                starts.append(group.start)
        return starts

    async def take(self, starts: Sequence[Start], *, min_size: int = 1) -> Collected:
        """Wait until these groups are over, remove them and return the groups that this rank played.

        `Collector.deadline` bounds the wait for an episode, and the fleet's patience the wait for a server. Errors are
        raised as by `Collector.collect`.
        """
        for group in self._admitted.values():
            if group.playing is not None and group.playing.done():
                group.playing.result()  # raise a fatal error of a later group now, not when that group is taken
        futures = [self._admitted[start.id].playing for start in starts]
        groups = await asyncio.gather(*(task for task in futures if task is not None))
        for start in starts:
            del self._admitted[start.id]
        return Collected.of(groups, min_size)

    async def close(self) -> None:
        """Cancel all groups. Safe to call again."""
        futures = [group.playing for group in self._admitted.values() if group.playing is not None]
        for task in futures:
            task.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        self._admitted.clear()

    async def _play(self, group: Admitted) -> Group:
        if not self._groups_in_play:
            self._busy_since = perf_counter()
        self._groups_in_play += 1
        try:
            collector, size = self._players[group.stage]
            return await collector.play_group(group.start, size, group.episodes)
        finally:
            self._groups_in_play -= 1
            if not self._groups_in_play:
                self._busy_seconds += perf_counter() - self._busy_since

    @staticmethod
    def state(admitted: Iterable[Admitted]) -> list[dict[str, Any]]:
        """Return these groups as JSON values, with the episodes that this rank plays.

        An unfinished episode is saved as its turns so far. To resume it, their actions are sent to a new session. A
        reply that was being sampled is sampled again from the start, with the same random stream.
        """
        return [
            {
                "start": asdict(group.start),
                "stage": group.stage,
                "episodes": [episode.to_json() for episode in group.episodes.values()],
            }
            for group in admitted
        ]

    def load_state(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Restore groups from the states of all ranks, whose number may have changed. `admit` starts to play them."""
        for values in state:
            saved_values = values["start"].get("saved")
            start = Start(**{**values["start"], "saved": SavedStart(**saved_values) if saved_values else None})
            stage = min(values.get("stage", self.stage), len(self._players) - 1)  # a run may have fewer stages now
            group = self._admitted.setdefault(start.id, Admitted(start, stage))
            if not self._parallel.plays(start.id):
                continue  # another rank continues these episodes, and a copy would soon be out of date
            for episode in map(Episode.from_json, values["episodes"]):
                if episode.member < self._players[stage][1]:
                    group.episodes[episode.member] = episode
