"""Starpod's environments in verifiers (its v1 stack): taskset, environment and harness of one plugin.

verifiers finds a plugin by the name of a module at the top level, so give it one of your own that holds

    from starpod.client.adapters.verifiers import StarpodEnv, StarpodHarness, StarpodTaskset

    __all__ = ["StarpodEnv", "StarpodHarness", "StarpodTaskset"]

An error of the infrastructure fails the episode: it is in `episode.errors`, and its trace has no reward.
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
    """One start. A task is rolled out several times from the same one: that is its group."""

    row: dict[str, Any]


class StarpodConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Which environment, where, and from which seeds."""

    addresses: str = ""
    """Of servers, as in Fleet."""
    environment: str = ""
    """Id of the environment, as `starpod list` shows it."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    version: str = ""
    """Range of versions, such as ">=1,<2"."""
    max_turns: int | None = None
    """Turns of an episode, where the environment's own limit is not meant."""
    tag: str | None = "answer"
    """Tag around the actions of a reply; None takes the whole reply."""
    separator: str | None = "||"
    """What stands between several actions; None takes one."""
    first_seed: int = 0
    seeds: int = 256
    """Number of tasks: one for each seed from the first on."""
    dynamics_seed: int | None = None
    """Luck that all episodes have; None draws it anew for each."""


class StarpodTask(vf.Task[StarpodData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    """The environment scores the episode, so a task has no rewards of its own."""


class StarpodTaskset(vf.Taskset[StarpodTask, StarpodConfig]):  # type: ignore[misc]
    """A task for each seed."""

    def __init__(self, config: StarpodConfig) -> None:
        # Fields without a default would not do: the command line makes the configuration from the id alone, to begin.
        if not (config.addresses and config.environment):
            raise ValueError(
                "Say what is played, and where: --env.taskset.environment ID --env.taskset.addresses HOST:PORT"
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
    """The environment is the user of the conversation: it shows, the agent answers."""

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
                    shown = await setting.play(episode, segment.last_reply)
                    if episode.done:
                        break
                    segment = await interaction.turn(shown)
        finally:
            await setting.close(episode)
        trace = interaction.trace
        if trace.ok:  # not, if the model's endpoint failed: then the episode was cut short, and earned nothing
            trace.record_metrics(episode.metrics())
            trace.info["turn_rewards"] = episode.rewards
            trace.record_reward("episode_reward", episode.reward)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read once: it takes longer than a turn."""
    return ssl.create_default_context()


class StarpodHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    pass


class StarpodHarness(vf.Harness[StarpodHarnessConfig]):  # type: ignore[misc]
    """Plain chat inside the process: nothing to install, no process for each turn. Any other harness works as well."""

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
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        # No limit of time here: verifiers has its own for a turn.
        async with httpx.AsyncClient(verify=_certificates(), timeout=None) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
            answer.raise_for_status()  # what it was stands in the trace: verifiers saw it on the way
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
