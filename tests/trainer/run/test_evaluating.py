"""Evaluating by itself: which step is best, and which evaluations count towards a stop."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.diagnostics.monitor import Monitor
from starpod.trainer.evaluation.held_out import HeldOut
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.screen import evaluation_line
from starpod.trainer.rollout.collect import Collected
from starpod.trainer.run.evaluating import Evaluating
from starpod.trainer.run.progress import Progress
from tests.trainer.run.scripted_run import episode, make_shared


class Scripted:
    """Start states whose episodes earn what is given, evaluation after evaluation."""

    def __init__(self, returns: Iterable[list[float]], reports_success: bool = True) -> None:
        self._returns, self._reports_success = iter(returns), reports_success

    async def play(self, purpose: str, streams: str, what: str = "") -> dict[str, Collected]:
        episodes = [episode(number, 0, value) for number, value in enumerate(next(self._returns))]
        for each in episodes:
            each.success = each.success if self._reports_success else None
        return {"": Collected([Group(each.group, [each]) for each in episodes])}

    def kept_episodes(self, collections: dict[str, Collected]) -> list[Episode]:
        return []


def make_evaluating(
    path: Path, returns: Iterable[list[float]], *, reports_success: bool = True, **values: Any
) -> Evaluating:
    config = parse_config(values)
    held_out, early_stop = cast(HeldOut, Scripted(returns, reports_success)), Monitor(config.monitor).early_stop
    return Evaluating(make_shared(config), held_out, early_stop=early_stop, folder=RunFolder.create(path))


async def test_the_best_step_is_the_first_one_that_no_later_one_beats(tmp_path: Path) -> None:
    evaluating = make_evaluating(tmp_path, [[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    best = []
    for step in range(4):
        assert not evaluating.is_done(step)
        await evaluating.play(Progress(step))
        best.append(evaluating.is_best(step))
    assert best == [True, True, False, False] and evaluating.success == 0.0
    again = make_evaluating(tmp_path / "again", [])
    again.load_state_dict(evaluating.state_dict())
    assert again.is_best(1) and again.is_done(3) and again.success == 0.0


async def test_the_return_decides_where_the_environment_does_not_report_success(tmp_path: Path) -> None:
    """Such as CartPole's. No rule about success stops such a run."""
    returns, monitor = [[-9.0], [-3.0], [-5.0], [-4.0]], {"early_stop": {"low_success_times": 1}}
    evaluating = make_evaluating(tmp_path, returns, reports_success=False, monitor=monitor)
    best = []
    for step in range(4):
        await evaluating.play(Progress(step))
        best.append(evaluating.is_best(step))
    assert best == [True, True, False, False] and evaluating.success is None
    assert evaluating.early_stop.reason == ""
    lines = RunFolder(tmp_path).read_evaluations()
    assert [(line["success"], line["return_mean"]) for line in lines] == [(None, value) for [value] in returns]
    assert evaluation_line(1, lines[1]) == "evaluation at step 1 on selection seeds: return -3 of 1 episodes"


@pytest.mark.parametrize("every", [0, 2])
async def test_only_evaluations_on_schedule_count_towards_a_stop_and_each_step_once(tmp_path: Path, every: int) -> None:
    monitor = {"early_stop": {"low_success_times": 3, "plateau": 3}}
    evaluating = make_evaluating(tmp_path, [[0.0]] * 5, evaluation={"every": every}, monitor=monitor)
    # A run that is stopped and resumed in step 1, again and again.
    for step in (0, 1, 1, 1, 2):
        await evaluating.play(Progress(step))
    state = evaluating.early_stop.state_dict()
    assert (state["low_success"], state["level_times"]) == ((2, 1) if every else (1, 0))
    assert evaluating.early_stop.reason == ""


async def test_an_evaluation_whose_episodes_all_failed_is_no_success_of_zero(tmp_path: Path) -> None:
    evaluating = make_evaluating(tmp_path, [[], [1.0]], monitor={"early_stop": {"low_success_times": 1}})
    await evaluating.play(Progress(0))
    assert evaluating.success is None and not evaluating.is_done(0)
    assert evaluating.early_stop.reason == ""
    await evaluating.play(Progress(1))
    assert [line["step"] for line in RunFolder(tmp_path).read_evaluations()] == [1]
    lines = map(json.loads, RunFolder(tmp_path).evaluations.read_text().splitlines())
    assert [(line["step"], line["success"]) for line in lines] == [(0, None), (1, 1.0)]
