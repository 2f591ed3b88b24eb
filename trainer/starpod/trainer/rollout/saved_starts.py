"""Start states that a user saved while playing. They are read from a file and reached by replaying the same actions.

As in Go-Explore (arXiv 1901.10995), episodes begin in interesting states. The file has one JSON object per line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from starpod.client import Fleet, Session, StarpodError, Want
from starpod.trainer.agents.base import Task, extend_limits
from starpod.trainer.rollout.expert_start import Repeater
from starpod.trainer.rollout.play import play
from starpod.trainer.section import ConfigError


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


async def open_saved(task: Task, fleet: Fleet, start: SavedStart, count: int, want: Want) -> list[Session]:
    """Open `count` sessions in the saved state, each with its own dynamics seed.

    The replayed actions do not count towards the limits. Errors of `Fleet.open` are raised, and ConfigError if the
    replay ends with another observation than the saved one.
    """
    task = task.with_options(start.options)
    (base,) = await task.open(fleet, start.seed, 1, want)
    try:
        limits = extend_limits(base.limits, len(start.actions))
        await base.reset(seed=start.seed, dynamics_seed=start.dynamics_seed, limits=limits)
        replay = await play(Repeater([[action] for action in start.actions]), base)
        if replay.failed:
            raise StarpodError(f"a saved start state was not reached: {replay.error}")
        if base.done or base.observation.text != start.observation:
            raise ConfigError(
                f"{task.environment} {base.version} does not reach the saved start state (seed {start.seed}, "
                f"{len(start.actions)} actions, version {start.version or 'unknown'}): save it again with this "
                "version"
            )
        return await base.fork(count, reseed=True)
    finally:
        await base.close()
