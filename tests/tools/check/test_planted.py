"""Of bugs that were planted in environments the check finds nearly all, and in those without one it finds nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from starpod.check.runner import EnvironmentReport, check
from starpod.check.suite import REQUIREMENTS, REWARD
from tests.support import start_server
from tests.tools.check import planted
from tests.tools.check.test_reward import BUGS

PLANTED = {
    "contract": planted.CONTRACT,
    "determinism": planted.DETERMINISM,
    "copies": planted.COPIES,
    "rewards": {name: changes for name, (_, changes) in BUGS.items()},
}
RIGHT = {"right": [], "luck": [planted.SLIPS], "counts": [*planted.COUNTS, planted.SHOWS_TURNS]}
FOUND = 0.95
"""The share of the bugs that must be found."""
AT_ONCE = 4


@pytest.mark.minutes
@pytest.mark.timeout(900)
def test_nearly_all_planted_bugs_are_found_and_nothing_else(tmp_path: Path) -> None:
    changes = {f"{kind}-{n}-v1": each for kind, bugs in PLANTED.items() for n, each in enumerate(bugs.values())}
    changes |= {f"{name}-v1": each for name, each in RIGHT.items()}
    words = []
    for id_, each in changes.items():
        (tmp_path / f"{id_.replace('-', '_')}.py").write_text(planted.vault(id_, each))
        words += ["--environment-module", str(tmp_path / f"{id_.replace('-', '_')}.py")]
    with start_server(*words) as server, start_server(*words) as also:
        reports = asyncio.run(_examine(server.address, also.address, list(changes)))
    unmet = {id_: [r for r in report.results if r.status in ("failed", "error")] for id_, report in reports.items()}
    missed = []
    for kind, bugs in PLANTED.items():
        found = [bool(unmet[f"{kind}-{n}-v1"]) for n in range(len(bugs))]
        missed += [f"{kind}: {bug}" for bug, was in zip(bugs, found, strict=True) if not was]
        print(f"{kind}: {sum(found)} of {len(found)} found")
    total = sum(map(len, PLANTED.values()))
    print(f"{total - len(missed)} of {total} found; missed: {missed or 'none'}")
    assert {name: unmet[f"{name}-v1"] for name in RIGHT} == {name: [] for name in RIGHT}
    assert total >= 40
    assert total - len(missed) >= FOUND * total, missed


async def _examine(address: str, also: str, ids: list[str]) -> dict[str, EnvironmentReport]:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(id_: str) -> EnvironmentReport:
        async with room:
            report = await check(
                address, [*REQUIREMENTS, *REWARD], environments=[id_], also=also, seconds=180.0, call_seconds=60.0
            )
            return report.environments[0]

    return dict(zip(ids, await asyncio.gather(*map(one, ids)), strict=True))
