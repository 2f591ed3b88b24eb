"""Collection ahead of its use: groups are admitted early and play on while the policy is updated."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.data.episode import Episode, Group
from starpod.trainer.parallel import Parallel
from starpod.trainer.rollout.collect import Collected, Collector, Start
from starpod.trainer.rollout.saved_starts import SavedStart


@dataclass(slots=True)
class Admitted:
    """A group in play, or over and not yet taken. episodes: its own by member, as far as they have come; each rank has
    those of the groups that it plays. playing: None before it begins, and on the other ranks."""

    start: Start
    episodes: dict[int, Episode] = field(default_factory=dict)
    playing: asyncio.Task[Group] | None = None


class Ahead:
    """Groups that were admitted and not yet taken, in the order of admission. They are taken in that order: a batch is
    never made of those that happened to end first, so long episodes are trained on as often as short ones.

    size: episodes of a group. parallel: the ranks, which share the groups out by number.
    """

    def __init__(self, collector: Collector[EngineAgents], size: int, parallel: Parallel) -> None:
        self._collector = collector
        self._size = size
        self._parallel = parallel
        self._admitted: dict[int, Admitted] = {}
        self._playing = 0
        self._busy = 0.0
        self._busy_since = 0.0

    def __len__(self) -> int:
        return len(self._admitted)

    @property
    def admitted(self) -> Sequence[Admitted]:
        """What is admitted now, in order."""
        return tuple(self._admitted.values())

    def configure(self, collector: Collector[EngineAgents], size: int) -> None:
        """Plays what is admitted from now on with another collector, in groups of `size`."""
        self._collector, self._size = collector, size

    @property
    def busy(self) -> float:
        """Seconds in which any group was in play, until now."""
        return self._busy + (perf_counter() - self._busy_since if self._playing else 0.0)

    def admit(self, starts: Iterable[Start]) -> None:
        """Begins to play these groups, and those that a checkpoint held."""
        self._admitted |= {start.id: Admitted(start) for start in starts}
        for group in self._admitted.values():
            if group.playing is None and group.start.id % self._parallel.world == self._parallel.rank:
                group.playing = asyncio.ensure_future(self._play(group))

    def oldest(self, count: int) -> list[Start]:
        """The first `count`, or all."""
        return [group.start for group in islice(self._admitted.values(), count)]

    def oldest_of(self, tasks: Sequence[str]) -> list[Start]:
        """The first one of each task that is named, as often as it is named and as they last."""
        wanted, found = list(tasks), []
        for group in self._admitted.values():
            if group.start.task in wanted:
                wanted.remove(group.start.task)
                found.append(group.start)
        return found

    async def take(self, starts: Sequence[Start], *, min_size: int = 1) -> Collected:
        """This rank's groups among these, when all of them are over; as `Collector.collect`.

        Every wait for an episode ends by `Collector.deadline`, every wait for a server by the fleet's patience.
        """
        for group in self._admitted.values():
            if group.playing is not None and group.playing.done():
                group.playing.result()  # what no group can survive ends the run now, not when its turn comes
        playing = [self._admitted[start.id].playing for start in starts]
        groups = await asyncio.gather(*(task for task in playing if task is not None))
        for start in starts:
            del self._admitted[start.id]
        return Collected.of(groups, min_size)

    async def close(self) -> None:
        """Ends what is in play. Harmless to repeat."""
        playing = [group.playing for group in self._admitted.values() if group.playing is not None]
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
        self._admitted.clear()

    async def _play(self, group: Admitted) -> Group:
        if not self._playing:
            self._busy_since = perf_counter()
        self._playing += 1
        try:
            return await self._collector.play_group(group.start, self._size, group.episodes)
        finally:
            self._playing -= 1
            if not self._playing:
                self._busy += perf_counter() - self._busy_since

    @staticmethod
    def state(admitted: Iterable[Admitted]) -> list[dict[str, Any]]:
        """JSON values of these groups, with the episodes that this rank plays. Of an episode in play they hold the
        turns: its session is rebuilt by sending them again; a reply that is being sampled begins again, with the random
        stream that is its own."""
        return [
            {"start": asdict(group.start), "episodes": [episode.to_json() for episode in group.episodes.values()]}
            for group in admitted
        ]

    def load_state(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Goes on with these groups as soon as others are admitted. state: of all ranks, however many they were."""
        for values in state:
            saved = values["start"].get("saved")
            start = Start(**{**values["start"], "saved": SavedStart(**saved) if saved else None})
            group = self._admitted.setdefault(start.id, Admitted(start))
            for episode in map(Episode.from_json, values["episodes"]):
                if episode.member < self._size:
                    group.episodes[episode.member] = episode
