"""The task of an environment, and the services that a run starts for it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points

from starpod.client import Limits
from starpod.client.nearest import unknown_environment
from starpod.client.programs import ServiceRefused, started
from starpod.trainer.agents.base import Task
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.section import ConfigError


def make_task(config: EnvironmentConfig, actions: Sequence[str], name: str = "") -> Task:
    """Return the task that agents play.

    Args:
        config: The environment.
        actions: Its action names, if they are fixed.
        name: As in `Task`.
    """
    limits = Limits(config.max_turns, config.max_actions_per_turn, config.max_actions)
    return Task(config.id, config.version, config.options, limits, tuple(actions), name, config.expert_moves_left)


def check_installed(config: EnvironmentConfig) -> None:
    """Raises ConfigError where this machine is to serve an environment that no installed package has.

    Says nothing of servers that run already, and of services with arguments of their own, which may host more.
    """
    if config.addresses or config.serve:
        return
    installed = [entry.name for entry in entry_points(group="starpod.environments")]
    if config.id not in installed:
        raise ConfigError(f"environment.id: {unknown_environment(config.id, installed).message}")


def server_words(environment: str, serve: Sequence[str]) -> str:
    """The words by which `starpod ui` has a server of an environment, started as `serve` says for a run."""
    match serve:
        case []:
            return f"--serve {shlex.quote(environment)}"
        case ["--environment-module", file] if file.endswith(".py"):
            return f"--serve {shlex.quote(file)}"
    return "--address SERVER"


@contextmanager
def local_services(environments: Sequence[str], *, workers: int = 1, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Runs `starpod serve` while the context lasts and yields its address.

    environments: what it hosts. workers: server processes; each is started again if it dies, and so is what watches
    over them. arguments: handed on as they are. Raises ServiceFailed, and ConfigError where it was called wrong.
    """
    words = ("serve", *environments, "--port", "0", "--workers", str(workers), *arguments)
    try:
        with started("the environment service", *words, again=True) as address:
            yield address
    except ServiceRefused as error:
        raise ConfigError(str(error)) from error
