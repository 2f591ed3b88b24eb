"""Start states that a user saved while playing. They are read from a file and reached by replaying the same actions.

As in Go-Explore (arXiv 1901.10995), episodes begin in interesting states. The file has one JSON object per line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from starpod.client import EpisodePath, Fleet, Opening, PathTurn, ReplayDiverged, Session, Want
from starpod.trainer.agents.base import Task, extend_limits
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import members_luck


@dataclass(frozen=True, slots=True)
class SavedStart:
    """A saved state, defined by the seeds, options and actions that lead to it."""

    environment: str
    seed: int
    dynamics_seed: int
    actions: Sequence[str]
    """Actions from the start state, one per turn."""
    observation: str
    """Observation in the saved state. A replay that ends with another one is rejected."""
    version: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def to_line(self) -> str:
        """Return the start as a line of the file."""
        return json.dumps(asdict(self), ensure_ascii=False) + "\n"


def read_starts(path: str, environment: str) -> list[SavedStart]:
    """Read the start states of an environment. Raises ConfigError if there are none, or if a line is invalid."""
    names = {item.name for item in fields(SavedStart)}
    starts = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"environment.starts {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            start = SavedStart(**{name: value for name, value in values.items() if name in names})
            if not (isinstance(start.seed, int) and isinstance(start.dynamics_seed, int) and start.actions):
                raise ValueError("a seed must be a whole number, and a start state needs actions")
            if not (isinstance(start.actions, list) and all(isinstance(action, str) for action in start.actions)):
                raise ValueError("actions are a list of texts")
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"environment.starts {path}:{number} is not a start state: {error}") from None
        if start.environment == environment:
            starts.append(start)
    if not starts:
        raise ConfigError(f"environment.starts {path} holds no start state of {environment}")
    return starts


async def open_saved(
    task: Task, fleet: Fleet, start: SavedStart, count: int, want: Want, *, group: int
) -> list[Session]:
    """Open the sessions of a group in the saved state, each with its own dynamics seed.

    The replayed actions do not count towards the limits. Errors of `Fleet.open` are raised.

    Args:
        task: Environment and limits. Its options are replaced by those of the saved start.
        group: Number of the group. Another group in this state has other random transitions.

    Raises:
        ConfigError: The replay ends with another observation than the saved one.
    """
    task = task.with_options(start.options)
    (first,) = await task.open(fleet, start.seed, 1, want)
    await first.close()
    path = EpisodePath(
        Opening(
            task.environment,
            start.seed,
            start.dynamics_seed,
            task.options or None,
            extend_limits(first.limits, len(start.actions)),
            task.version,
        ),
        [PathTurn([action]) for action in start.actions],
        start.observation,
    )
    different = ConfigError(
        f"{task.environment} {first.version} does not reach the saved start state (seed {start.seed}, "
        f"{len(start.actions)} actions, version {start.version or 'unknown'}): save it again with this version"
    )
    try:
        base = await fleet.reach(path, want=want)
    except ReplayDiverged as error:
        raise different from error
    try:
        if base.done:
            raise different
        seeds = members_luck(start.dynamics_seed, group, range(count))
        return await base.fork(count, reseed=True, dynamics_seeds=seeds)
    finally:
        await base.close()
