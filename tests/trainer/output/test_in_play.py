"""A run's reports of its phase, servers and sessions. It reports sessions only while somebody looks."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from starpod.client import Fleet
from starpod.trainer.output.in_play import telling
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import Screen
from tests.support import ServerProcess, start_server
from tests.waiting import eventually


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with start_server("bandit-v1") as process:
        yield process


async def test_sessions_are_reported_while_somebody_looks(server: ServerProcess, tmp_path: Path) -> None:
    folder, screen = RunFolder.create(tmp_path / "run"), Screen()
    async with Fleet(server.address) as fleet:
        group = await fleet.open("bandit-v1", seed=3, count=2)
        async with telling(folder, [fleet], screen):
            await eventually(folder.live_status.exists)
            told = json.loads(folder.live_status.read_text())
            assert told["servers"] == [server.address] and told["sessions"] is None
            screen.phase("collecting")
            await eventually(lambda: json.loads(folder.live_status.read_text())["doing"] == "collecting")
            folder.watch_mark.touch()
            await eventually(lambda: json.loads(folder.live_status.read_text())["sessions"] is not None)
            sessions = json.loads(folder.live_status.read_text())["sessions"]
            assert [(each["id"], each["member"], each["turn"]) for each in sessions] == [
                (session.id, session.member, 0) for session in group
            ]
            hour_ago = time.time() - 3600
            os.utime(folder.watch_mark, (hour_ago, hour_ago))
            await fleet.close_sessions(group)
            assert fleet.sessions == []
        assert not folder.live_status.exists()


async def test_a_folder_that_cannot_be_written_ends_no_run(server: ServerProcess, tmp_path: Path) -> None:
    folder, screen = RunFolder(tmp_path / "run"), Screen()
    folder.path.write_text("a file")
    async with Fleet(server.address) as fleet:
        async with telling(folder, [fleet], screen):
            await fleet.open("bandit-v1", seed=3)
            assert not folder.live_status.exists()
            folder.path.unlink()
            await eventually(folder.live_status.exists)  # the run has tried again
        folder.live_status.mkdir()
        async with telling(folder, [fleet], screen):
            await fleet.open("bandit-v1", seed=4)
