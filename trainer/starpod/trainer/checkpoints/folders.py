"""The folders of a run's checkpoints: how they are named, which are there, and which one is the best and the latest.

Free of torch, for pages and commands that only list them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from starpod.trainer.data.untrusted import read_bytes

MARKS = ("best", "latest")
"""Files beside the folders, each with the name of one."""
_MOST_NAME = 4096
"""Bytes of a mark."""
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointFolder:
    """A folder that is named as a checkpoint.

    step: after which it was saved. number: 1, or a higher one if the step was saved again; the highest is the newest.
    """

    step: int
    number: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name


def folder_name(step: int, number: int = 1) -> str:
    """Return the name of the folder of a step that is saved for the `number`th time."""
    return f"step-{step:08d}" if number == 1 else f"step-{step:08d}-{number}"


def list_checkpoints(checkpoints: Path, without: Collection[Path] = ()) -> list[CheckpointFolder]:
    """Return the folders in `checkpoints`, newest first; none if it does not exist. Raises OSError."""
    if not checkpoints.is_dir():
        return []
    matches = ((path, _FOLDER.fullmatch(path.name)) for path in checkpoints.iterdir() if path not in without)
    found = [CheckpointFolder(int(match[1]), int(match[2] or 1), path) for path, match in matches if match]
    return sorted(found, reverse=True)


def marks_of(checkpoints: Path) -> dict[str, list[str]]:
    """Return the marks (best, latest) of each marked folder, by its name."""
    named: dict[str, list[str]] = {}
    for mark in MARKS:
        try:
            target = read_bytes(checkpoints / mark, _MOST_NAME).decode().strip()
        except (OSError, ValueError):
            continue
        named.setdefault(target, []).append(mark)
    return named
