"""Names of a run's checkpoint folders, and their listing.

This module does not import torch, so that pages and commands that only list checkpoints start quickly.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from starpod.trainer.data.untrusted import read_bytes

MARKS = ("best", "latest")
"""Files next to the checkpoint folders. Each contains the name of one folder."""
_MOST_NAME = 4096
"""Maximum size of a mark in bytes."""
_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointFolder:
    """A folder with the name of a checkpoint."""

    step: int
    """Number of iterations after which it was saved."""
    number: int
    """1 for the first save of the step, then 2 and so on. The highest is the newest."""
    path: Path

    @property
    def name(self) -> str:
        return self.path.name


def folder_name(step: int, number: int = 1) -> str:
    """Return the folder name for the `number`th save of a step."""
    return f"step-{step:08d}" if number == 1 else f"step-{step:08d}-{number}"


def list_checkpoints(checkpoints: Path, without: Collection[Path] = ()) -> list[CheckpointFolder]:
    """Return the checkpoint folders, newest first; empty if `checkpoints` does not exist. Raises OSError."""
    if not checkpoints.is_dir():
        return []
    matches = ((path, _FOLDER.fullmatch(path.name)) for path in checkpoints.iterdir() if path not in without)
    folders = [CheckpointFolder(int(match[1]), int(match[2] or 1), path) for path, match in matches if match]
    return sorted(folders, reverse=True)


def marks_of(checkpoints: Path) -> dict[str, list[str]]:
    """Return the marks (best, latest) of each marked folder, by folder name."""
    marks: dict[str, list[str]] = {}
    for mark in MARKS:
        try:
            target = read_bytes(checkpoints / mark, _MOST_NAME).decode().strip()
        except (OSError, ValueError):
            continue
        marks.setdefault(target, []).append(mark)
    return marks
