"""Files of what was found by playing: demonstrations to imitate and start states to train from, by environment."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from starpod.trainer.data.episode import Episode
from starpod.trainer.seeds import SeedsConfig
from starpod.ui.games import Game, Games, close
from starpod.ui.policies import NotPossible
from starpod.ui.reading import mapping

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


def held_out(seed: int, run: Path | None) -> tuple[str, int]:
    """The range of an evaluation that a seed lies in, in words, empty where in none; and a seed that is in none.

    run: whose ranges count; None: those of a run that says nothing else.
    """
    try:
        seeds = SeedsConfig.model_validate(mapping(run / "config.yaml", []).get("seeds") or {} if run else {})
    except ValidationError:
        seeds = SeedsConfig()
    return seeds.holds_out(seed), seeds.train.start


async def save(games: Games, folder: Path, kind: str, game: Game) -> None:
    """Adds a game's turns as a demonstration, or its present state as a start state. Raises NotPossible."""
    if not game.turns:
        raise NotPossible("There is no turn to save yet.")
    if kind == "starts":
        line = game.as_start().to_line()
    typed = bool(game.spec.action_space.tools)
    if typed or (kind == "starts" and game.luck):
        await _confirm(games, game, typed=typed)
    if kind == "starts":
        await asyncio.to_thread(_append, folder, kind, game.episode, game.run, line)
    else:
        await asyncio.to_thread(save_demonstration, folder, game.episode, game.run)


def save_demonstration(folder: Path, episode: Episode, run: Path | None) -> None:
    """Adds an episode to the demonstrations of its environment. run: whose episode it began as. Raises NotPossible."""
    # Numbered by their place in the file, as the groups of a run are.
    before = saved(folder, "demonstrations", episode.environment)
    episode = replace(episode, group=before.count if before else 0)
    line = json.dumps(episode.to_json(), ensure_ascii=False) + "\n"
    _append(folder, "demonstrations", episode, run, line)


def _append(folder: Path, kind: str, episode: Episode, run: Path | None, line: str) -> None:
    held, other = held_out(episode.seed, run)
    if held:
        raise NotPossible(
            f"Seed {episode.seed} is held out by {held}: a run that is given the file would refuse all of it. Play "
            f"from another seed, such as {other}, and save that."
        )
    path = folder / kind / f"{episode.environment}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise NotPossible(f"{path} cannot be written: {error.strerror or error}") from None


async def _confirm(games: Games, game: Game, *, typed: bool) -> None:
    """Plays a game's turns again as a run would: from its seeds, in texts. Raises NotPossible where they come to
    something else. typed: what a person sent were calls of tools."""
    if game.copied:
        raise NotPossible("This is a copy of another's session: what led to its state is not known.")
    try:
        again = await games.replay(game.episode, game.task, len(game.turns))
    except NotPossible as error:
        why = "calls of tools that are sent as texts" if typed else "these actions with the luck of its seeds"
        raise NotPossible(f"A run would not come to this by {why}: {error}") from None
    await close([again.session])
