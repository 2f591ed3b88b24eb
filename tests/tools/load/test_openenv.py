"""OpenEnv servers get the same schedule: one written here from its messages, and the real one where it is installed."""

import importlib.util
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from starpod.load.measurements import Histogram
from starpod.load.plan import Stage, Turns
from starpod.load.servers import websocket_url
from tests.support import ServerProcess
from tests.tools.load.conftest import make_plan, play, run_load

STEPS = 5
ACTIONS = ('{"name": "Left"}', '{"name": "Down"}')


async def lake(socket: ServerConnection) -> None:
    """One session: five steps an episode. An unknown action is a validation error, and the session goes on."""
    left = STEPS
    async for text in socket:
        message = json.loads(text)
        if message["type"] == "close":
            return
        if message["type"] == "reset":
            assert isinstance(message["data"]["seed"], int)
            left = STEPS
        elif "name" not in message["data"]:
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR"}
            await socket.send(json.dumps({"type": "error", "data": error}))
            continue
        else:
            left -= 1
        data = {"observation": {"text": "SFFF"}, "reward": 0.0, "done": not left}
        await socket.send(json.dumps({"type": "observation", "data": data}))


@asynccontextmanager
async def lake_server() -> AsyncIterator[str]:
    async with serve(lake, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"


def plan_for(url: str, *actions: str, **more: Any) -> Any:
    return make_plan(url, environment="", wire="openenv", turns=Turns("random", actions or ACTIONS), **more)


@pytest.mark.parametrize("rate", [None, 100.0])
@pytest.mark.minutes
async def test_the_same_schedule_and_report(rate: float | None) -> None:
    async with lake_server() as url:
        (report,) = (await play(plan_for(url), Stage("openenv", 4, 0.6, 0.1, rate))).reports
    calls = report["calls"]
    assert calls["open"]["count"] == calls["close"]["count"] == 4
    assert calls["step"]["count"] > 10
    assert abs(calls["step"]["count"] / calls["reset"]["count"] - STEPS) < 2
    assert ("service" in calls["step"]) == (rate is not None)
    assert report["server_time"] is None
    assert report["errors"]["total"] == 0


@pytest.mark.minutes
async def test_errors_have_the_same_classes() -> None:
    async with lake_server() as url:
        (report,) = (await play(plan_for(url, '{"nam": "Left"}'), Stage("wrong", 2, 0.4, 0.1))).reports
    assert set(report["errors"]["classes"]) == {"bad_argument"}
    assert "VALIDATION_ERROR" in report["errors"]["classes"]["bad_argument"]["example"]


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_what_is_no_url_is_told(url: str) -> None:
    with pytest.raises(ValueError, match="not the URL"):
        websocket_url(url)


def test_urls() -> None:
    assert websocket_url("https://host:1/base/") == "wss://host:1/base/ws"


@pytest.fixture
def real() -> Iterator[ServerProcess]:
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv-core is not installed (extra bench)")
    server = ServerProcess([sys.executable, "-m", "benchmarks.peers.openenv_server"])
    yield server
    server.close()


@pytest.mark.minutes
def test_the_real_server(real: ServerProcess, tmp_path: Path) -> None:
    url = f"http://{real.address}"
    words = [word for action in ACTIONS for word in ("--action", action)]
    done = run_load(
        url,
        "--against",
        "openenv",
        *words,
        "--sessions",
        "4",
        "--seconds",
        "1",
        "--require",
        "errors=0",
        folder=tmp_path,
    )
    assert done.status == 0, done.err + done.out
    assert done.report["server"]["kind"] == "openenv"
    (stage,) = done.report["stages"]
    assert len(Histogram.decode(stage["calls"]["step"]["hdr"])) > 10
    lacking = run_load(url, "--against", "openenv")
    assert lacking.status == 2
    assert "its fields: name" in lacking.err
