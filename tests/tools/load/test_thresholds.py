"""Requirements are read as written, judged by the figure they name, and refused where they make no sense."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.load.requirements import _LATENCIES, _PLAIN, KNOWN, parse_requirement

UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
STAGE: dict[str, Any] = {
    "steps_per_second": 1200.0,
    "calls_per_second": 1500.0,
    "unserved": 0,
    "errors": {"total": 3, "share": 0.01, "classes": {"overload": {"count": 3}}},
    "server_time": {"environment_ms": 0.5, "total_ms": 0.8, "queue_ms": None, "overhead_ms": 1.5},
    "calls": {
        "step": {"p99_ms": 19.0, "p99.9_ms": 40.0, "max_ms": 50.0, "service": {"p99_ms": 12.0}},
        "reset": {"p99_ms": 7.0},
    },
}


@given(
    st.sampled_from(sorted(_LATENCIES)),
    st.sampled_from(["<", "<=", ">", ">=", "=", "=="]),
    st.integers(1, 10**6),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(["", " "]),
)
def test_times_are_read(name: str, sign: str, value: int, unit: str, gap: str) -> None:
    requirement = parse_requirement(f"{gap}{name}{gap}{sign}{gap}{value}{unit}")
    assert (requirement.name, requirement.sign) == (name, sign)
    assert requirement.limit == pytest.approx(value * UNITS[unit])


@given(st.sampled_from(sorted(_PLAIN)), st.sampled_from(["<", ">="]), st.floats(0, 1e6))
def test_numbers_are_read(name: str, sign: str, value: float) -> None:
    requirement = parse_requirement(f"{name}{sign}{value!r}")
    assert (requirement.name, requirement.sign, requirement.limit) == (name, sign, value)


@given(st.floats(0, 1e3), st.floats(0, 1e3))
def test_the_signs_mean_what_they_say(limit: float, value: float) -> None:
    for sign, holds in (("<", value < limit), ("<=", value <= limit), (">", value > limit), (">=", value >= limit)):
        assert parse_requirement(f"steps_per_second{sign}{limit!r}").met(value) == holds


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("step.p99<20ms", True),
        ("step.p99<19ms", False),
        ("step.p99<=19ms", True),
        ("step.service.p99<13ms", True),
        ("reset.service.p99<8ms", True),
        ("step.p99.9<0.05s", True),
        ("errors=0", False),
        ("errors.overload<=3", True),
        ("errors.transport=0", True),
        ("error_share<2%", True),
        ("steps_per_second>1,000", True),
        ("overhead<1ms", False),
        ("server.environment<1ms", True),
        ("server.queue<1s", False),
        ("render.p50<1s", False),
    ],
)
def test_a_stage_is_judged(text: str, met: bool) -> None:
    requirement = parse_requirement(text)
    assert requirement.met(requirement.measured(STAGE)) == met


def test_what_was_not_measured_is_not_met_and_said_so() -> None:
    requirement = parse_requirement("fork.p50<1s")
    measured = requirement.measured(STAGE)
    assert (measured, requirement.met(None), requirement.show(None)) == (None, False, "not measured")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step.p98<20ms", "did you mean"),
        ("latency<20ms", "nothing is called 'latency'"),
        ("step.p99<20", "lacks a unit"),
        ("step.p99", "NAME SIGN VALUE"),
        ("step.p99!20ms", "NAME SIGN VALUE"),
        ("errors=none", "not a number"),
        ("step.p99<soon", "not a duration"),
    ],
)
def test_senseless_values_are_reported(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_requirement(text)


def test_every_name_can_be_required() -> None:
    for name in KNOWN:
        parse_requirement(f"{name}<{'5' if name in _PLAIN else '5ms'}").measured(STAGE)
