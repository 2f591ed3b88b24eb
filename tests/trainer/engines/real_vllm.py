"""Real engines over vLLM, in process and served: what starts them, and a fixture for conformance tests over a server.

Starting one takes half a minute, so a module has one of each kind, and a fixture `policy` of module scope.
"""

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

import pytest_asyncio

from starpod.trainer.engines.base import Engine
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.models.policy import Policy
from tests.support import held_port
from tests.trainer.engines.conformance import MAX_CONTEXT, make_policy, reset

SERVE = f"--max-model-len {MAX_CONTEXT} --skip-tokenizer-init --max-num-seqs 16 --max-num-batched-tokens 512".split()
START_SECONDS = 600


async def children(name: str, of: int | None = None) -> list[int]:
    """Process ids below this one, or another, whose name holds `name`."""
    process = await asyncio.create_subprocess_exec("ps", "-eo", "pid=,ppid=,args=", stdout=asyncio.subprocess.PIPE)
    rows = [line.split(None, 2) for line in (await process.communicate())[0].decode().splitlines()]
    mine = {of or os.getpid()}
    while more := {int(pid) for pid, parent, _ in rows if int(parent) in mine} - mine:
        mine |= more
    return [int(pid) for pid, _, command in rows if int(pid) in mine and name in command]


@dataclass
class Server:
    """A running `starpod vllm`, the leader of a new process group."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self, what: signal.Signals = signal.SIGKILL) -> None:
        os.killpg(self.process.pid, what)

    def counter(self, name: str) -> int:
        """A metric, the sum over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(f"{name}{{"))


@contextlib.contextmanager
def serving(model: Path, *words: str, port: int = 0) -> Iterator[Server]:
    with contextlib.nullcontext(port) if port else held_port() as port:
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


def remote(*servers: Server, policy: Policy | None = None, **settings: Any) -> Any:
    """policy: of the weights' shape; None: the tiny one's."""
    urls = [server.url for server in servers]
    config = EngineConfig.model_validate({"name": "vllm_remote", "slots": 16, "urls": urls, **settings})
    return build_engine(config, policy or make_policy(head=32), max_context=MAX_CONTEXT)


class RealCores:
    """Mixin of conformance tests with vLLM's own processes."""

    async def cores(self) -> list[int]:
        return await children("EngineCore")


class Served(RealCores):
    """Mixin of conformance tests with a server. server: a fixture that begins with the policy's weights."""

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, server: Server, policy: Policy) -> AsyncIterator[Engine]:
        engine = remote(server, policy=policy)
        await reset(server, engine, policy)
        yield engine
        if not engine._open.is_set():  # A test that failed leaves no paused server to the next.
            await engine.resume()
        await engine.close()
