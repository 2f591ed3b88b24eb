"""Rules that end a run."""

import json
import random
import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.diagnostics.config import EarlyStopConfig, MonitorConfig
from starpod.trainer.diagnostics.monitor import Monitor

STD = "collect/own_std_in_group"


def told(curves: dict[str, list[float]], config: MonitorConfig) -> str:
    """The step at which a run stops and why, or nothing. curves: by the last word of the metric's name."""
    names = {"std": STD, "kept": "collect/kept_fraction", "skipped": "update/skipped", "success": "collect/success"}
    names["teacher"] = "distillation/reverse_kl"
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
        ({"std": FALLEN, "teacher": [0.1] * 30}, "", ""),  # whose opinion is worth something even if rewards are equal
        ({"kept": [0] * 9, "skipped": [0, 0, 0, 0, 1] + [0] * 4}, "", ""),  # branches of dropped groups were trained on
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
        stop.evaluated(number, success, own_return, {})
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


def result(solved: int, churn: random.Random | None = None, bonus: float = 0.0) -> dict[str, Any]:
    """Return an evaluation of 256 seeds, `solved` of them solved. With `churn`, up to 6 of them differ each time."""
    wins = [seed < solved for seed in range(256)]
    if churn and 6 <= solved <= 250:
        swaps = churn.randint(0, 6)
        for seed in (*churn.sample(range(solved), swaps), *churn.sample(range(solved, 256), swaps)):
            wins[seed] = not wins[seed]
    return {"seed": [*range(256)], "sample": [0] * 256, "success": wins, "return": [won + bonus for won in wins]}


def plateau_of(evaluations: Sequence[dict[str, Any]]) -> int | None:
    """Number of the evaluation that stops a run, which is resumed before each of them."""
    state = Monitor(config := MonitorConfig(early_stop=EarlyStopConfig(plateau=3, low_success=False))).state_dict()
    for number, evaluation in enumerate(evaluations):
        monitor = Monitor(config)
        monitor.load_state_dict(json.loads(json.dumps(state)))
        stop = monitor.early_stop
        stop.evaluated(number, fmean(evaluation["success"]), fmean(evaluation["return"]), {"": evaluation})
        if stop.reason:
            assert "3 evaluations in a row have not risen" in stop.reason
            return number
        state = monitor.state_dict()
    return None


@given(st.integers(17, 60), st.integers(0, 2), st.randoms(use_true_random=False))
def test_a_run_does_not_stop_while_evaluations_rise_by_more_than_noise(
    rise: int, waits: int, churn: random.Random
) -> None:
    """Success rises after `waits` evaluations without a rise, again and again, and then stays."""
    rising = [solved for solved in reversed(range(245, 0, -rise)) for _ in range(waits + 1)]
    evaluations = [*(result(solved, churn) for solved in rising), *[result(245)] * 4]
    assert plateau_of(evaluations) == len(rising) - waits + 2


def test_a_plateau_is_one_of_a_solved_task_alone() -> None:
    flat = [0] * 20
    # One run on the long lock: it was all but solved, between two evaluations, after seven that hardly rose.
    late = [0, 0, 20, 36, 44, 47, 57, 234]
    assert plateau_of([result(solved) for solved in flat + [200] * 20]) is None
    assert plateau_of([result(solved) for solved in [*late, 235, 234]]) is None
    assert plateau_of([result(solved) for solved in [*late, 235, 234, 235]]) == 10
    # A slow rise counts as one, and so does a return that rises where success no longer does.
    assert plateau_of([result(230 + 2 * number) for number in range(13)]) is None
    assert plateau_of([result(240, bonus=number / 100) for number in range(20)]) is None
