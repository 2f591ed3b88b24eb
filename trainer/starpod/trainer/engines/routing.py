"""Engine that combines one engine per agent's policy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict

from torch import nn

from starpod.trainer.engines.base import Engine, EngineError, EngineStats, Reply, Request


class RoutingEngine:
    """Routes each request to the engine of its agent. All other calls go to all engines.

    A request without an agent goes to the first engine. It comes from an episode with a single agent, for example one
    against the environment's own opponent.
    """

    def __init__(self, by_agent: Mapping[str, Engine]) -> None:
        self._by_agent = dict(by_agent)

    async def generate(self, request: Request) -> Reply:
        """Sample one reply with the agent's engine. Raises EngineError if the agent has no policy."""
        engine = self._by_agent.get(request.agent or next(iter(self._by_agent)))
        if engine is None:
            raise EngineError(
                f"agent {request.agent!r} speaks, but script.policies has {', '.join(self._by_agent)}: name all agents"
            )
        return await engine.generate(request)

    def forget(self, conversation: str) -> None:
        for engine in self._by_agent.values():
            engine.forget(conversation)

    async def pause(self) -> None:
        await asyncio.gather(*(engine.pause() for engine in self._by_agent.values()))

    async def load(self, version: int, model: nn.Module) -> None:
        """Load each child of `Policies.model` into its agent's engine."""
        for engine, agent_model in zip(self._by_agent.values(), model.children(), strict=True):
            await engine.load(version, agent_model)

    async def resume(self) -> None:
        for engine in self._by_agent.values():
            await engine.resume()

    def stats(self) -> EngineStats:
        """Return the sums over the engines, except `slots`, which is the minimum."""
        all_stats = [asdict(engine.stats()) for engine in self._by_agent.values()]
        sums = {name: sum(stats[name] for stats in all_stats) for name in all_stats[0]}
        return EngineStats(**sums | {"slots": min(stats["slots"] for stats in all_stats)})

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._by_agent.values()))
