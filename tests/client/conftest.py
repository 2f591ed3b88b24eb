"""A server in this process, a fleet of it and a session there."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from starpod.client import Fleet, Session
from tests.client.fake_server import FakeServer


@pytest.fixture
async def fake(request: pytest.FixtureRequest) -> AsyncIterator[FakeServer]:
    way = getattr(request, "param", "columns")
    async with FakeServer(stream=way != "unary", columns=way == "columns") as server:
        yield server


@pytest.fixture
async def fleet(fake: FakeServer) -> AsyncIterator[Fleet]:
    async with Fleet(fake.address) as fleet:
        yield fleet


@pytest.fixture
async def session(fleet: Fleet) -> Session:
    (session,) = await fleet.open("walk-v1", seed=3)
    return session
