"""Policies that can play on from any state: reference policies, checkpoints of a run, models of endpoints."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starpod.client import Session
from starpod.trainer.agents.base import Agent, AgentRefused, Agents, Sampling, Task
from starpod.trainer.agents.scripted import REFERENCES, ReferenceAgent
from starpod.trainer.data.episode import Episode
from starpod.ui.reading import checkpoints
from starpod.v1 import environment_pb2 as pb

ALWAYS = {"expert": "the environment's expert", "random": "random actions"}
"""Policies that need nothing but the environment, in words."""
CHECKPOINT = "checkpoint"
"""Before the name of a checkpoint's folder: one of the run's, which goes on with what began as an episode of the run,
and is told the turns before as its own."""
ENDPOINT = "endpoint"
"""Before the number of a model of an OpenAI-compatible endpoint, which is told likewise."""


class NotPossible(Exception):
    """Refusal of something that cannot be done; the message says why. Nothing has changed."""


@dataclass(slots=True)
class _Loaded:
    agents: Agents
    users: int = 0


class Policies:
    """Makes agents that play on. endpoints: URL and model of each that may be asked; a page can name no others."""

    def __init__(self, endpoints: Sequence[tuple[str, str]] = ()) -> None:
        self._endpoints = {f"{ENDPOINT}-{place}": each for place, each in enumerate(endpoints)}
        self._loaded: dict[Path | str, _Loaded] = {}
        self._loading = asyncio.Lock()

    def choices(self, spec: pb.EnvironmentSpec | None = None, run: Path | None = None) -> dict[str, str]:
        """Policies by name, in words. spec: of the environment. run: the folder of the run that began the episode."""
        found = dict(ALWAYS)
        if spec is not None and not spec.capabilities.expert_action:
            del found["expert"]
        several = len({url for url, _ in self._endpoints.values()}) > 1
        for name, (url, model) in self._endpoints.items():
            found[name] = f"{model} at {urlsplit(url).netloc if several else 'the endpoint'}"
        if run is not None:
            for each in sorted(checkpoints(run), key=lambda each: "best" not in each["marks"]):
                words = f"{' and '.join(each['marks'])} checkpoint, " if each["marks"] else "checkpoint of "
                found[f"{CHECKPOINT}-{each['name']}"] = f"the run's {words}step {each['step']}"
        return found

    @asynccontextmanager
    async def playing(
        self, policy: str, spec: pb.EnvironmentSpec, run: Path | None
    ) -> AsyncIterator[Callable[[Session, Episode], Agent]]:
        """Gives a function that makes the agent of a session, which knows the turns that were played before.

        Raises NotPossible, also for an agent that refuses while the context lasts.
        """
        names = tuple(spec.action_space.names)

        def reference(session: Session, past: Episode) -> Agent:
            choose, _ = REFERENCES[policy]
            return ReferenceAgent(choose, names, random.Random(f"{session.dynamics_seed}/{past.group}"))

        if policy in ALWAYS:
            yield reference
            return
        async with self.agents(policy, run) as agents:

            def informed(session: Session, past: Episode) -> Agent:
                agent = agents.agent(session, Task(spec.id, actions=names, name=past.task), past.group)
                if type(agent).recall is Agent.recall:
                    raise NotPossible(
                        "The run plays by a conversation script: its policy cannot be told turns of others."
                    )
                agent.recall(past)
                return agent

            yield informed

    @asynccontextmanager
    async def agents(self, policy: str, run: Path | None) -> AsyncIterator[Agents]:
        """The agents of a checkpoint or an endpoint. The last ones that were asked for are kept, and those in use.

        Raises as `playing`.
        """
        key: Path | str = policy if policy in self._endpoints else self._checkpoint(policy, run)
        async with self._loading:
            if key not in self._loaded:
                self._loaded[key] = _Loaded(await asyncio.to_thread(self._load, key))
            self._loaded[key] = loaded = self._loaded.pop(key)  # the last one
            loaded.users += 1
        try:
            yield loaded.agents
        except AgentRefused as error:
            raise NotPossible(f"The policy cannot play on: {error}") from None
        finally:
            loaded.users -= 1
            await self._release()

    async def close(self) -> None:
        for loaded in self._loaded.values():
            await loaded.agents.close()

    async def _release(self) -> None:
        """Closes what nobody uses, but for the last."""
        for key in [key for key, loaded in list(self._loaded.items())[:-1] if not loaded.users]:
            await self._loaded.pop(key).agents.close()

    def _checkpoint(self, policy: str, run: Path | None) -> Path:
        """The folder of a checkpoint. Raises NotPossible."""
        if run is None:
            raise NotPossible("This session does not come from an episode of a run, whose checkpoint could play on.")
        name = policy.removeprefix(f"{CHECKPOINT}-")
        if not any(each["name"] == name for each in checkpoints(run)):
            raise NotPossible(f"The run has no checkpoint {name} any more: choose another.")
        return run / "checkpoints" / name

    def _load(self, key: Path | str) -> Agents:
        """Raises NotPossible."""
        try:
            if isinstance(key, Path):
                from starpod.trainer.agents.pretrained import PretrainedAgents  # with torch, in the extra `trainer`

                return PretrainedAgents(str(key), Sampling())
            from starpod.trainer.agents.chat import ChatAgents  # in the extra `trainer`

            url, model = self._endpoints[key]
            return ChatAgents(model, base_url=url)
        except ImportError as error:
            raise NotPossible(f"It cannot play on here: the package {error.name} is not installed.") from None
        except AgentRefused as error:
            raise NotPossible(f"It cannot play on here: {error}") from None
