"""The page of an evaluation: its table, pairs of models, and a link to each episode."""

import html
import re
from pathlib import Path

import pytest

from starpod.trainer.agents.base import Task
from starpod.trainer.evaluation.folder import EvaluationFolder
from starpod.trainer.evaluation.plan import EvaluationPlan, PlannedEnvironment
from tests.tools.ui.conftest import site_over
from tests.trainer.diagnostics.synthetic import episode

LAKE = PlannedEnvironment(Task("frozen_lake-v1"), "frozen_lake")
PLAN = EvaluationPlan(
    seed=20, episodes=3, attempts=2, models={"a <model>": {}, "random": {}}, environments={"frozen_lake-v1": LAKE}
)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs with an evaluation. One episode failed and was played again, and a line is incomplete."""
    folder = EvaluationFolder(tmp_path / "lake")
    with folder.writing():
        folder.write_plan(PLAN)
        for model, seed, member in (("a <model>", 20, 0), ("a <model>", 22, 1), ("random", 20, 0), ("random", 21, 1)):
            played = episode(seed, solved=model == "random", turns=2, group=seed, member=member)
            if seed == 21:
                played.end = "failed"
                folder.append(PLAN, model, played)
                played.end = "terminal"
            folder.append(PLAN, model, played)
    with folder.file(PLAN, "random").open("a") as file:
        file.write('{"group": 2')
    return tmp_path


def test_the_page_of_an_evaluation_leads_to_each_episode(runs: Path) -> None:
    with site_over(runs, page="/episodes?run=lake&kind=random", shown="20") as http:
        assert "evaluation of a &lt;model&gt;, random" in http.get("/").text
        page = http.get("/runs/lake")
        assert page.status_code == 200
        for text in (
            "2 models",
            "3 start states from seed 20",
            "2 attempts",
            "Pairs of models on the same start states",
        ):
            assert text in page.text
        links = [html.unescape(link) for link in re.findall(r'href="(/episodes?\?[^"]*)"', page.text)]
        assert [link.partition("?")[0] for link in links] == ["/episodes"] * 2 + ["/episode"] * 4
        for link in links:
            reply = http.get(link)
            assert reply.status_code == 200, link
        assert "failed" not in http.get(links[-1]).text  # the episode that was played again
        assert http.get("/episodes?run=lake&outcome=failed").text.count("/episode?") == 0
        folder = EvaluationFolder(runs / "lake")
        with folder.writing():
            folder.append(PLAN, "random", episode(22, solved=True, turns=2, member=1))
        assert http.get("/runs/lake").text.count("/episode?") == page.text.count("/episode?") + 1
        with folder.file(PLAN, "random").open("a") as file:
            file.write("{\n")
        assert http.get(links[-1]).status_code == 200  # another model's damaged file does not matter
        (runs / "lake" / "evaluation.json").write_text("{}")
        assert "it is no plan of this version" in http.get("/runs/lake").text
