"""`starpod check` as a function: all of a server's named environments at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starpod.check.runner import EnvironmentReport, check
from starpod.check.suite import REQUIREMENTS
from tests.skipped import not_by_time

WITHOUT = {
    "C-65": "the environment has no score",
    "C-66": "the environment has no expert",
    "C-92": "the server allows too many sessions to fill it",
    "C-95": "no token was given",
    "C-98": "it takes 75 s: run it with --slow",
}
"""What no hosted environment can show."""


async def _all(address: str, ids: Sequence[str], also: str) -> list[EnvironmentReport]:
    reports = await asyncio.gather(
        *(check(address, REQUIREMENTS, environments=[id], also=also, seconds=90, call_seconds=60) for id in ids)
    )
    return [environment for report in reports for environment in report.environments]


def check_all(address: str, ids: Sequence[str], also: str = "") -> dict[str, dict[str, str]]:
    """By environment, what was skipped and why. Fails the test where the contract is not kept."""
    skipped = {}
    for report in asyncio.run(_all(address, ids, also)):
        broken = [f"{result.requirement.id}: {result.message}" for result in report.results if result.breaks]
        assert not broken, (report.id, broken)
        skipped[report.id] = not_by_time(
            (result.requirement.id, result.message) for result in report.results if result.status == "skipped"
        )
        assert skipped[report.id].items() >= WITHOUT.items()
    assert sorted(skipped) == sorted(ids)
    return skipped
