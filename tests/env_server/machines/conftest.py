"""The engine, tasks and servers of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from starpod.client import SyncFleet
from tests.env_server.machines.tasks import missing, remove_image, write_tasks
from tests.support import ServerProcess, start_server


@pytest.fixture(scope="session")
def engine() -> Any:
    if reason := missing():
        pytest.skip(reason)
    from starpod.env_server.machines.docker_engine import connect

    return connect()


@pytest.fixture(scope="module")
def folder(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the tasks. Their images are removed in the end."""
    folder = write_tasks(tmp_path_factory.mktemp("tasks"))
    yield folder
    for task in folder.iterdir():
        remove_image(engine, task)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    settings = "command_seconds=3&max_turns=12&output=20000"
    with start_server(
        f"harbor:{folder}#{settings}", f"harbor:{folder}/hello#{settings}&id=again-v1&deterministic=yes"
    ) as process:
        yield process


@pytest.fixture(scope="module")
def fleet(server: ServerProcess) -> Iterator[SyncFleet]:
    with SyncFleet(server.address) as fleet:
        yield fleet
