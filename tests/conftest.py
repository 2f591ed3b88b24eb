"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import ServerProcess, start_server


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One server with every built-in environment, shared by all tests that do not break it."""
    with start_server() as process:
        yield process
