"""Policies that can continue from any state: reference policies, checkpoints of a run, models of endpoints."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starpod.client import Session
from starpod.remote.game import Impossible
from starpod.trainer.agents.base import Agent, AgentRefused, Agents, Sampling, Task
from starpod.trainer.agents.scripted import REFERENCES, ReferenceAgent
from starpod.trainer.data.episode import Episode
from starpod.ui.reading import checkpoints
from starpod.v1 import environment_pb2 as pb

ALWAYS = {"expert": "the environment's expert", "random": "random actions"}
"""Policies that need nothing but the environment, with their descriptions."""
CHECKPOINT = "checkpoint"
"""Prefix of policies that are checkpoints of a run. Their full name is `checkpoint-` and the checkpoint's folder.

A checkpoint continues only episodes of its run. Earlier turns are presented to it as if it had played them.
"""
ENDPOINT = "endpoint"
"""Prefix of policies that are models of an OpenAI-compatible endpoint.

Earlier turns are also presented to these models as if they had played them.
"""


@dataclass(slots=True)
class _Loaded:
    agents: Agents
    users: int = 0


class SitePolicies:
    """Makes agents that continue episodes.

    endpoints: URL and model of each endpoint that may be used. Pages cannot name others.
    """

    def __init__(self, endpoints: Sequence[tuple[str, str]] = ()) -> None:
        self._endpoints = {f"{ENDPOINT}-{index}": endpoint for index, endpoint in enumerate(endpoints)}
        self._loaded: dict[Path | str, _Loaded] = {}
        self._loading = asyncio.Lock()

    def choices(self, spec: pb.EnvironmentSpec | None = None, run: Path | None = None) -> dict[str, str]:
        """Return the available policies by name, with their descriptions.

        Args:
            spec: the environment. If it has no expert, that policy is left out.
            run: folder of the run whose episode is continued; None: no checkpoints.
        """
        labels = dict(ALWAYS)
        if spec is not None and not spec.capabilities.expert_action:
            del labels["expert"]
        has_many_urls = len({url for url, _ in self._endpoints.values()}) > 1
        for name, (url, model) in self._endpoints.items():
            labels[name] = f"{model} at {urlsplit(url).netloc if has_many_urls else 'the endpoint'}"
        if run is not None:
            for entry in sorted(checkpoints(run), key=lambda entry: "best" not in entry["marks"]):
                prefix = f"{' and '.join(entry['marks'])} checkpoint, " if entry["marks"] else "checkpoint of "
                labels[f"{CHECKPOINT}-{entry['name']}"] = f"the run's {prefix}step {entry['step']}"
        return labels

    @asynccontextmanager
    async def playing(
        self, policy: str, spec: pb.EnvironmentSpec, run: Path | None
    ) -> AsyncIterator[Callable[[Session, Episode], Agent]]:
        """Yield a function that makes the agent of a session. The agent knows the turns played before.

        Args:
            policy: key of a policy from `choices`.
            spec: environment in which it plays.
            run: folder of the run whose episode is continued; None: no checkpoints.

        Raises:
            Impossible: the policy cannot be used, or an agent refused to act inside the `with` block.
        """
        names = tuple(spec.action_space.names)

        def reference(session: Session, episode: Episode) -> Agent:
            choose, _ = REFERENCES[policy]
            return ReferenceAgent(choose, names, random.Random(f"{session.dynamics_seed}/{episode.group}"))

        if policy in ALWAYS:
            yield reference
            return
        async with self.agents(policy, run) as agents:

            def informed(session: Session, episode: Episode) -> Agent:
                agent = agents.agent(session, Task(spec.id, actions=names, name=episode.task), episode.group)
                if type(agent).recall is Agent.recall:
                    raise Impossible("The policy of a run with a conversation script cannot continue episodes.")
                agent.recall(episode)
                return agent

            yield informed

    @asynccontextmanager
    async def agents(self, policy: str, run: Path | None) -> AsyncIterator[Agents]:
        """Yield the agents of a checkpoint or an endpoint. Unused ones stay loaded until others are requested.

        Raises Impossible if the policy cannot be used, or if an agent refuses within the context.
        """
        key: Path | str = policy if policy in self._endpoints else self._checkpoint(policy, run)
        async with self._loading:
            if key not in self._loaded:
                self._loaded[key] = _Loaded(await asyncio.to_thread(self._load, key))
            self._loaded[key] = loaded = self._loaded.pop(key)  # move it to the end
            loaded.users += 1
        try:
            yield loaded.agents
        except AgentRefused as error:
            raise Impossible(f"The policy cannot continue: {error}") from None
        finally:
            loaded.users -= 1
            await self._release()

    async def close(self) -> None:
        for loaded in self._loaded.values():
            await loaded.agents.close()

    async def _release(self) -> None:
        """Close all agents that are not in use, except for the most recently requested."""
        for key in [key for key, loaded in list(self._loaded.items())[:-1] if not loaded.users]:
            await self._loaded.pop(key).agents.close()

    def _checkpoint(self, policy: str, run: Path | None) -> Path:
        """Return the folder of a checkpoint. Raises Impossible."""
        if run is None:
            raise Impossible("This session does not come from an episode of a run, so no checkpoint can continue it.")
        name = policy.removeprefix(f"{CHECKPOINT}-")
        if not any(checkpoint["name"] == name for checkpoint in checkpoints(run)):
            raise Impossible(f"The run has no checkpoint {name} any more: choose another.")
        return run / "checkpoints" / name

    def _load(self, key: Path | str) -> Agents:
        """Load the agents of a checkpoint's folder or an endpoint's name. Raises Impossible."""
        try:
            if isinstance(key, Path):
                from starpod.trainer.agents.pretrained import PretrainedAgents  # with torch, in the extra `trainer`

                return PretrainedAgents(str(key), Sampling())
            from starpod.trainer.agents.chat import ChatAgents  # in the extra `trainer`

            url, model = self._endpoints[key]
            return ChatAgents(model, base_url=url)
        except ImportError as error:
            raise Impossible(f"It cannot continue here: the package {error.name} is not installed.") from None
        except AgentRefused as error:
            raise Impossible(f"It cannot continue here: {error}") from None
