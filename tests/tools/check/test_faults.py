"""The check finds what is wrong: for each wrong server the requirements that it breaks, and no others."""

import asyncio
import json
import multiprocessing
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

Reports = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def reports() -> Reports:
    """The JSON report on every wrong server by the fault's name, made in two processes."""
    halves = [[fault.__name__ for fault in FAULTS[half::PROCESSES]] for half in range(PROCESSES)]
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return {name: json.loads(text) for half in pool.map(_examine_some, halves) for name, text in half.items()}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.minutes
def test_the_broken_requirement_is_the_one_reported(fault: type[Faulty], reports: Reports) -> None:
    unmet = {r["id"]: r["message"] for r in _results(reports[fault.__name__]) if r["status"] in ("failed", "error")}
    assert set(fault.reported) <= set(unmet), unmet
    assert set(unmet) <= {*fault.reported, *fault.perhaps}, unmet


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.minutes
def test_its_message_tells_what_was_expected_and_what_came(fault: type[Faulty], reports: Reports) -> None:
    for result in _results(reports[fault.__name__]):
        assert result["status"] != "error", result["message"]
        if result["status"] == "failed":
            assert "expected" in result["message"]
            assert "got" in result["message"]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.minutes
def test_only_an_unmet_must_makes_the_check_fail(fault: type[Faulty], reports: Reports) -> None:
    report = reports[fault.__name__]
    unmet = [r for r in _results(report) if r["status"] == "failed" and r["strength"] == "MUST"]
    assert report["passed"] == (not unmet)


def test_every_level_has_faults() -> None:
    assert {requirement[0] for fault in FAULTS for requirement in fault.reported} == {"C", "S", "F", "N"}


def _results(report: dict[str, Any]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = report["environments"][0]["results"]
    return results


def _examine_some(names: list[str]) -> dict[str, str]:
    return asyncio.run(_examine([fault for fault in FAULTS if fault.__name__ in names]))


async def _examine(faults: list[type[Faulty]]) -> dict[str, str]:
    """A few at a time, because they mostly wait for leases."""
    room = asyncio.Semaphore(TOGETHER)

    async def examine(fault: type[Faulty]) -> str:
        async with room, serve(fault()) as address, serve(fault()) as also:
            return to_json(await check(address, REQUIREMENTS, also=also))

    texts = await asyncio.gather(*map(examine, faults))
    return {fault.__name__: text for fault, text in zip(faults, texts, strict=True)}
