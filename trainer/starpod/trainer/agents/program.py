"""Programs of others as agents: the configuration, and where what runs them comes from.

The trainer knows no gateway. A package that has one registers, in the entry-point group `starpod.agents` under the name
`program`, a `Programs`: a function that opens what the programs of a run share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import entry_points

from starpod.trainer.agents.config import ProgramConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.section import ConfigError

GROUP, NAME = "starpod.agents", "program"


Wrap = Callable[[EngineAgents], EngineAgents]
"""Agents like these, that play by the program."""
Programs = Callable[[ProgramConfig], AbstractAsyncContextManager[Wrap]]


def load_programs() -> Programs:
    """What runs programs. Raises ConfigError where no installed package does."""
    for entry in entry_points(group=GROUP, name=NAME):
        try:
            programs: Programs = entry.load()
        except ModuleNotFoundError as error:
            hint = "from a clone of the repository: pip install '.[gateway]'"
            raise ConfigError(f"collect.agent.command needs the package {error.name}; {hint}") from error
        return programs
    raise ConfigError(f"collect.agent.command needs a package with the entry point {NAME} in the group {GROUP}")
