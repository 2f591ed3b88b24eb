"""Servers of hosted environments, one for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from starpod.client import SyncFleet
from tests.support import ServerProcess, start_server


@pytest.fixture(scope="module")
def words(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The module's arguments of `starpod serve`, which it may also give by a fixture of its own."""
    return request.module.WORDS  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def server(words: tuple[str, ...]) -> Iterator[ServerProcess]:
    with start_server(*words) as process:
        yield process


@pytest.fixture(scope="module")
def fleet(server: ServerProcess) -> Iterator[SyncFleet]:
    with SyncFleet(server.address) as fleet:
        yield fleet
