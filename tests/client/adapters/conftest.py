"""A server of environments that raise, and a setting for one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from starpod.client.adapters.text import Setting
from tests.support import ROOT, ServerProcess, start_server


@pytest.fixture(scope="session")
def troubled() -> Iterator[ServerProcess]:
    """Serves walk-v1, which fails when it is told `bug`, pays 1 for `stop` and 0.25 + 0.25 for `report`."""
    module = ROOT / "tests/env_server/troublesome.py"
    with start_server("walk-v1", "--environment-module", str(module)) as process:
        yield process


@pytest.fixture
def walk(troubled: ServerProcess) -> Setting:
    return Setting(troubled.address, "walk-v1", version=">=1.1")
