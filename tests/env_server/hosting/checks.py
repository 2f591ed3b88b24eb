"""`starpod check` as a function: all of a server's named environments at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

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
"""What most hosted environments cannot show."""
EXPERT, SCORE = "C-66", "C-65"


async def _all(address: str, ids: Sequence[str], also: str) -> list[EnvironmentReport]:
    reports = await asyncio.gather(
        *(check(address, REQUIREMENTS, environments=[id], also=also, seconds=90, call_seconds=60) for id in ids)
    )
    return [environment for report in reports for environment in report.environments]


def check_all(
    address: str, ids: Sequence[str], also: str = "", shown: Collection[str] = ()
) -> dict[str, dict[str, str]]:
    """By environment, what was skipped and why. Fails the test where the contract is not kept.

    shown: requirements that most hosted environments cannot show, and these can.
    """
    expected = {id: why for id, why in WITHOUT.items() if id not in shown}
    skipped = {}
    for report in asyncio.run(_all(address, ids, also)):
        broken = [f"{result.requirement.id}: {result.message}" for result in report.results if result.breaks]
        assert not broken, (report.id, broken)
        skipped[report.id] = not_by_time(
            (result.requirement.id, result.message) for result in report.results if result.status == "skipped"
        )
        assert skipped[report.id].items() >= expected.items()
        assert not skipped[report.id].keys() & set(shown)
    assert sorted(skipped) == sorted(ids)
    return skipped
