"""The real vLLM in process: it does what every engine has to do, and its death ends nothing but the run."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import torch

from starpod.trainer.engines.base import Engine, EngineError
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.engines.served import ServedEngine
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import (
    MAX_CONTEXT,
    EngineConformance,
    ask,
    assert_keeps_structure,
    assert_same,
    changed,
    hand_over,
    make_policy,
    reset,
)
from tests.trainer.engines.real_vllm import RealCores, children
from tests.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

WORKER = "EngineCore" if torch.cuda.is_available() else "Worker"
"""Name of the process that computes: with one GPU it is the core itself."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A policy with tied embeddings, whose output layer vLLM stores separately."""
    return make_policy(head=32, tied=True)


def build(policy: Policy) -> Any:
    settings = {"slots": 16, "dtype": "float32", "gpu_memory_fraction": 0.1, "restarts": 2, "health_timeout": 10}
    config = EngineConfig.model_validate({"name": "vllm", **settings})
    return build_engine(config, policy, max_context=MAX_CONTEXT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(policy: Policy) -> AsyncIterator[Any]:
    engine = build(policy)
    yield engine
    await engine.close()


class TestRealVllm(RealCores, EngineConformance):
    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, core: Any, policy: Policy) -> AsyncIterator[Engine]:
        """An engine with a fresh state over the core, which holds the policy's weights again."""
        engine: Any = object.__new__(type(core))
        engine.__dict__ |= core.__dict__
        ServedEngine.__init__(engine, slots=16, max_context=MAX_CONTEXT, vocabulary=core._vocabulary)

        async def keep() -> None:
            """Leaves the core to the next test."""

        engine._shut_down = keep
        await reset(core, engine, policy)
        yield engine
        await engine.close()

    async def test_requests_that_vllm_refuses_are_errors_and_no_end(self, engine: Engine, policy: Policy) -> None:
        with pytest.raises(EngineError, match="vLLM refused a request: "):
            await engine.generate(replace(ask([5, 9]), temperature=-1.0))
        assert engine.stats().restarts == 0
        self.close_to(await engine.generate(ask([5, 9])), policy.model, [5, 9])

    async def test_a_structure_is_kept_and_scored(self, engine: Engine, policy: Policy) -> None:
        await assert_keeps_structure(engine, policy)

    async def test_signals_for_the_trainers_group_are_not_for_vllm(self, engine: Engine) -> None:
        cores, workers = await children("EngineCore"), await children(WORKER)
        assert cores and workers
        assert {os.getsid(pid) for pid in cores + workers} == set(cores)


async def test_heads_that_the_cpu_kernels_lack_are_refused_at_start() -> None:
    with pytest.raises(EngineError, match="heads of 32, 64"):
        build(make_policy(head=16))


async def test_lost_and_hung_processes_are_started_again_as_often_as_allowed(core: Any, policy: Policy) -> None:
    """Replies go on with the weights that there were; then every call is an error within seconds.

    This is the last test of the core.
    """

    async def struck(name: str, number: signal.Signals) -> list[Any]:
        """The calls, of which some had begun when the processes got the signal: these are looked up before."""
        victims = await children(name)
        assert victims
        calls = [asyncio.ensure_future(core.generate(request)) for request in requests]
        await eventually(lambda: core.stats().running)
        for pid in victims:
            os.kill(pid, number)
        return calls

    await hand_over(core, 1, changed(policy, 1))
    requests = [ask([5, index], tokens=60) for index in range(4)]
    expected = [await core.generate(request) for request in requests]
    for restarts, (victim, number) in enumerate([(WORKER, signal.SIGKILL), ("EngineCore", signal.SIGSTOP)], 1):
        calls = await struck(victim, number)
        assert_same(await asyncio.gather(*calls), expected)
        assert core.stats().restarts == restarts
    calls = await struck("EngineCore", signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert all(isinstance(result, EngineError) or len(result.tokens) == 60 for result in results)
    for call in (core.generate(ask([5, 9])), core.pause()):
        with pytest.raises(EngineError):
            await asyncio.wait_for(call, 60)
    await core.close()
    assert not await children("EngineCore") + await children(WORKER)
