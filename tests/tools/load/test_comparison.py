"""Comparisons of reports distinguish changes from noise."""

from typing import Any

import numpy as np
import pytest

from starpod.load.comparison import FEWEST, compare_loads, intervals_of
from starpod.load.measurements import Histogram
from starpod.load.report import figures


def report(seed: int, *, slower: float = 1.0, intervals: int = 20, calls: int = 300, name: str = "64 sessions") -> Any:
    """Return the report of a run with lognormal latencies, whose intervals vary by a tenth."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(intervals):
        pace = slower * rng.normal(1, 0.1)
        parts.append(Histogram((2e-3 * pace * rng.lognormal(0, 0.5, int(calls / pace))).tolist()))
    steps = [len(part) for part in parts]
    return {
        "plan": {"environment": "lake-v1", "processes": 1},
        "stages": [
            {
                "name": name,
                "seconds": float(intervals),
                "interval_seconds": 1.0,
                "steps_per_second": sum(steps) / intervals,
                "calls": {"step": figures(Histogram.sum(parts))},
                "intervals": [
                    {"steps": count, "calls": {"step": {"hdr": part.encode()}}}
                    for count, part in zip(steps, parts, strict=True)
                ],
                "warnings": [],
            }
        ],
    }


def verdicts(before: Any, after: Any) -> dict[str, str]:
    return {change.name: change.verdict for change in compare_loads(before, after).changes}


@pytest.mark.parametrize("seed", [1, 20])
def test_twice_as_slow_is_worse_and_the_other_way_round_better(seed: int) -> None:
    fast, slow = report(seed), report(seed + 1, slower=2.0)
    told = verdicts(fast, slow)
    assert {told["steps_per_second"], told["step.p50_ms"], told["step.p99_ms"]} == {"worse"}
    told = verdicts(slow, fast)
    assert {told["steps_per_second"], told["step.p50_ms"], told["step.p99_ms"]} == {"better"}


def test_noise_is_seldom_called_a_change() -> None:
    told = [verdict for seed in range(5) for verdict in verdicts(report(seed), report(seed + 100)).values()]
    assert told.count("same") >= 0.9 * len(told)


def test_the_same_report_has_not_changed() -> None:
    one = report(3)
    assert set(verdicts(one, one).values()) <= {"same", "unsure"}


def test_intervals_hold_the_figure() -> None:
    stage = report(5)["stages"][0]
    known = intervals_of(stage)
    for name, value in (
        ("steps_per_second", stage["steps_per_second"]),
        ("step.p50_ms", stage["calls"]["step"]["p50_ms"]),
    ):
        low, high = known[name]
        assert low < value < high


def test_too_few_intervals_say_nothing() -> None:
    short = report(1, intervals=FEWEST - 1)
    assert intervals_of(short["stages"][0]) == {}
    assert set(verdicts(short, report(2, slower=3.0)).values()) == {"unsure"}


def test_too_few_latencies_have_no_tail() -> None:
    few = report(1, calls=15)
    assert "step.p99_ms" not in intervals_of(few["stages"][0])


def test_other_settings_are_reported() -> None:
    before, after = report(1), report(2)
    after["plan"]["processes"] = 4
    after["stages"][0]["warnings"].append("ended early")
    remarks = compare_loads(before, after).remarks
    assert "processes: 1 and 4" in remarks
    assert "64 sessions, second: ended early" in remarks


def test_reports_without_a_common_stage_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"no stage in common: 64 .* 8"):
        compare_loads(report(1), report(2, name="8 sessions"))
