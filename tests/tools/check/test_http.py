"""The check over HTTP and over MCP finds what it finds over gRPC, and what only HTTP can get wrong."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from starpod.check.runner import CannotCheck, CheckReport, EnvironmentReport, Result, check
from starpod.check.suite import REQUIREMENTS
from starpod.client.transport import TLS, Transport
from starpod.env_server.operation.config import HTTP, ServerConfig, ServerLimits
from starpod.env_server.registry import Registry
from starpod.env_server.server.server import EnvironmentServer
from starpod.env_server.transports import exchange
from tests.env_server.troublesome import Walk
from tests.hostile.conftest import http_url
from tests.skipped import not_by_time
from tests.support import guarding, held_port, start_server

WITHOUT_STREAM = {each.id for each in REQUIREMENTS if each.level == "stream"} | {"C-94"}
BROKEN = """
from starpod.env_server import Environment, EnvironmentSpec, Outcome

class Broken(Environment):
    spec = EnvironmentSpec(id="broken-v1", version="1.0.0", title="Broken", actions=("left", "right"))

    def reset(self, rng):
        self.number = rng.random()

    def step(self, action):
        return 1.0

    def render(self, mode="text"):
        return f"{self.number}"
"""


NOT_CARRIED = ("MCP has no ", "MCP has its own ", "MCP makes one session ")
"""How the reasons begin for which a requirement cannot be shown over MCP."""


def told(results: list[Result], without: Collection[str] = WITHOUT_STREAM) -> dict[str, str]:
    return {each.requirement.id: each.status for each in results if each.requirement.id not in without}


def by_time(*reports: EnvironmentReport) -> set[str]:
    """Requirements that were skipped for the pace of this machine: they may differ from run to run."""
    skipped = [(r.requirement.id, r.message) for report in reports for r in report.results if r.status == "skipped"]
    return {id for id, message in skipped if not not_by_time([(id, message)])}


async def examine(addresses: Collection[str]) -> list[CheckReport]:
    return await asyncio.gather(*(check(address, REQUIREMENTS, seconds=90) for address in addresses))


@pytest.mark.minutes
@pytest.mark.timeout(900)
def test_all_transports_find_the_same(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    words = ("frozen_lake", "desk", str(file), "--workers", "2", "--max-sessions", "64")
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(start_server(*words, "--http", "0", "--mcp")) for _ in range(3)]
        addresses = (servers[0].address, http_url(servers[1]), f"mcp+{http_url(servers[2])}")
        over_grpc, over_http, over_mcp = asyncio.run(examine(addresses))
    for ours, theirs in zip(over_http.environments, over_grpc.environments, strict=True):
        without = WITHOUT_STREAM | by_time(ours, theirs)
        assert told(ours.results, without) == told(theirs.results, without)
        skipped = {r.requirement.id: r.message for r in ours.results if r.requirement.id in WITHOUT_STREAM}
        assert skipped.keys() == WITHOUT_STREAM
        assert all(message.startswith("HTTP has no Stream") for message in skipped.values())
    for ours, theirs in zip(over_mcp.environments, over_grpc.environments, strict=True):
        lacking = {r.requirement.id for r in ours.results if r.message.startswith(NOT_CARRIED)}
        without = lacking | by_time(ours, theirs)
        assert told(ours.results, without) == told(theirs.results, without)
        assert len(lacking) < 70 < len(ours.results) - len(lacking)
    broken, *right = sorted(over_http.environments, key=lambda each: each.id)
    assert "failed" in told(broken.results).values()
    for each in right:
        assert not {"failed", "error"} & set(told(each.results).values())
        assert told(each.results)["C-92"] == "passed"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Transport]]:
    """The URL of a server behind mTLS and a token, and what it takes to reach it."""
    folder = tmp_path_factory.mktemp("guarded")
    with start_server("bandit", "--http", "0", "--mcp", *guarding(folder)[0]) as server:
        tls = TLS(folder / "ca", folder / "certificate", folder / "key")
        yield http_url(server), Transport(folder / "token", tls)


@pytest.mark.parametrize("scheme", ["", "mcp+"])
async def test_tls_and_tokens_over_http(guarded: tuple[str, Transport], scheme: str) -> None:
    chosen = [each for each in REQUIREMENTS if each.id in ("C-06", "C-30", "C-89", "C-95")]
    report = await check(f"{scheme}{guarded[0]}", chosen, access=guarded[1])
    statuses = {each.requirement.id: each.status for each in report.results}
    assert statuses["C-30"] == statuses["C-95"] == "passed" and set(statuses.values()) <= {"passed", "skipped"}


@pytest.fixture
async def walking() -> AsyncIterator[EnvironmentServer]:
    config = ServerConfig(port=0, limits=ServerLimits(max_sessions=16), http=HTTP(0))
    server = EnvironmentServer(Registry((Walk,)), config)
    await server.start()
    yield server
    await server.stop(0)


async def failures(server: EnvironmentServer, *ids: str) -> dict[str, str]:
    chosen = [each for each in REQUIREMENTS if each.id in ids]
    results = (await check(server.http_address, chosen)).results
    return {each.requirement.id: each.message for each in results if each.status in ("failed", "error")}


async def test_a_status_that_is_not_the_codes(walking: EnvironmentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not await failures(walking, "C-83", "C-89")
    monkeypatch.setitem(exchange._STATUS, 5, HTTPStatus.INTERNAL_SERVER_ERROR)
    found = await failures(walking, "C-83", "C-89")
    assert found.keys() == {"C-83", "C-89"}
    assert "expected HTTP status 404 with NOT_FOUND" in found["C-83"]


async def test_a_filled_server_is_left_empty(walking: EnvironmentServer) -> None:
    assert not await failures(walking, "C-92")
    assert walking.worker.live_sessions == 0


async def test_an_error_that_is_no_status(walking: EnvironmentServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "write_json", lambda _: b"<html>")
    assert "expected a google.rpc.Status as JSON" in (await failures(walking, "C-83"))["C-83"]


async def test_nobody_answers() -> None:
    with held_port() as port, pytest.raises(CannotCheck, match=f"no server answers at http://127.0.0.1:{port}"):
        await check(f"http://127.0.0.1:{port}", REQUIREMENTS)
