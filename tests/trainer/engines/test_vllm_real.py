"""The real vLLM in process: it does what every engine has to do, and its death ends nothing but the run."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
import torch

from starpod.trainer.engines.base import Engine, EngineError
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import (
    MAX_CONTEXT,
    EngineConformance,
    Reset,
    ask,
    assert_same,
    changed,
    make_policy,
)
from tests.trainer.engines.real_vllm import InProcess, build, children
from tests.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

WORKER = "EngineCore" if torch.cuda.is_available() else "Worker"
"""Name of the process that computes: with one GPU it is the core itself."""


@pytest.fixture(scope="module")
def shared_policy() -> Policy:
    """Of tied embeddings, whose output layer vLLM keeps in a form of its own."""
    return make_policy(head=32, tied=True)


@pytest.fixture(scope="module")
def core_reset(shared_policy: Policy) -> Reset:
    return Reset(shared_policy)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(shared_policy: Policy) -> AsyncIterator[Any]:
    engine = build(shared_policy)
    yield engine
    await engine.close()


class TestRealVllm(InProcess, EngineConformance):
    async def test_requests_that_vllm_refuses_are_errors_and_no_end(self, engine: Engine, policy: Policy) -> None:
        with pytest.raises(EngineError, match="vLLM refused a request: "):
            await engine.generate(replace(ask([5, 9]), temperature=-1.0))
        assert engine.stats().restarts == 0
        self.close_to(await engine.generate(ask([5, 9])), policy.model, [5, 9])

    async def test_signals_for_the_trainers_group_are_not_for_vllm(self, engine: Engine) -> None:
        cores, workers = await children("EngineCore"), await children(WORKER)
        assert cores and workers
        assert {os.getsid(pid) for pid in cores + workers} == set(cores)


async def test_lost_and_hung_processes_are_started_again_as_often_as_allowed() -> None:
    """Replies go on with the weights that there were; then every call is an error within seconds."""
    others = {name: set(await children(name)) for name in ("EngineCore", WORKER)}
    policy = make_policy(head=32)
    engine = build(policy, restarts=2, health_timeout=10)

    async def send(name: str, number: signal.Signals) -> None:
        victims = set(await children(name)) - others[name]
        assert victims
        for pid in victims:
            os.kill(pid, number)

    try:
        await engine.pause()
        await engine.load(1, changed(policy, 1))
        await engine.resume()
        requests = [ask([5, index], tokens=60) for index in range(4)]
        expected = [await engine.generate(request) for request in requests]
        for restarts, (victim, number) in enumerate([(WORKER, signal.SIGKILL), ("EngineCore", signal.SIGSTOP)], 1):
            calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
            await eventually(lambda: engine.stats().running)
            await send(victim, number)
            assert_same(await asyncio.gather(*calls), expected)
            assert engine.stats().restarts == restarts
        calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await eventually(lambda: engine.stats().running)
        await send("EngineCore", signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert all(isinstance(result, EngineError) or len(result.tokens) == 60 for result in results)
        for call in (engine.generate(ask([5, 9])), engine.pause()):
            with pytest.raises(EngineError):
                await asyncio.wait_for(call, 60)
    finally:
        await engine.close()
    assert {name: set(await children(name)) for name in others} == others


async def test_requests_that_find_the_cache_full_are_what_they_would_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen that grow to two blocks each, where there are five: some lose theirs, and are computed again."""
    from vllm.engine import arg_utils

    small = partial(arg_utils.AsyncEngineArgs, block_size=32, num_gpu_blocks_override=2 * MAX_CONTEXT // 32 + 1)
    monkeypatch.setattr(arg_utils, "AsyncEngineArgs", small)
    engine = build(make_policy(head=32))
    try:
        requests = [ask([5, 9, index], tokens=60, seed=index) for index in range(12)]
        alone = [await engine.generate(request) for request in requests]
        assert_same(await asyncio.gather(*map(engine.generate, requests)), alone)
        assert engine.stats().restarts == 0
    finally:
        await engine.close()


async def test_heads_that_the_cpu_kernels_lack_are_refused_at_start() -> None:
    with pytest.raises(EngineError, match="heads of 32, 64"):
        build(make_policy(head=16))
