"""Files of what was found by playing: demonstrations to imitate and start states to train from, by environment."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from starpod.ui.games import Game, NotPossible

KINDS = ("demonstrations", "starts")
"""Names of the folders beside the runs, in which each environment has a file."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A file of a kind, and the lines that it has."""

    kind: str
    path: Path
    count: int

    @property
    def words(self) -> str:
        """What a run that uses it is given on its command line."""
        if self.kind == "starts":
            return f"environment.starts={self.path}"
        return f"warm_start.demonstrations={self.path} warm_start.steps=200"


def saved(folder: Path, kind: str, environment: str) -> Saved | None:
    """The file of an environment; None where there is none yet."""
    path = folder / kind / f"{environment}.jsonl"
    try:
        return Saved(kind, path, path.read_bytes().count(b"\n"))
    except OSError:
        return None


def save(folder: Path, kind: str, game: Game) -> None:
    """Adds a game's turns as a demonstration, or its present state as a start state. Raises NotPossible."""
    if kind == "starts":
        line = game.as_start().to_line()
    elif not game.turns:
        raise NotPossible("There is no turn to imitate yet.")
    else:
        # Numbered by their place in the file, as the groups of a run are.
        before = saved(folder, kind, game.spec.id)
        episode = replace(game.episode, group=before.count if before else 0)
        line = json.dumps(episode.to_json(), ensure_ascii=False) + "\n"
    path = folder / kind / f"{game.spec.id}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise NotPossible(f"{path} cannot be written: {error.strerror or error}") from None
