"""Work and memory per byte of a request: attacks that cost minutes and gigabytes once, and a search for others."""

from __future__ import annotations

import pytest

from tests.hostile.attacks import ATTACKS, measure
from tests.hostile.conftest import KEPT_MIB, MEASUREMENTS, kept_memory, memory_of, work_unit
from tests.hostile.costs import Search
from tests.support import ServerProcess

QUICK = {
    "options_of_nulls",
    "steps_out_of_order",
    "nested_json_held",
    "json_string_without_an_end",
    "many_heavy_calls_at_once",
}
P99_UNITS = 250


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.minutes) for name in ATTACKS]
)
def test_an_attack_costs_the_attacker_alone(attacked: ServerProcess, name: str) -> None:
    """A turn of another tenant waits for at most `P99_UNITS` of the server's work, and memory is given back."""
    for _ in range(MEASUREMENTS):
        unit = work_unit()
        cost = measure(ATTACKS[name], attacked)
        units = cost.p99_work / max(unit, work_unit())
        if cost.kept <= KEPT_MIB and units <= P99_UNITS:
            break
    assert cost.kept <= KEPT_MIB, cost
    assert units <= P99_UNITS, cost


@pytest.mark.parametrize(
    ("seed", "count", "size"),
    [
        (1, 60, 60_000),
        (2, 40, 1_500_000),
        pytest.param(3, 150, 100_000, marks=pytest.mark.minutes),
        pytest.param(4, 150, 8_000_000, marks=pytest.mark.minutes),
    ],
)
def test_no_request_costs_more_than_its_bytes_and_calls_allow(
    attacked: ServerProcess, seed: int, count: int, size: int
) -> None:
    search, said = Search(attacked.address, attacked.pid, seed), len(attacked.log)
    search.run(20, 1_000)  # what is loaded once
    search.costs.clear()
    before = memory_of(attacked.pid)
    search.run(count, size)
    kept = kept_memory(attacked.pid, before)
    worst = max(search.costs, key=lambda cost: cost.excess)
    assert worst.excess <= 1, worst
    assert kept <= KEPT_MIB, f"{kept:.0f} MiB more"
    assert attacked.process.poll() is None
    assert "server bug" not in attacked.log[said:]
