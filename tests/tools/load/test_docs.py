"""Every command in docs/load.md does what the page says: run against a server, in shorter stages."""

import asyncio
import re
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from starpod.load.requirements import CLASSES
from tests.support import ROOT, ServerProcess
from tests.tools.load.conftest import run_load
from tests.tools.load.test_openenv import lake_server

PAGE = (ROOT / "docs" / "load.md").read_text()
COMMANDS = re.findall(r"^starpod load (.+)$", PAGE, re.MULTILINE)


@pytest.fixture
def openenv() -> Iterator[str]:
    """An OpenEnv server in a loop of its own."""
    ready, stop = threading.Event(), asyncio.Event()
    found: list[str] = []
    loop = asyncio.new_event_loop()

    async def host() -> None:
        async with lake_server() as url:
            found.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(host(),))
    thread.start()
    ready.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


@pytest.mark.minutes
def test_every_command_runs(
    server: ServerProcess, openenv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) > 10
    for text in COMMANDS:
        text = text.replace("127.0.0.1:50051", server.address).replace("http://127.0.0.1:8000", openenv)
        done = run_load(*shlex.split(re.sub(r"--seconds \d+", "--seconds 0.4", text)))
        # A search of moments on a busy machine may find nothing, which is no fault of the command.
        assert done.status == 0 or ("--find-rate" in text and "No rate held" in done.out), (text, done.err, done.out)
    for written in ("lake.html", "ramp.html", "lake.json", "lake.jsonl"):
        assert (tmp_path / written).stat().st_size > 1000


def test_every_class_is_told() -> None:
    for name in CLASSES:
        assert f"`{name}`" in PAGE
