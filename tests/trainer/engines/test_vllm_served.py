"""A real vLLM server as `starpod vllm` starts it: it does what every engine has to do; its failures are sentences."""

import asyncio
import contextlib
import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from starpod.trainer.engines.base import Engine, EngineError
from starpod.trainer.engines.weights import write_weights
from starpod.trainer.models.policy import Policy
from tests.trainer.engines.conformance import (
    MAX_CONTEXT,
    EngineConformance,
    ask,
    assert_same,
    changed,
    hand_over,
    logprobs_under,
    make_policy,
)
from tests.trainer.engines.real_vllm import Served, Server, children, remote, serving
from tests.trainer.engines.vllm_facts import NO_SCALE_OUT
from tests.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

PREEMPTIONS, DONE = "vllm:num_preemptions_total", "vllm:request_success_total"
"""Counters of a server."""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return make_policy(head=32)


@pytest.fixture(scope="module")
def model(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "model"
    write_weights(policy.model, folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """One whose cache holds two contexts: of more requests some are preempted, and computed again."""
    # CPU kernels take blocks of a multiple of 32.
    blocks = f"--block-size 32 --num-gpu-blocks-override {2 * MAX_CONTEXT // 32 + 1}"
    with serving(model, *blocks.split()) as server:
        yield server


@pytest.fixture(scope="module")
def other_server(model: Path) -> Iterator[Server]:
    """One that the last test kills."""
    with serving(model) as server:
        yield server


class TestServedVllm(Served, EngineConformance):
    async def test_requests_that_the_server_refuses_are_errors_and_no_end(self, engine: Engine, policy: Policy) -> None:
        with pytest.raises(EngineError, match=r"refused /inference/v1/generate: .*400"):
            await engine.generate(replace(ask([5, 9]), temperature=-1.0))
        self.close_to(await engine.generate(ask([5, 9])), policy.model, [5, 9])

    async def test_requests_that_are_preempted_are_what_they_would_be_alone(
        self, engine: Engine, server: Server
    ) -> None:
        requests = [ask([5, 9, index], tokens=60, seed=index) for index in range(12)]
        alone = [await engine.generate(request) for request in requests]
        preempted = server.counter(PREEMPTIONS)
        # A fast core would be done with the first ones before the last ones arrive: it gets all of them at once.
        (core,) = await children("EngineCore", server.process.pid)
        os.kill(core, signal.SIGSTOP)
        try:
            together = asyncio.gather(*map(engine.generate, requests))
            await asyncio.sleep(1)
        finally:
            os.kill(core, signal.SIGCONT)
        assert_same(await together, alone)
        assert server.counter(PREEMPTIONS) > preempted


async def test_two_servers_share_the_conversations_and_take_the_same_weights(
    server: Server, other_server: Server, policy: Policy
) -> None:
    servers, other = (server, other_server), changed(policy)
    engine = remote(*servers)
    await hand_over(engine, 1, other)
    served = [each.counter(DONE) for each in servers]
    talks = [replace(ask([5, 9, index], tokens=4), conversation=f"talk {index}") for index in range(8)]
    for request, reply in zip(talks, await asyncio.gather(*map(engine.generate, talks)), strict=True):
        assert reply.logprobs == pytest.approx(logprobs_under(other, request.prompt, reply.tokens, 1.0), abs=1e-3)
        assert set(reply.versions) == {1}
    more = [each.counter(DONE) - before for each, before in zip(servers, served, strict=True)]
    assert all(more) and sum(more) == 8
    await engine.close()


def test_a_server_without_the_endpoints_says_so_as_the_stand_in_does() -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from vllm.entrypoints.scale_out.factories import register_scale_out_api_routers

    app = FastAPI()
    app.state.args = Namespace(enable_scale_out=False, tokens_only=False)
    register_scale_out_api_routers(app, ("generate",))
    refused = TestClient(app).post("/inference/v1/generate", json={})
    assert (refused.status_code, refused.json()["error"]) == (403, refused.json()["error"] | NO_SCALE_OUT["error"])


async def test_a_server_that_hangs_or_is_killed_is_an_error_or_gets_the_weights_again(
    model: Path, other_server: Server, policy: Policy
) -> None:
    """An engine that tries for long enough finds the server that was started anew, with the weights of its command
    line; replies under way go on, under the run's."""
    requests = [ask([5, index], tokens=60) for index in range(4)]
    patient, hasty = remote(other_server, retries=60), remote(other_server, retries=0, health_timeout=10)
    try:
        await hand_over(patient, 1, changed(policy, 1))
        expected = [await patient.generate(request) for request in requests]
        (core,) = await children("EngineCore", other_server.process.pid)
        # The server itself still reports that it is healthy.
        for stop in (other_server.kill, lambda number: os.kill(core, number)):
            stop(signal.SIGSTOP)
            with pytest.raises(EngineError, match=r"hangs: .* for 10 s \(engine.health_timeout\)"):
                await hasty.generate(ask([5, 9, 1]))
            stop(signal.SIGCONT)
        calls = [asyncio.ensure_future(engine.generate(each)) for engine in (patient, hasty) for each in requests]
        await eventually(lambda: patient.stats().running and hasty.stats().running)
        other_server.kill()
        other_server.process.wait()
        for result in await asyncio.wait_for(asyncio.gather(*calls[4:], return_exceptions=True), 60):
            assert isinstance(result, EngineError) or len(result.tokens) == 60
        with pytest.raises(EngineError, match="is gone"):
            await asyncio.wait_for(hasty.pause(), 60)
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(lambda: stack.enter_context(serving(model, port=other_server.port)))
            assert_same(await asyncio.wait_for(asyncio.gather(*calls[:4]), 120), expected)
            assert patient.stats().restarts == 1
    finally:
        await patient.close()
        await hasty.close()
