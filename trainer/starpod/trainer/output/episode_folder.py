"""The files of a run's episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import write_episodes
from starpod.trainer.data.updates import TokenRecord, Verdict, update_file, write_update
from starpod.trainer.output.files import to_json_line, write_atomic


class EpisodeFolder:
    """The folder of a run's episodes by step; `RunFolder` names its files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, episodes: Iterable[Episode], kind: str = "eval") -> Path:
        """Write <kind>-<step>.jsonl, one episode per line, by the policy of a step. Raises CannotWrite."""
        path = self.path / f"{kind}-{step:06d}.jsonl"
        write_atomic(path, "".join(to_json_line(episode.to_json()) for episode in episodes))
        return path

    def write_rollouts(self, step: int, episodes: Iterable[Episode], *, max_bytes: int) -> bool:
        """Write train-<step>.jsonl.gz, and remove the oldest of these files beyond `max_bytes` in total.

        Returns False if the new file alone was too large and was removed. Raises CannotWrite.
        """
        path = self.path / f"train-{step:06d}.jsonl.gz"
        write_episodes(path, episodes)
        self._make_room(max_bytes)
        return path.exists()

    def write_update(
        self,
        step: int,
        verdicts: Mapping[int, Verdict],
        records: Iterable[tuple[Episode, TokenRecord]],
        *,
        max_bytes: int,
    ) -> None:
        """Write the record of a step's update if the step's rollouts are still kept, and make room as they do.

        Args:
            step: Step of the update.
            verdicts: The filter's verdict on each group, by group number.
            records: Trained episodes with the records of their tokens.
            max_bytes: Maximum total size of rollouts and records.
        """
        rollouts = self.path / f"train-{step:06d}.jsonl.gz"
        if not rollouts.exists():
            return
        write_update(update_file(rollouts), verdicts, records)
        self._make_room(max_bytes)

    def _make_room(self, max_bytes: int) -> None:
        """Remove the oldest rollouts and their update records until the total is at most `max_bytes`."""
        total = 0
        for file in sorted(self.path.glob("train-*.jsonl.gz"), key=step_of, reverse=True):
            for path in (file, update_file(file)):
                if path.exists():
                    total += path.stat().st_size
                    if total > max_bytes:
                        path.unlink()
            if not file.exists():
                update_file(file).unlink(missing_ok=True)

    def files(self, kind: str = "eval") -> list[Path]:
        """Return the episode files of a kind, in the order of their steps."""
        return sorted(self.path.glob(f"{kind}-*.jsonl*"), key=step_of)

    def cut_after(self, step: int) -> None:
        """Remove the episodes of later steps, and those of the final evaluation."""
        for path in (*self.path.glob("*-*.jsonl*"), *self.path.glob("*-*.update.gz")):
            if step_of(path) > step or path.name.startswith("final-"):
                path.unlink()


def step_of(path: Path) -> int:
    """Return the step in the name of an episode file; -1 if there is none."""
    digits = path.name.partition(".")[0].rpartition("-")[2]
    return int(digits) if digits.isdecimal() else -1
