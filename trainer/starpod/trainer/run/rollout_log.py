"""Record of what was played and of what updates made of it, in the run's folder."""

from __future__ import annotations

from collections.abc import Sequence

from starpod.trainer.algorithms.filters import verdicts
from starpod.trainer.algorithms.sections import FilterConfig
from starpod.trainer.data.episode import Group
from starpod.trainer.data.updates import UpdateRecord, Verdict
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from starpod.trainer.parallel import Parallel


class RolloutLog:
    """Writes the groups of each step, and their verdicts and tokens; the oldest steps make room.

    mib: room for all of it; 0: nothing is kept. Only rank 0 writes.
    """

    def __init__(self, folder: RunFolder, parallel: Parallel, screen: Screen, *, mib: float) -> None:
        self._folder = folder
        self._parallel = parallel
        self._screen = screen
        self._mib = mib
        self._played: Sequence[Group] = ()
        self._verdicts: dict[int, Verdict] = {}

    @property
    def enabled(self) -> bool:
        return self._most > 0

    @property
    def _most(self) -> int:
        return int(self._mib * 2**20)

    def begin(self, played: Sequence[Group], passed_over: Sequence[Group]) -> None:
        """Take the groups of a step, and those of them that dynamic sampling passed over."""
        verdict = Verdict(False, "Its returns are all the same: dynamic sampling asked for another.")
        self._played, self._verdicts = played, {group.id: verdict for group in passed_over}

    def judge(self, config: FilterConfig, groups: Sequence[Group], kept: Sequence[Group]) -> None:
        """Note what the filter made of the groups."""
        if self.enabled and self._parallel.is_main:
            self._verdicts |= verdicts(config, groups, kept)

    async def write_rollouts(self, step: int) -> None:
        """Write what was played in a step. Raises CannotWrite."""
        if not (self.enabled and self._parallel.is_main):
            return
        episodes = [episode for group in self._played for episode in group.members]
        if not await self._parallel.in_thread(self._folder.write_rollouts, step, episodes, most=self._most):
            self._screen.warn(
                f"the episodes of one step take more than collect.keep_mib ({self._mib:g}) and are not kept: raise it, "
                "or set it to 0"
            )

    async def write_update(self, step: int, record: UpdateRecord) -> None:
        """Write what an update made of them. Raises CannotWrite."""
        if self._parallel.is_main:
            await self._parallel.in_thread(
                self._folder.write_update, step, self._verdicts, record.tokens(), most=self._most
            )
