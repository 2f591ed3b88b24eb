"""An engine of several, one for the policy of each agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict

from torch import nn

from starpod.trainer.engines.base import Engine, EngineError, EngineStats, Reply, Request


class RoutingEngine:
    """Sends each request to the engine of the agent that asks; all else is done in all engines.

    An agent without a name is the only one, as against an opponent of the environment's: the first policy plays it.
    """

    def __init__(self, by_agent: Mapping[str, Engine]) -> None:
        self._by_agent = dict(by_agent)

    async def generate(self, request: Request) -> Reply:
        """As `Engine.generate`. Raises EngineError for an agent without a policy."""
        engine = self._by_agent.get(request.agent or next(iter(self._by_agent)))
        if engine is None:
            raise EngineError(
                f"agent {request.agent!r} speaks, and script.policies has {', '.join(self._by_agent)}: name all agents"
            )
        return await engine.generate(request)

    def forget(self, conversation: str) -> None:
        for engine in self._by_agent.values():
            engine.forget(conversation)

    async def pause(self) -> None:
        await asyncio.gather(*(engine.pause() for engine in self._by_agent.values()))

    async def load(self, version: int, model: nn.Module) -> None:
        """model: `Policies.model`."""
        for engine, own in zip(self._by_agent.values(), model.children(), strict=True):
            await engine.load(version, own)

    async def resume(self) -> None:
        for engine in self._by_agent.values():
            await engine.resume()

    def stats(self) -> EngineStats:
        """Sums; `slots` are those of each engine."""
        each = [asdict(engine.stats()) for engine in self._by_agent.values()]
        sums = {name: sum(stats[name] for stats in each) for name in each[0]}
        return EngineStats(**sums | {"slots": min(stats["slots"] for stats in each)})

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._by_agent.values()))
