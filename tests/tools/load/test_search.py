"""The search finds what a server holds, without running it: the server here is a formula."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.load.plan import Stage
from starpod.load.requirements import CONFIRMATIONS, MOST_PROBES, PRECISION, STEP_DOWN, find_rate, parse_requirement

TARGET = [parse_requirement("step.p99<20ms")]
STAGE = Stage("search", 64, 10.0, 1.0)


class Formula:
    """p99 is 20 ms at `holds`, less below it and more above; a closed loop reaches `capacity`."""

    def __init__(self, holds: float, capacity: float, *, weaker: float = 1.0, errors: bool = False) -> None:
        self.holds, self.capacity, self.weaker, self.errors = holds, capacity, weaker, errors
        self.played: list[Stage] = []

    def __call__(self, stage: Stage) -> dict[str, Any]:
        self.played.append(stage)
        rate = stage.rate or self.capacity
        holds = self.holds * (self.weaker if stage.seconds > STAGE.seconds else 1.0)
        return {
            "steps_per_second": rate,
            "steps": rate * stage.seconds,
            "seconds": stage.seconds,
            "unserved": 0,
            "ended": "",
            "errors": {"total": int(self.errors), "classes": {"overload": {}}},
            "calls": {"step": {"p99_ms": 19.999 * (rate / holds) ** 3}},
        }


@given(st.floats(1, 1e5), st.floats(0.6, 30))
def test_it_comes_within_its_precision_and_confirms(holds: float, more: float) -> None:
    server = Formula(holds, holds * more)
    found = find_rate(STAGE, TARGET, server)
    assert found.rate is not None
    assert holds / (1 + PRECISION) * 0.999 <= found.rate <= holds * 1.001
    assert found.probes[-1].confirming
    assert found.probes[-1].held
    assert server.played[-1].seconds == 2 * STAGE.seconds
    assert len(found.probes) <= MOST_PROBES + CONFIRMATIONS
    given = find_rate(replace(STAGE, rate=40.0), TARGET, server)
    assert given.probes[0].rate == 40.0, "a rate that is given is tried first"


def test_what_is_not_confirmed_is_lowered() -> None:
    found = find_rate(STAGE, TARGET, Formula(100, 400, weaker=0.92))
    assert found.rate is not None
    assert found.rate <= 92
    confirmations = [probe for probe in found.probes if probe.confirming]
    assert [probe.held for probe in confirmations] == [False, True]
    assert confirmations[1].rate == pytest.approx(STEP_DOWN * confirmations[0].rate)


def test_what_never_holds_is_not_found() -> None:
    found = find_rate(STAGE, TARGET, Formula(100, 400, weaker=0.1))
    assert found.rate is None
    failing = find_rate(STAGE, TARGET, Formula(100, 400, errors=True))
    assert failing.rate is None
    assert all("errors (overload)" in probe.why for probe in failing.probes if probe.rate < 100)
    assert len(failing.probes) <= MOST_PROBES


def test_a_run_that_ends_ends_the_search() -> None:
    found = find_rate(STAGE, TARGET, lambda stage: None)
    assert (found.rate, found.probes) == (None, [])
