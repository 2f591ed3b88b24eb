"""Lookup of the package that runs third-party programs as agents.

A program reaches the policy through a gateway, which is a separate package. That package registers a `Programs`
function as the entry point `program` of the group `starpod.agents`. The function opens the resources that the programs
of a run share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import entry_points

from starpod.trainer.agents.config import ProgramConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.configuration.section import ConfigError

GROUP, NAME = "starpod.agents", "program"


Wrap = Callable[[EngineAgents], EngineAgents]
"""Function that takes agents and returns a copy of them whose moves come from the program."""
Programs = Callable[[ProgramConfig], AbstractAsyncContextManager[Wrap]]


def load_programs() -> Programs:
    """Return the registered `Programs` function. Raises ConfigError if no installed package provides one."""
    for entry in entry_points(group=GROUP, name=NAME):
        try:
            programs: Programs = entry.load()
        except ModuleNotFoundError as error:
            hint = "from a clone of the repository: pip install '.[gateway]'"
            raise ConfigError(f"collect.agent.command needs the package {error.name}; {hint}") from error
        return programs
    raise ConfigError(f"collect.agent.command needs a package with the entry point {NAME} in the group {GROUP}")
