"""The check finds what is wrong: for each wrong server the requirements that it breaks, and no others."""

import asyncio
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from starpod.check.report import to_json
from starpod.check.runner import check
from starpod.check.suite import REQUIREMENTS
from tests.tools.check.faults import FAULTS
from tests.tools.check.faults.faulty import Faulty
from tests.tools.check.reference_server import serve

PROCESSES = 2
TOGETHER = 4
"""Servers that are checked at a time: the check mostly waits for leases."""


@pytest.fixture(scope="module", params=["its own", pytest.param("all", marks=pytest.mark.minutes)])
def reports(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Reports by the fault's name, on the requirements that should or may find it, or on all."""
    if request.param == "its own":
        return asyncio.run(_examine(FAULTS, everything=False))
    halves = [[fault.__name__ for fault in FAULTS[half::PROCESSES]] for half in range(PROCESSES)]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return {name: report for half in pool.map(_examine_some, halves) for name, report in half.items()}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_broken_requirement_is_the_one_reported(fault: type[Faulty], reports: dict[str, Any]) -> None:
    """The message says what was expected and what was received. Only a violated MUST makes the check fail."""
    report = reports[fault.__name__]
    unmet = {r["id"]: r for r in report["environments"][0]["results"] if r["status"] in ("failed", "error")}
    assert set(fault.reported) <= unmet.keys() <= {*fault.reported, *fault.perhaps}, unmet
    for result in unmet.values():
        assert result["status"] == "failed" and "expected" in result["message"] and "got" in result["message"], result
    assert report["passed"] == all(result["strength"] != "MUST" for result in unmet.values())


def test_every_level_has_faults() -> None:
    assert {requirement[0] for fault in FAULTS for requirement in fault.reported} == {"C", "S", "F", "N"}
    assert {id_ for fault in FAULTS for id_ in (*fault.reported, *fault.perhaps)} <= {each.id for each in REQUIREMENTS}


def _examine_some(names: list[str]) -> dict[str, Any]:
    return asyncio.run(_examine([fault for fault in FAULTS if fault.__name__ in names], everything=True))


async def _examine(faults: Sequence[type[Faulty]], *, everything: bool) -> dict[str, Any]:
    room = asyncio.Semaphore(TOGETHER)

    async def examine(fault: type[Faulty]) -> Any:
        chosen = [each for each in REQUIREMENTS if everything or each.id in {*fault.reported, *fault.perhaps}]
        async with room, serve(fault()) as address, serve(fault()) as also:
            return json.loads(to_json(await check(address, chosen, also=also, seconds=120.0)))

    return dict(zip([each.__name__ for each in faults], await asyncio.gather(*map(examine, faults)), strict=True))
