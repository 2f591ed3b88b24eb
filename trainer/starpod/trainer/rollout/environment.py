"""Configuration of the environment, and its services where the run starts them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from starpod.client import Limits
from starpod.client.nearest import unknown_environment
from starpod.client.programs import ServiceRefused, started
from starpod.client.transport import as_addresses
from starpod.trainer.agents.base import Task
from starpod.trainer.rollout.curriculum import CurriculumConfig
from starpod.trainer.section import ConfigError, Section


class EnvironmentConfig(Section):
    """The environment, and where it is served."""

    SHORTHAND: ClassVar[str] = "id"

    id: str = Field(default="frozen_lake-v1", description="Name, as `starpod list` shows it.")
    version: str = Field(default="", description="Range such as '>=1,<2'; the newest that fits is used.")
    options: dict[str, Any] = Field(default={}, description="The environment's own options.")
    max_turns: int | None = Field(default=None, ge=1, description="Turns of an episode; null: the environment's limit.")
    max_actions_per_turn: int | None = Field(default=None, ge=1, description="Actions of a turn; null: likewise.")
    max_actions: int | None = Field(
        default=None, ge=0, description="Actions of an episode; null: likewise, 0: no limit."
    )
    expert_moves_left: int | None = Field(
        default=None,
        ge=1,
        description="Begins episodes so many moves of the environment's expert before its success; null: at the start.",
    )
    starts: str = Field(
        default="", description="File of start states, as the live site saves them, in which groups begin in turn."
    )
    starts_share: float = Field(default=0.5, gt=0, le=1, description="Share of the groups that begin in one of these.")
    addresses: tuple[str, ...] = Field(
        default=(), description="Servers (host:port, dns:///name:port); empty: start some here."
    )
    workers: int = Field(default=1, ge=1, description="Server processes to start.")
    serve: tuple[str, ...] = Field(default=(), description="More arguments for `starpod serve`.")
    token_file: str = Field(default="", description="File with the servers' bearer token.")
    ca: str = Field(default="", description="PEM file of the servers' authority: TLS on.")
    certificate: str = Field(default="", description="PEM file of the client's certificate (mTLS).")
    key: str = Field(default="", description="PEM file of the client's key (mTLS).")
    curriculum: CurriculumConfig = CurriculumConfig()
    timeout: float = Field(
        default=30.0,
        gt=0,
        description="Seconds after which a call is retried and a silent server given up.",
    )
    patience: float = Field(default=300.0, gt=0, description="Seconds of a call in all, with retries and recovery.")

    @field_validator("addresses", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """One text is several addresses with commas, as for commands."""
        return as_addresses(value) if isinstance(value, str) and value else value

    @field_validator("addresses")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(as_addresses(value)) if value else value

    @model_validator(mode="after")
    def _fits_together(self) -> EnvironmentConfig:
        if (self.certificate or self.key) and not (self.ca and self.certificate and self.key):
            raise ValueError(
                "environment.certificate and environment.key go together, and with environment.ca: without it the "
                "connection would not be encrypted"
            )
        if self.addresses and (self.workers > 1 or self.serve):
            raise ValueError(
                "environment.workers and environment.serve are for services that the run starts, and "
                "environment.addresses names servers that run already: drop them, or the addresses"
            )
        return self

    def task(self, actions: Sequence[str], name: str = "") -> Task:
        """The task that agents play. actions: the environment's action names, if they are fixed. name: as in `Task`."""
        limits = Limits(self.max_turns, self.max_actions_per_turn, self.max_actions)
        return Task(self.id, self.version, self.options, limits, tuple(actions), name, self.expert_moves_left)

    def with_options(self, options: Mapping[str, Any]) -> EnvironmentConfig:
        """The same, with these options over its own."""
        return self.model_copy(update={"options": {**self.options, **options}})


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
