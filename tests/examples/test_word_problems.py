"""The word problems of examples/: what the generator writes is a file of tasks, whose solutions are right."""

import json
import subprocess
import sys
from pathlib import Path

from starpod.environments.tasks.answers import find_answer
from starpod.environments.tasks.file import TaskFile
from starpod.environments.tasks.questions import TasksSettings
from starpod.trainer.configuration.loading import load_config
from tests.support import ROOT

SCRIPT = ROOT / "examples" / "word_problems.py"


def test_its_tasks_are_served_and_its_solutions_are_right(tmp_path: Path) -> None:
    counts = ("--train", "40", "--test", "20", "--solved", "30")
    subprocess.run([sys.executable, SCRIPT, "--folder", tmp_path, *counts], check=True, stdout=subprocess.DEVNULL)
    file = TaskFile(tmp_path / "tasks.jsonl", TasksSettings())
    assert {name: len(rows) for name, rows in file.splits.items()} == {"train": 40, "test": 20, "all": 60}
    questions = {question.prompt: question for question in map(file.read, file.splits["train"])}
    solutions = [json.loads(line)["messages"] for line in (tmp_path / "solutions.jsonl").read_text().splitlines()]
    assert len(solutions) == 30
    for asked, reply in solutions:
        question = questions[asked["content"]]
        action = reply["content"].removeprefix("<answer>").removesuffix("</answer>")
        *steps, _ = action.splitlines()
        assert all(eval(left) == int(right) for left, right in (step.split(" = ") for step in steps))
        assert question.checker.check(find_answer(action), question.rights, question.columns).score == 1


def test_its_job_is_a_configuration() -> None:
    assert load_config(str(SCRIPT.with_suffix(".yaml")), []).evaluation.options == {"split": "test"}
