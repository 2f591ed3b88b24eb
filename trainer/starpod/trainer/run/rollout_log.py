"""Log of rollouts and updates in the run folder."""

from __future__ import annotations

from collections.abc import Sequence

from starpod.trainer.algorithms.filters import verdicts
from starpod.trainer.algorithms.sections import Filter
from starpod.trainer.data.batch import RolloutBatch
from starpod.trainer.data.group import Group
from starpod.trainer.data.updates import Verdict, token_records
from starpod.trainer.output.episode_folder import EpisodeFolder
from starpod.trainer.run.progress import Shared


class RolloutLog:
    """Writer of each step's groups, filter verdicts and trained tokens. Only rank 0 writes.

    mib: maximum size of the log in MiB, beyond which the oldest steps are deleted. With 0 nothing is written.
    """

    def __init__(self, shared: Shared, folder: EpisodeFolder, *, mib: float) -> None:
        self._shared = shared
        self._folder = folder
        self._mib = mib
        self._groups: Sequence[Group] = ()
        self._verdicts: dict[int, Verdict] = {}

    @property
    def enabled(self) -> bool:
        return self._max_bytes > 0

    @property
    def _max_bytes(self) -> int:
        return int(self._mib * 2**20)

    def begin(self, groups: Sequence[Group], rejected_groups: Sequence[Group]) -> None:
        """Set the groups of a step. rejected_groups: groups that dynamic sampling rejected."""
        verdict = Verdict(False, "Its returns are all the same: dynamic sampling replaced it.")
        self._groups, self._verdicts = groups, {group.id: verdict for group in rejected_groups}

    def judge(self, config: Filter, groups: Sequence[Group], kept_groups: Sequence[Group]) -> None:
        """Record which groups the filter kept, and why."""
        if self.enabled and self._shared.parallel.is_main:
            self._verdicts |= verdicts(config, groups, kept_groups)

    async def write_rollouts(self, step: int) -> None:
        """Write the episodes of a step. Raises CannotWrite."""
        if not (self.enabled and self._shared.parallel.is_main):
            return
        episodes = [episode for group in self._groups for episode in group.members]
        if not await self._shared.parallel.in_thread(
            self._folder.write_rollouts, step, episodes, max_bytes=self._max_bytes
        ):
            self._shared.screen.warn(
                f"the episodes of one step take more than collect.keep_mib ({self._mib:g}) and are not kept: raise it, "
                "or set it to 0"
            )

    async def write_update(self, step: int, table: RolloutBatch | None) -> None:
        """Write the verdicts and the record of each token of an update; None if it was skipped. Raises CannotWrite."""
        if self.enabled and self._shared.parallel.is_main:
            records = () if table is None else token_records(table)
            await self._shared.parallel.in_thread(
                self._folder.write_update, step, self._verdicts, records, max_bytes=self._max_bytes
            )
