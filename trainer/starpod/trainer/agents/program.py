"""Programs of others as agents: the configuration, and where what runs them comes from.

The trainer knows no gateway. A package that has one registers, in the entry-point group `starpod.agents` under the name
`program`, a `Programs`: a function that opens what the programs of a run share.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import entry_points

from pydantic import Field

from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.section import ConfigError, Section

GROUP, NAME = "starpod.agents", "program"


class ProgramConfig(Section):
    """A program that plays, with the policy as its model. Off without a command."""

    command: tuple[str, ...] = Field(
        default=(),
        description="Program and arguments, started for each episode with the policy behind OPENAI_BASE_URL; see "
        "docs/gateway.md#training. Empty: the policy plays by the trainer's own prompts.",
    )
    at_once: int = Field(default=16, ge=1, description="Programs at the same time; the other episodes wait.")


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
