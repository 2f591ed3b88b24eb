"""Training on episodes of programs: each episode has a process, which plays through a gateway of the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields
from http import HTTPStatus

from starpod.client import Observation
from starpod.client import Session as Environment
from starpod.gateway import mcp, supervise
from starpod.gateway.app import create_app
from starpod.gateway.environment import endpoints
from starpod.gateway.lineage import ChatLayout
from starpod.gateway.played import OutsideAgent
from starpod.gateway.requests import Rejected
from starpod.gateway.session import RolloutSession, Sampler
from starpod.serving.http import listening
from starpod.trainer.agents.base import Agent, Move, Stop, Task
from starpod.trainer.agents.config import ProgramConfig
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.agents.program import Wrap
from starpod.trainer.data.episode import Episode
from starpod.trainer.prompts.template import Template

_GRACE_SECONDS = 5.0
"""Seconds that a program has to end by itself after its episode. Its supervisor then has as many seconds to end."""


class Programs:
    """The programs of a run, and the gateway at `url` through which they play."""

    def __init__(self, config: ProgramConfig) -> None:
        self.config = config
        self.url = ""
        self.slots = asyncio.Semaphore(config.at_once)
        self.ending: set[asyncio.Task[None]] = set()
        self._playing: dict[str, OutsideAgent] = {}
        self._layouts: dict[int, ChatLayout] = {}

    def find(self, name: str) -> RolloutSession:
        """Return the session with this name. Raise Rejected if its episode is not being played."""
        return self.playing(name).session

    def playing(self, name: str) -> OutsideAgent:
        """Return the agent whose session has this name. Raise Rejected if its episode is not being played."""
        if (agent := self._playing.get(name)) is None:
            raise Rejected(HTTPStatus.UNAUTHORIZED, "invalid_api_key", "the API key names no episode that is played")
        return agent

    def add(self, agent: OutsideAgent) -> None:
        self._playing[agent.session.name] = agent

    def remove(self, agent: OutsideAgent) -> None:
        self._playing.pop(agent.session.name, None)

    def layout(self, template: Template) -> ChatLayout:
        """Return the layout of a policy's tokenizer. It has no reply prefix, because programs write their prompts."""
        key = id(template.tokenizer)
        if key not in self._layouts:
            self._layouts[key] = ChatLayout(Template(template.tokenizer, calls=template.layout.calls.name))
        return self._layouts[key]


@asynccontextmanager
async def programs(config: ProgramConfig) -> AsyncIterator[Wrap]:
    """Serve a gateway on this machine while the context lasts. Yield a function that wraps a run's agents."""
    running = Programs(config)
    async with AsyncExitStack() as stack:
        tools = {mcp.PATH: await stack.enter_async_context(mcp.served(running.playing))} if mcp.installed() else {}
        app = create_app(running, model="policy", more=endpoints(running.playing), mounted=tools)
        running.url = await stack.enter_async_context(listening(app, port=config.port))
        try:
            yield lambda agents: ProgramAgents(
                **{attribute.name: getattr(agents, attribute.name) for attribute in fields(EngineAgents)},
                programs=running,
            )
        finally:
            for task in running.ending:
                task.cancel()
            await asyncio.gather(*running.ending, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAgents(EngineAgents):
    """Agents whose episodes a program plays, with the engine as its model."""

    programs: Programs = field(repr=False)

    def agent(self, session: Environment, task: Task, group: int) -> Agent:
        return ProgramAgent(self, session, task, group)


class ProgramAgent(OutsideAgent):
    """An agent that plays one episode through a process."""

    def __init__(self, agents: ProgramAgents, environment: Environment, task: Task, group: int) -> None:
        sampler = Sampler(
            engine=agents.engine,
            layout=agents.programs.layout(agents.template),
            sampling=agents.sampling,
            seed=agents.seed,
            temperature=agents.temperature,
        )
        # Random, because whoever knows the key can play this episode.
        key = uuid.uuid4().hex
        stream = f"{agents.purpose}/{group}/{environment.member}"
        super().__init__(key, sampler, environment, task, stream=stream, order=group)
        self._programs = agents.programs
        self._process: asyncio.Task[None] | None = None
        self._finished = asyncio.Event()

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        if self._process is None:
            await self._programs.slots.acquire()
            self._programs.add(self)
            self._process = asyncio.create_task(self._run())
            self._programs.ending.add(self._process)
            self._process.add_done_callback(self._ended)
        return await OutsideAgent.act(self, observation, episode)

    def close(self) -> None:
        OutsideAgent.close(self)
        self._finished.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._programs.ending.discard(task)
        self._programs.remove(self)
        self._programs.slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.leave(f"{type(error).__name__}: {error}")

    async def _run(self) -> None:
        """Run the process until it ends, or until soon after its episode has ended."""
        command, url, key = self._programs.config.command, self._programs.url, self.session.name
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "STARPOD_ENVIRONMENT_URL": f"{url}/environment",
            **({"STARPOD_MCP_URL": f"{url}{mcp.PATH}"} if mcp.installed() else {}),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", supervise.__file__, *command),
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is handled by the trainer only
        )
        assert process.stdin is not None and process.stdout is not None
        reading = asyncio.create_task(process.stdout.read())
        finish = asyncio.create_task(self._finished.wait())
        try:
            await asyncio.wait((reading, finish), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((reading,), timeout=_GRACE_SECONDS)
        finally:
            process.stdin.close()  # makes the supervisor end all processes that still run
            await asyncio.wait((reading,), timeout=_GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            for task in (reading, finish):
                task.cancel()
        report = json.loads(reading.result() or b"{}") if reading.done() and not reading.cancelled() else {}
        if "refused" in report:
            self.leave(f"collect.agent.command cannot be started: {report['refused']}", refused=True)
        elif not report:
            self.leave(f"the process that supervised {command[0]} was ended")
        elif report["status"] and not self._finished.is_set():
            self.leave(f"{command[0]} ended with status {report['status']}: {report['last']}")
        else:
            self.leave()
