"""An engine for the policies of several agents: each request is served by the policy of whoever asks."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from starpod.trainer.engines.base import EngineError, Reply, Request
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engines
from starpod.trainer.engines.routing import RoutingEngine
from starpod.trainer.models.policies import Policies
from tests.trainer.models.tiny_policy import tiny_policy

SOLVER, VERIFIER = tiny_policy(seed=1), tiny_policy(seed=2)
REQUEST = Request([5, 6, 7], max_tokens=12, stop=frozenset(), seed=3, conversation="c")


async def reply_of(policy: Any, request: Request = REQUEST) -> Reply:
    engine = build_engines(EngineConfig(), Policies({"": policy}), max_context=64)
    try:
        return await engine.generate(request)
    finally:
        await engine.close()


async def test_each_agents_policy_answers_for_it_and_gets_its_own_weights() -> None:
    policies = Policies({"solver": SOLVER, "verifier": VERIFIER})
    alone = {"solver": await reply_of(SOLVER), "verifier": await reply_of(VERIFIER)}
    assert alone["solver"].tokens != alone["verifier"].tokens
    engine = build_engines(EngineConfig(slots=4), policies, max_context=64)
    assert isinstance(engine, RoutingEngine)
    both = await asyncio.gather(*(engine.generate(replace(REQUEST, agent=agent)) for agent in alone))
    assert dict(zip(alone, both, strict=True)) == alone
    # One without a name is the only one that plays.
    assert await engine.generate(REQUEST) == alone["solver"]
    stats = engine.stats()
    assert (stats.requests, stats.sampled, stats.slots) == (3, 36, 4)
    await engine.pause()
    await engine.load(7, Policies({"solver": VERIFIER, "verifier": SOLVER}).model)
    await engine.resume()
    swapped = await engine.generate(replace(REQUEST, agent="solver"))
    assert (swapped.tokens, swapped.versions) == (alone["verifier"].tokens, [7] * 12)
    engine.forget("c")
    with pytest.raises(EngineError, match=r"'judge' .* script\.policies has solver, verifier"):
        await engine.generate(replace(REQUEST, agent="judge"))
    await engine.close()


async def test_the_cache_is_shared_out_and_other_engines_are_refused() -> None:
    policies = Policies({"solver": SOLVER, "verifier": VERIFIER})
    slots = []
    for each in (Policies({"": SOLVER}), policies):
        engine = build_engines(EngineConfig(cache_gib=1e-3), each, max_context=64)
        slots.append(engine.stats().slots)
        await engine.close()
    one, half = slots
    assert one // 2 - 1 <= half <= one // 2
    with pytest.raises(EngineError, match="choose the engine torch"):
        build_engines(EngineConfig(name="vllm"), policies, max_context=64)
