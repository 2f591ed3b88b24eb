"""Adapter for verifiers (v1): taskset, environment and harness of a plugin.

verifiers finds a plugin by the name of a top-level module. Write one that contains

    from starpod.client.adapters.verifiers import StarpodEnv, StarpodHarness, StarpodTaskset

    __all__ = ["StarpodEnv", "StarpodHarness", "StarpodTaskset"]

An infrastructure error fails the episode: it is listed in `episode.errors`, and the trace has no reward.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire

from starpod.client.adapters.text import Reader, Setting
from starpod.client.observation import Limits


class StarpodData(vf.TaskData):  # type: ignore[misc] # untyped where verifiers is not installed
    """The start of an episode. The rollouts of a task, which form a group, share it."""

    row: dict[str, Any]


class StarpodConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The environment, its servers, and the seeds of the tasks."""

    addresses: str = ""
    """Addresses of servers, as in Fleet."""
    environment: str = ""
    """Id of the environment, as shown by `starpod list`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    version: str = ""
    """Range of versions, such as ">=1,<2"."""
    max_turns: int | None = None
    """Maximum number of turns; None keeps the environment's limit."""
    tag: str | None = "answer"
    """Tag around the actions in a reply; None uses the whole reply."""
    separator: str | None = "||"
    """Separator between actions; None reads one action."""
    first_seed: int = 0
    seeds: int = 256
    """Number of tasks. Their seeds are consecutive, from `first_seed` on."""
    dynamics_seed: int | None = None
    """Seed of the random transitions of all episodes; None draws one per episode."""


class StarpodTask(vf.Task[StarpodData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """A task. It defines no rewards, because the environment scores the episode."""


class StarpodTaskset(vf.Taskset[StarpodTask, StarpodConfig]):  # type: ignore[misc]
    """A set of tasks, one for each seed."""

    def __init__(self, config: StarpodConfig) -> None:
        # The fields need defaults, because verifiers' command line first makes the configuration from the id alone.
        if not (config.addresses and config.environment):
            raise ValueError(
                "Name the environment and its servers: --env.taskset.environment ID --env.taskset.addresses HOST:PORT"
            )
        super().__init__(config)

    def load(self) -> Iterator[StarpodTask]:
        config = self.config
        for seed in range(config.first_seed, config.first_seed + config.seeds):
            row = {"seed": seed, "dynamics_seed": config.dynamics_seed}
            yield StarpodTask(StarpodData(name=f"{config.environment}#{seed}", row=row), config.task)


class StarpodEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    agent: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class StarpodEnv(vf.Env[StarpodEnvConfig]):  # type: ignore[misc]
    """A conversation in which the environment is the user and the agent is the assistant."""

    async def run(self, task: Any, agents: Any) -> None:
        config: StarpodConfig = self.taskset.config
        setting = Setting(
            config.addresses,
            config.environment,
            options=config.options,
            limits=None if config.max_turns is None else Limits(max_turns=config.max_turns),
            version=config.version,
            reader=Reader(config.tag, config.separator),
        )
        episode = await setting.open(task.data.row)
        try:
            async with agents.agent.interaction(task) as interaction:
                segment = await interaction.turn(episode.first)
                while not segment.terminated:
                    observation = await setting.play(episode, segment.last_reply)
                    if episode.done:
                        break
                    segment = await interaction.turn(observation)
        finally:
            await setting.close(episode)
        trace = interaction.trace
        if trace.ok:  # False if the model's endpoint failed: the episode is incomplete and gets no reward
            trace.record_metrics(episode.metrics())
            trace.info["turn_rewards"] = episode.rewards
            trace.record_reward("episode_reward", episode.reward)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the system's certificates. They are cached, because reading them takes longer than a turn."""
    return ssl.create_default_context()


class StarpodHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    pass


class StarpodHarness(vf.Harness[StarpodHarnessConfig]):  # type: ignore[misc]
    """A harness for plain chat that runs inside the process. Other harnesses work as well."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages = [*([{"role": "system", "content": system}] if system else []), *turns]
        # No timeout here, because verifiers limits the time of a turn.
        async with httpx.AsyncClient(verify=_certificates(), timeout=None) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
            answer.raise_for_status()  # verifiers has already recorded the error in the trace
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
