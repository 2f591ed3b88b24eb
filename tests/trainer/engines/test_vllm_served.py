"""A real vLLM server as `starpod vllm` starts it: it does what every engine has to do; its failures are sentences."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from starpod.trainer.engines.base import Engine, EngineError
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.engines.weights import write_weights
from starpod.trainer.models.policy import Policy
from tests.support import held_port
from tests.trainer.engines.conformance import MAX_CONTEXT, EngineConformance, ask, assert_same, changed, make_policy
from tests.trainer.engines.ranks import check_two_ranks
from tests.waiting import eventually

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

SERVE = (f"--max-model-len {MAX_CONTEXT} --skip-tokenizer-init --max-num-seqs 16 --max-num-batched-tokens 512").split()
START_SECONDS = 240


@dataclass
class Server:
    """A running `starpod vllm`, the leader of a process group of its own."""

    url: str
    process: subprocess.Popen[bytes]

    def kill(self, what: signal.Signals = signal.SIGKILL) -> None:
        os.killpg(self.process.pid, what)


@contextlib.contextmanager
def serving(model: Path, *words: str, port: int = 0) -> Iterator[Server]:
    if not port:
        with held_port() as port:
            pass
    command = [sys.executable, "-m", "starpod.cli.main", "vllm", str(model), "--port", str(port), *SERVE, *words]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process)
    try:
        wait_until_up(server)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        process.wait()


def wait_until_up(server: Server) -> None:
    for _ in range(START_SECONDS * 2):
        assert server.process.poll() is None, "vllm serve ended"
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            try:
                server.process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError("vllm serve did not come up")


def remote(*servers: Server, **settings: Any) -> Any:
    urls = [server.url for server in servers]
    config = EngineConfig.model_validate({"name": "vllm_remote", "slots": 16, "urls": urls, **settings})
    return build_engine(config, make_policy(head=32), max_context=MAX_CONTEXT)


@pytest.fixture(scope="module")
def shared_policy() -> Policy:
    return make_policy(head=32)


@pytest.fixture(scope="module")
def model(shared_policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "model"
    write_weights(shared_policy.model, folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model) as server:
        yield server


class TestServedVllm(EngineConformance):
    @pytest.fixture
    def policy(self, shared_policy: Policy) -> Policy:
        return shared_policy

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, server: Server, shared_policy: Policy) -> AsyncIterator[Engine]:
        engine = remote(server)
        await engine.pause()
        await engine.load(0, shared_policy.model)
        await engine.resume()
        yield engine
        await engine.close()


async def test_of_two_ranks_the_first_one_drives_the_server_and_both_sample(server: Server, tmp_path: Path) -> None:
    await check_two_ranks(server.url, tmp_path)


async def test_a_server_without_the_endpoints_says_how_to_start_it(model: Path) -> None:
    with serving(model, "--no-enable-scale-out") as plain:
        engine = remote(plain)
        try:
            with pytest.raises(EngineError, match="--enable-scale-out"):
                await engine.generate(ask([5, 9]))
        finally:
            await engine.close()


async def test_a_server_that_hangs_or_is_killed_is_an_engine_error(model: Path) -> None:
    with serving(model) as server:
        engine = remote(server, timeout=15, retries=0)
        try:
            assert len((await engine.generate(ask([5, 9]))).tokens) == 8
            server.kill(signal.SIGSTOP)
            with pytest.raises(EngineError, match="did not answer"):
                await asyncio.wait_for(engine.generate(ask([5, 9, 1])), 60)
            server.kill(signal.SIGCONT)
            calls = [asyncio.ensure_future(engine.generate(ask([5, index], tokens=60))) for index in range(4)]
            await eventually(lambda: engine.stats().running)
            server.kill()
            for result in await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60):
                assert isinstance(result, EngineError) or len(result.tokens) == 60
            with pytest.raises(EngineError, match="is gone"):
                await asyncio.wait_for(engine.pause(), 60)
        finally:
            await engine.close()


async def test_a_server_that_is_killed_and_started_anew_gets_the_weights_again(model: Path) -> None:
    """It comes back with the weights of its command line; replies under way go on, under the run's."""
    policy = make_policy(head=32)
    requests = [ask([5, index], tokens=60) for index in range(4)]
    with held_port() as port:
        pass
    with serving(model, port=port) as server:
        engine = remote(server, retries=60)
        await engine.pause()
        await engine.load(1, changed(policy, 1))
        await engine.resume()
        expected = [await engine.generate(request) for request in requests]
        calls = [asyncio.ensure_future(engine.generate(request)) for request in requests]
        await eventually(lambda: engine.stats().running)
        server.kill()
        server.process.wait()
    try:
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(lambda: stack.enter_context(serving(model, port=port)))
            replies = await asyncio.wait_for(asyncio.gather(*calls), 120)
            assert engine.stats().restarts == 1
            assert_same(replies, expected)
    finally:
        await engine.close()
