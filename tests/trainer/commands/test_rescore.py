"""`starpod rescore`: new rewards beside recorded episodes, which stay as they are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from starpod.trainer.commands.rescore import rescore
from starpod.trainer.data.episode import DONE, ActionOutcome, Episode
from starpod.trainer.data.files import write_episodes
from tests.fake_openai import fake_openai
from tests.trainer.turns import a_turn

BAD = ActionOutcome(executed=False, valid=False, effective=False)
FUNCTIONS = """
import math
def actions(turn, transition, view, *, each=1.0):
    assert (view.end == "terminal") == transition.terminated == transition.done
    assert view.success is (transition.success if transition.done else None)
    return each * sum(outcome.executed for outcome in transition.outcomes) + (transition.observation.text == "goal")
def score(turn, transition, view):
    return transition.observation.score if view.end else 0.0
def broken(turn, transition, view):
    return math.nan
"""


def played(number: int, *, success: bool, **values: Any) -> Episode:
    """An episode of two turns; its second action is only valid if the number is even."""
    outcome = BAD if number % 2 else DONE
    turns = [
        a_turn(observation="start", text="a", actions=["go"], outcomes=[DONE], criteria={"begun": True}),
        a_turn(reward=float(success), text="b", actions=["go"], outcomes=[outcome], criteria={"done": success}),
    ]
    facts = {"end": "terminal", "success": success, "final_observation": "goal" if success else "lost", **values}
    return Episode(number, 0, "lake-v1", seed=number, turns=turns, **facts)


EPISODES = [played(number, success=number < 2) for number in range(4)]
LOST = Episode(4, 0, "lake-v1", seed=4, end="failed", error="SessionLost")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    write_episodes(tmp_path / "run" / "episodes" / "final-000001.jsonl.gz", EPISODES)
    return tmp_path / "run"


def score(path: Path, reward: Path | str, *arguments: str) -> Result:
    return CliRunner().invoke(rescore, [str(path), "--reward", str(reward), *arguments], env={"COLUMNS": "150"})


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rescored" / f"{name}.jsonl").read_text().splitlines()]


def test_a_function_scores_all_turns_as_in_training_and_a_table_compares(run: Path) -> None:
    report = run / "report.json"
    result = score(run, f"{run.parent}/rewards.py:actions", "--solved-from", "2", "--json", str(report))
    assert result.exit_code == 0, result.output
    found = rows(run, "actions")
    assert [row["parts"] for row in found] == [{"actions": value} for value in (3.0, 2.0, 2.0, 1.0)]
    assert found[0] == {
        "key": "final-000001-00001",
        "model": "",
        "environment": "lake-v1",
        "seed": 0,
        "attempt": 0,
        "old_reward": 1.0,
        "old_success": True,
        "parts": {"actions": 3.0},
        "reward": 3.0,
        "success": True,
    }
    (figures,) = json.loads(report.read_text())
    assert (figures["changed"], figures["agreement"], figures["unscored"]) == (4, 0.75, 0)
    assert (figures["before"]["return_mean"], figures["after"]["return_mean"]) == (0.5, 2.0)
    assert figures["after"]["success"] == 0.75 and figures["after"]["return_low"] < 2 < figures["after"]["return_high"]
    assert "lake-v1" in result.output and "75.0%" in result.output and "(0.701 to 3.299)" in result.output


def test_a_checklist_scores_with_other_weights(run: Path) -> None:
    checklist = run.parent / "checklist.yaml"
    checklist.write_text("criteria: {weight: 1, weights: {begun: 0.25, done: 0.75}}")
    assert score(run, checklist).exit_code == 0
    assert [(row["reward"], row["success"]) for row in rows(run, "checklist")] == [(1, True)] * 2 + [(0.25, False)] * 2


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("rewards.py:score", "it reads score, which episodes do not record: the reward needs the live environment"),
        ("rewards.py:broken", "returned nan"),
        ("rewards.py:scores", "did you mean score?"),
        ("none.yaml", "there is no file"),
        ("verdict.yaml", "do not record what rewards.verdict needs"),
        ("wrong.yaml", "no key 'criterias'; did you mean criteria?"),
    ],
)
def test_what_cannot_score_is_refused_before_anything_is_written(run: Path, reward: str, message: str) -> None:
    (run.parent / "verdict.yaml").write_text("verdict: 1.0")
    (run.parent / "wrong.yaml").write_text("criterias: {}")
    result = score(run, run.parent / reward)
    assert result.exit_code in (1, 2) and message in " ".join(result.output.split()), result.output
    assert not (run / "rescored").exists()


def test_nothing_is_overwritten(run: Path) -> None:
    reward = f"{run.parent}/rewards.py:actions"
    assert score(run, reward).exit_code == 0
    before = rows(run, "actions")
    result = score(run, reward, "--solved-from", "2")
    assert result.exit_code == 2 and "actions.jsonl exists" in result.output and rows(run, "actions") == before
    assert score(run, reward, "--name", "again").exit_code == 0 and rows(run, "again") == before
    assert score(run, reward, "--name", "../again").exit_code == 2


def test_a_judge_that_stops_answering_continues_where_it_was_and_no_verdict_is_no_reward(run: Path) -> None:
    is_down = False

    def answer(body: dict[str, Any]) -> str | int:
        text = body["messages"][1]["content"]
        if "goal" in text:
            return '{"mark": 1}'
        return 401 if is_down else "hm"

    with fake_openai(answer) as endpoint:
        judge = run.parent / "kind.yaml"
        judge.write_text(json.dumps({"rubric": "Kind?", "model": "m", "base_url": endpoint.base_url}))
        is_down = True
        result = score(run, judge)
        assert result.exit_code == 2 and "check base_url and model" in result.output
        assert not (run / "rescored").exists()
        is_down = False
        result = score(run, judge)
        assert result.exit_code == 1 and "2 episodes have no new reward, the first one because: 1 of 1" in result.output
        assert [row.get("reward") for row in rows(run, "kind")] == [1.0, 1.0, None, None]
        count = len(endpoint.requests)
        assert score(run, judge, "--name", "again").exit_code == 1 and len(endpoint.requests) == count
    assert json.loads((run.parent / "kind.replies.jsonl").read_text().splitlines()[0])["text"] == '{"mark": 1}'


def test_in_an_evaluation_folder_a_retried_episode_counts_once(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    models = [replace(LOST, model="m"), replace(EPISODES[0], seed=4, model="m"), replace(EPISODES[1], model="n")]
    write_episodes(tmp_path / "episodes" / "m-1.jsonl", models)
    result = score(tmp_path, f"{tmp_path}/rewards.py:actions")
    assert result.exit_code == 0 and "m in lake-v1" in result.output and "n in lake-v1" in result.output
    assert [(row["model"], row["reward"]) for row in rows(tmp_path, "actions")] == [("m", 3.0), ("n", 2.0)]
