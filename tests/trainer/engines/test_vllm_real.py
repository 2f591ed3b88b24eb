"""The real vLLM in process: it does what every engine has to do, and its death ends nothing but the run."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from starpod.trainer.engines.base import Engine, EngineError
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.engines.served import ServedEngine
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import MAX_CONTEXT, EngineConformance, ask, assert_same, changed, make_policy
from tests.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


def build(policy: Policy, **settings: Any) -> Any:
    config = EngineConfig.model_validate({"name": "vllm", "slots": 16, "dtype": "float32", **settings})
    return build_engine(config, policy, max_context=MAX_CONTEXT)


@pytest.fixture(scope="module")
def shared_policy() -> Policy:
    return make_policy(head=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared_policy: Policy) -> AsyncIterator[Any]:
    """One engine core for the module: starting one takes half a minute."""
    engine = build(shared_policy)
    yield engine
    await engine.close()


class TestRealVllm(EngineConformance):
    @pytest.fixture
    def policy(self, shared_policy: Policy) -> Policy:
        return shared_policy

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, shared: Any, shared_policy: Policy) -> AsyncIterator[Engine]:
        """The engine with a fresh state over the shared core, which holds the policy's weights again."""
        engine: Any = object.__new__(type(shared))
        engine.__dict__ |= shared.__dict__
        ServedEngine.__init__(engine, slots=16, max_context=MAX_CONTEXT)

        async def keep() -> None:
            """Leaves the core to the next test."""

        engine._shut_down = keep
        await engine.pause()
        await engine.load(0, shared_policy.model)
        await engine.resume()
        engine._stats = type(engine._stats)(slots=16)
        yield engine
        await engine.close()


async def children(name: str) -> list[int]:
    """Process ids below this one whose name holds `name`."""
    process = await asyncio.create_subprocess_exec("ps", "-eo", "pid=,ppid=,args=", stdout=asyncio.subprocess.PIPE)
    rows = [line.split(None, 2) for line in (await process.communicate())[0].decode().splitlines()]
    mine = {os.getpid()}
    while more := {int(pid) for pid, parent, _ in rows if int(parent) in mine} - mine:
        mine |= more
    return [int(pid) for pid, _, command in rows if int(pid) in mine and name in command]


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
async def test_a_killed_process_of_vllm_is_an_engine_error_within_seconds(victim: str) -> None:
    engine = build(make_policy(head=32), restarts=0)
    try:
        before = set(await children(victim))
        assert before
        calls = [asyncio.ensure_future(engine.generate(ask([5, index], tokens=60))) for index in range(4)]
        await eventually(lambda: engine.stats().running)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert all(isinstance(result, EngineError) or len(result.tokens) == 60 for result in results)
        with pytest.raises(EngineError):
            await asyncio.wait_for(engine.generate(ask([5, 9])), 60)
        with pytest.raises(EngineError):
            await asyncio.wait_for(engine.pause(), 60)
    finally:
        await engine.close()


async def test_a_killed_core_is_started_again_and_replies_go_on() -> None:
    policy = make_policy(head=32)
    engine = build(policy)
    try:
        await engine.pause()
        await engine.load(1, changed(policy, 1))
        await engine.resume()
        expected = [await engine.generate(ask([5, index], tokens=60)) for index in range(4)]
        calls = [asyncio.ensure_future(engine.generate(ask([5, index], tokens=60))) for index in range(4)]
        await eventually(lambda: engine.stats().running)
        for pid in await children("EngineCore"):
            os.kill(pid, signal.SIGKILL)
        replies = await asyncio.wait_for(asyncio.gather(*calls), 200)
        assert engine.stats().restarts == 1
        assert_same(replies, expected)
    finally:
        await engine.close()


async def test_interrupts_are_for_the_trainer_alone() -> None:
    engine = build(make_policy(head=32))
    try:
        for pid in await children("EngineCore") + await children("Worker"):
            os.kill(pid, signal.SIGINT)
        assert len((await engine.generate(ask([5, 9]))).tokens) == 8
    finally:
        await engine.close()


async def test_heads_that_the_cpu_kernels_lack_are_refused_at_start() -> None:
    with pytest.raises(EngineError, match="heads of 32, 64"):
        build(make_policy(head=16))
