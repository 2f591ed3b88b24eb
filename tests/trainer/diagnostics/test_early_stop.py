"""Rules that end a run."""

import json
import re
from collections.abc import Sequence

import pytest

from starpod.trainer.diagnostics.config import EarlyStopConfig, MonitorConfig
from starpod.trainer.diagnostics.monitor import Monitor

STD = "collect/own_std_in_group"


def told(curves: dict[str, list[float]], config: MonitorConfig) -> str:
    """The step at which a run stops and why, or nothing. curves: by the last word of the metric's name."""
    names = {"std": STD, "kept": "collect/kept_fraction", "success": "collect/success"}
    stop = Monitor(config)
    for step, row in enumerate(zip(*curves.values(), strict=True), start=1):
        stop.update(step, {names[name]: value for name, value in zip(curves, row, strict=True)})
        if stop.early_stop.reason:
            return f"{step}: {stop.early_stop.reason}"
    return ""


RISING = [0.1] * 10 + [0.1 + 0.02 * n for n in range(1, 21)] + [0.5] * 30
FALLEN = [0.4] * 10 + [0.01] * 20
OFF = MonitorConfig(early_stop=EarlyStopConfig(reward_std=False, low_success=False, empty_filter=False))


@pytest.mark.parametrize(
    ("curves", "begin", "reason"),
    [
        (
            {"std": [0.4] * 10 + [0.039] * 20},
            "20: ",
            r"below 10 % of its start \(0\.4\) in 10 steps.*collapsed",
        ),
        ({"std": [0.4] * 10 + ([0.01] * 9 + [0.05]) * 5}, "", ""),  # one better step begins the count anew
        ({"std": FALLEN, "success": [0.97] * 30}, "20: ", r"the task is learnt \(97 % success\)"),
        (
            {"std": [0.02] * 10 + [0.001] * 20, "success": [0.005, 0.0, 0.01] * 10},
            "20: ",
            r"the policy never learnt \(success was never above 0\.5 %\)",
        ),
        (
            {"std": FALLEN, "success": [0.3] * 10 + [0.02] * 20},
            "20: ",
            r"the policy has collapsed \(success was 30 % and is 2\.0 %\)",
        ),
        # While success rises nothing stops: the policy learns one start state after the other.
        (
            {"std": FALLEN + [0.01] * 30, "success": RISING},
            "4",
            "success rose from 10 % to 50 %, and these start states teach nothing more",
        ),
        ({"kept": [0, 0, 0, 0, 0.5] * 3}, "", ""),
        ({"kept": [0.5, 0, 0, 0, 0, 0]}, "6: ", "the filter kept no group"),
        ({"kept": [0] * 40, "std": [0.4] * 10 + [0.0] * 30}, "", "off"),
    ],
)
def test_what_stops_a_run(curves: dict[str, list[float]], begin: str, reason: str) -> None:
    """reason: "off" where the rules are off."""
    found = told(curves, OFF if reason == "off" else MonitorConfig())
    assert found.startswith(begin) and bool(found) == bool(begin)
    assert not found or re.search(reason, found), found


@pytest.mark.parametrize(
    ("config", "figures", "step"),
    [
        # Five evaluations in a row without success.
        (MonitorConfig(), [(success, -1.0) for success in (0, 0, 0, 0, 0.01, 0, 0, 0.009, 0, 0)], 9),
        # A return above all before it begins the count anew.
        (MonitorConfig(), [(0.0, earned) for earned in (0.1, 0.2, 0.2, 0.3, 0.1, 0.3, 0.2, 0.3, 0.29)], 8),
        (OFF, [(0.0, 0.0)] * 20, None),
    ],
)
def test_evaluations_without_success_stop_a_run(
    config: MonitorConfig, figures: Sequence[tuple[float, float]], step: int | None
) -> None:
    """figures: success and return of each evaluation. step: number of the evaluation that stops the run, or None."""
    stop = Monitor(config).early_stop
    for number, (success, own_return) in enumerate(figures):
        stop.evaluated(number, success, own_return)
        assert bool(stop.reason) == (number == step)
    assert step is None or "5 evaluations in a row" in stop.reason


def test_counts_survive_a_restart() -> None:
    first = Monitor(MonitorConfig())
    for step in range(1, 20):
        first.update(step, {STD: 0.4 if step <= 10 else 0.0})
    assert not first.early_stop.reason
    second = Monitor(MonitorConfig())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.update(20, {STD: 0.0})
    assert second.early_stop.reason
