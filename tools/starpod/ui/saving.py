"""Files of demonstrations to imitate and start states to train from, which visitors save while they play."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from starpod.remote.game import Impossible
from starpod.trainer.configuration.seeds import SeedsConfig
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import append_line
from starpod.ui.games import Games, LiveGame
from starpod.ui.reading import mapping

KINDS = ("demonstrations", "starts")
"""Names of the folders beside the runs. Each contains a file per environment."""

_saving = threading.RLock()


@dataclass(frozen=True, slots=True)
class Saved:
    """A file of demonstrations or start states."""

    kind: str
    path: Path
    count: int
    """Number of lines."""

    @property
    def words(self) -> str:
        """Command-line arguments of a run that uses the file."""
        if self.kind == "starts":
            return f"environment.starts={self.path}"
        return f"warm_start.demonstrations={self.path} warm_start.steps=200"


def saved(folder: Path, kind: str, environment: str) -> Saved | None:
    """Return the file of an environment; None if there is none yet. kind: one of KINDS."""
    path = folder / kind / f"{environment}.jsonl"
    try:
        return Saved(kind, path, path.read_bytes().count(b"\n"))
    except OSError:
        return None


def held_out(seed: int, run: Path | None) -> tuple[str, int]:
    """Return a description of the held-out range that contains a seed, and another seed that is in no such range.

    The description is empty if the seed is in no held-out range.

    run: folder of the run whose ranges apply; None: the default ranges.
    """
    try:
        seeds = SeedsConfig.model_validate(mapping(run / "config.yaml", []).get("seeds") or {} if run else {})
    except ValidationError:
        seeds = SeedsConfig()
    return seeds.holds_out(seed), seeds.train.start


async def save(games: Games, folder: Path, kind: str, game: LiveGame) -> None:
    """Save a game's turns as a demonstration, or its current state as a start state.

    Args:
        games: the site's games, to replay turns that must be confirmed.
        kind: one of KINDS.
        game: a game with at least one turn.

    Raises:
        Impossible: there is no turn, the turns cannot be replayed, the seed is held out, or the file cannot be written.
    """
    if not game.turns:
        raise Impossible("There is no turn to save yet.")
    if kind == "starts":
        line = game.as_start().to_line()
    typed = bool(game.spec.action_space.tools)
    if typed or (kind == "starts" and game.reseeded):
        await _confirm(games, game, typed=typed)
    if kind == "starts":
        await asyncio.to_thread(_append, folder, kind, game.episode, game.run, line)
    else:
        await asyncio.to_thread(save_demonstration, folder, game.episode, game.run)


def save_demonstration(folder: Path, episode: Episode, run: Path | None) -> None:
    """Add an episode to the demonstrations of its environment.

    Args:
        episode: the episode; its group is replaced by its position in the file.
        run: folder of the run of the original episode, whose held-out ranges apply; None: the default ranges.

    Raises:
        Impossible: the seed is held out, or the file cannot be written.
    """
    with _saving:
        # Demonstrations are numbered by their position in the file, like the groups of a run.
        collection = saved(folder, "demonstrations", episode.environment)
        episode = replace(episode, group=collection.count if collection else 0)
        line = json.dumps(episode.to_json(), ensure_ascii=False) + "\n"
        _append(folder, "demonstrations", episode, run, line)


def _append(folder: Path, kind: str, episode: Episode, run: Path | None, line: str) -> None:
    owner, free_seed = held_out(episode.seed, run)
    if owner:
        raise Impossible(
            f"Seed {episode.seed} is held out by {owner}: a run would refuse the whole file. Play from another seed, "
            f"such as {free_seed}, and save that."
        )
    path = folder / kind / f"{episode.environment}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        with _saving:
            append_line(path, line)
    except OSError as error:
        raise Impossible(f"{path} cannot be written: {error.strerror or error}") from None


async def _confirm(games: Games, game: LiveGame, *, typed: bool) -> None:
    """Replay a game's turns as a run would, from its seeds and with texts as actions.

    typed: whether the player sent tool calls. Raises Impossible if the observations differ.
    """
    path = game.task.path(game.episode)
    try:
        replay = await games.replay(game.episode, path, len(game.turns))
    except Impossible as error:
        cause = "calls of tools that are sent as texts" if typed else "these actions and its seeds"
        raise Impossible(f"A run would not reach this state with {cause}: {error}") from None
    await replay.session.close()
