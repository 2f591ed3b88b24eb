"""Environment of a run: its servers, its capabilities and its task."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from starpod.client import TLS, Fleet, Limits
from starpod.client.nearest import unknown_environment, unknown_version
from starpod.client.programs import ServiceRefused, start_server
from starpod.client.versions import satisfies
from starpod.trainer.agents.base import Task
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.tasks import TaskConfig
from starpod.trainer.rollout.config import EnvironmentConfig, Facts
from starpod.v1.environment_word import installed_ids


def make_task(config: EnvironmentConfig, actions: Sequence[str], name: str = "") -> Task:
    """Return the task that agents play. actions: its action names, if they are fixed."""
    limits = Limits(config.max_turns, config.max_actions_per_turn, config.max_actions)
    return Task(config.id, config.version, config.options, limits, tuple(actions), name, config.expert_moves_left)


def fit_task(task: Task, run_tasks: Sequence[TaskConfig]) -> Task | None:
    """Return the task with its unset values from a run's evaluations; None if the run has no such environment.

    The values come from the run's task of the same name, or otherwise from its first task with the same environment.
    """
    matches = [run_task for run_task in run_tasks if run_task.environment.id == task.environment]
    matches = [run_task for run_task in matches if run_task.name == task.name] or matches
    if not matches:
        return None
    return task.with_defaults(make_task(matches[0].held_out, task.actions, matches[0].name))


def check_installed(config: EnvironmentConfig) -> None:
    """Raise ConfigError if this machine has to serve an environment that no installed package provides.

    Nothing is checked if servers run already, or if `serve` has arguments, which may add environments.
    """
    if not config.addresses and not is_hostable(config):
        raise ConfigError(f"environment.id: {unknown_environment(config.id, installed_ids()).message}")


def is_hostable(config: EnvironmentConfig) -> bool:
    """Return whether this machine can probably serve an environment. Only starting it would show for certain."""
    return not config.addresses and (bool(config.serve) or config.id in installed_ids())


def server_words(environment: str, serve: Sequence[str]) -> str:
    """Return arguments that make `starpod ui` start the same server as a run with these `serve` arguments."""
    match serve:
        case []:
            return f"--serve {shlex.quote(environment)}"
        case [word] if not word.startswith("-"):
            return f"--serve {shlex.quote(word)}"
    return "--address SERVER"


def serve_words(environments: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return arguments of one `starpod serve` for several sections `environment`, given as plain values."""
    sections = list(environments)
    arguments = dict.fromkeys(tuple(section.get("serve") or ()) for section in sections)
    names = dict.fromkeys(str(section["id"]) for section in sections)
    return [*names, *(word for words in arguments for word in words)]


@contextmanager
def local_services(environments: Sequence[str], *, workers: int = 1, arguments: Sequence[str] = ()) -> Iterator[str]:
    """Run `starpod serve` inside the context and yield its address.

    Args:
        workers: Number of server processes. They and their supervisor are restarted if they die.

    Raises:
        ServiceFailed: If the service does not start.
        ConfigError: If the service refuses its arguments.
    """
    try:
        with start_server(*environments, "--workers", str(workers), *arguments, again=True) as address:
            yield address
    except ServiceRefused as error:
        raise ConfigError(str(error)) from error


@asynccontextmanager
async def connect(config: EnvironmentConfig) -> AsyncIterator[Fleet]:
    """Connect to the configured servers, or to services started on this machine."""
    with ExitStack() as stack:
        addresses: Sequence[str] = config.addresses
        if not addresses:
            service = local_services([config.id], workers=config.workers, arguments=config.serve)
            addresses = [stack.enter_context(service)]
        tls = TLS(config.ca or None, config.certificate or None, config.key or None) if config.ca else None
        token = Path(config.token_file) if config.token_file else None
        async with Fleet(addresses, token=token, tls=tls, timeout=config.timeout, patience=config.patience) as fleet:
            yield fleet


async def read_facts(fleet: Fleet, config: EnvironmentConfig) -> Facts:
    """Ask the servers what the environment supports in its newest version that the configuration allows.

    Raises:
        UnknownEnvironment, UnknownVersion: No server hosts it. The message suggests names or lists the versions.
    """
    hosted = await fleet.describe()
    specs = [spec for spec in hosted if spec.id == config.id]
    for spec in specs:
        if satisfies(spec.version, config.version):
            support = spec.capabilities
            names = tuple(spec.action_space.names)
            image = "png" in spec.render_modes
            return Facts(names, support.state_key, support.fork, support.expert_action, support.score, image)
    if specs:
        raise unknown_version(config.id, config.version, [spec.version for spec in specs])
    raise unknown_environment(config.id, [spec.id for spec in hosted])
