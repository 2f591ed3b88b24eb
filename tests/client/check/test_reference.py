"""The check against a correct server that shares no code with starpod.env_server."""

from __future__ import annotations

import asyncio

import pytest

from starpod.client.check.runner import Report, check
from starpod.client.check.suite import REQUIREMENTS
from tests.client.check.reference_server import ReferenceService, serve

NOT_SHOWN = {
    "C-70": "the environment draws no png",
    "C-95": "no token was given",
    "F-10": "the environment declares fork",
    "N-11": "the environment declares snapshot",
}


@pytest.fixture(scope="module")
def report() -> Report:
    return asyncio.run(_examine())


async def _examine() -> Report:
    async with serve(ReferenceService()) as address, serve(ReferenceService()) as also:
        return await check(address, REQUIREMENTS, also=also)


def test_reference_server_meets_every_requirement(report: Report) -> None:
    unmet = {r.requirement.id: r.message for r in report.results if r.status in ("failed", "error")}
    assert not unmet
    assert report.passed


def test_only_what_it_cannot_show_is_skipped(report: Report) -> None:
    assert {r.requirement.id: r.message for r in report.results if r.status == "skipped"} == NOT_SHOWN
