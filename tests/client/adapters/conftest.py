"""A server of environments that raise, and a setting for one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from starpod.client.adapters.text import Setting
from tests.support import ROOT, ServerProcess, start_server


@pytest.fixture(scope="session")
def troubled() -> Iterator[ServerProcess]:
    """Serves frozen_lake-v1 and walk-v1, which fails at `bug`, pays 1 for `stop` and 0.25 + 0.25 for `report`."""
    module = str(ROOT / "tests/env_server/troublesome.py")
    with start_server("walk-v1", "frozen_lake-v1", module) as process:
        yield process


@pytest.fixture(scope="session")
def server(troubled: ServerProcess) -> ServerProcess:
    return troubled


@pytest.fixture
def walk(troubled: ServerProcess) -> Setting:
    return Setting(troubled.address, "walk-v1", version=">=1.1")
