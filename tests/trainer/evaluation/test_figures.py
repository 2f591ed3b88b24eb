"""Figures of evaluations: success and the environment's own return, with their intervals."""

import json
from collections.abc import Sequence

import pytest

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.evaluation.figures import held_out_figures, summarise
from starpod.trainer.evaluation.statistics import mean_interval, pass_at_k, wilson_interval
from starpod.trainer.output.words import final_line
from starpod.trainer.rollout.collect import Collected
from tests.trainer.turns import a_turn


def bought(number: int, scores: Sequence[float]) -> Episode:
    """An episode that earned these, a turn each, and was fined in every turn."""
    turns = [a_turn(parts={"environment": score, "format": -0.1}) for score in scores]
    return Episode(number, 0, "webshop-v1", turns=turns, end="terminal", success=sum(scores) == 1)


def lost(number: int) -> Episode:
    return Episode(number, 0, "webshop-v1", end="failed", error="EnvironmentBug: a bug")


def test_the_few_episodes_that_did_not_fail_are_no_success_rate() -> None:
    solved = bought(0, [1.0])
    third, most = (
        held_out_figures(Collected([Group(0, [solved] * count)], [*map(lost, range(count, 3))])) for count in (2, 1)
    )
    assert (third["episodes"], third["failed"], third["success"]) == (2, 1, 1.0)
    assert (most["episodes"], most["failed"]) == (1, 2)
    assert [most[name] for name in ("success", "success_low", "return_mean", "return_high")] == [None] * 4
    assert summarise([solved, solved, lost(1), lost(2)])["pass_at_k"] == {}
    json.dumps(summarise([lost(1)]), allow_nan=False)
    assert final_line(most | {"step": 4}) == ("no result, because 2 of 3 episodes failed, by the checkpoint of step 4")


def test_figures_by_hand() -> None:
    episodes = [bought(group, [reward]) for group, reward in ((0, 1.0), (0, 0.0), (1, 0.0), (1, 0.0))]
    episodes[3].success = None
    figures = summarise([*episodes, lost(1)])
    assert (figures["episodes"], figures["starts"], figures["failed"]) == (4, 2, 1)
    assert figures["success"] == 0.25
    assert figures["return_mean"] == 0.25  # the environment's own, without the penalty
    assert figures["pass_at_k"] == {"1": 0.25, "2": pytest.approx((pass_at_k(2, 1, 2) + pass_at_k(2, 0, 2)) / 2)}
    assert figures["ends"] == {"terminal": 4}


def test_an_environment_that_does_not_report_success_has_none() -> None:
    """Servers set the success of truncated episodes to False."""
    episodes = [bought(group, [0.5]) for group in (0, 0, 1)]
    episodes[0].success = episodes[1].success = None
    episodes[2].success, episodes[2].end = False, "environment_limit"
    figures = summarise(episodes)
    assert (figures["success"], figures["success_low"], figures["pass_at_k"]) == (None, None, {})
    assert (figures["return_mean"], figures["episodes"]) == (0.5, 3)
    held_out = held_out_figures(Collected([Group(0, episodes)]))
    assert (held_out["success"], held_out["return_mean"]) == (None, 0.5)
    assert final_line(held_out | {"step": 4}) == "return 0.5 (0.5 to 0.5) of 3 episodes, by the checkpoint of step 4"


def test_the_return_is_the_environments_own_as_in_starpod_eval() -> None:
    episodes = [bought(0, [0.0, 0.5]), bought(1, [0.0, 0.0, 1.0]), bought(2, [0.25])]
    summary = held_out_figures(Collected([Group(each.group, [each]) for each in episodes], [lost(3)]))
    low, high = mean_interval([0.5, 1.0, 0.25])
    assert summary["return_mean"] == pytest.approx(1.75 / 3)
    assert (summary["return_low"], summary["return_high"]) == pytest.approx((low, high))
    assert (summary["success"], summary["success_low"], summary["success_high"]) == (1 / 3, *wilson_interval(1, 3))
    assert (summary["episodes"], summary["failed"], summary["turns_mean"]) == (3, 1, 2.0)
    measured = summarise(episodes)
    for name in ("return_mean", "return_low", "return_high", "success_low"):
        assert summary[name] == pytest.approx(measured[name]), name


def test_one_episode_has_no_interval_of_the_return() -> None:
    one = held_out_figures(Collected([Group(0, [bought(0, [0.5])])]))
    assert (one["return_mean"], one["return_low"], one["return_high"]) == (0.5, None, None)
