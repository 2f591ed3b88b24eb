"""Results of a run as data frames and records."""

import json
from pathlib import Path
from typing import Any

import pytest

from starpod.trainer.data.files import BadEpisodes
from starpod.trainer.evaluation.compare import NotComparable
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.results import RunResults
from tests.trainer.diagnostics.synthetic import episode

pd = pytest.importorskip("pandas")


def line(step: int, **metrics: float) -> str:
    return (
        json.dumps({"step": step, "time": float(step), "metrics": metrics, "warnings": ["fell"] * (step == 2)}) + "\n"
    )


def final(solved: list[bool], **changes: Any) -> dict[str, Any]:
    results = {
        "seed": list(range(len(solved))), "sample": [0] * len(solved), "success": solved,
        "return": [float(each) for each in solved],
    }  # fmt: skip
    facts = {"environment": "walk-v1", "version": "1.0.0", "options": {}, "limits": {}, "seeds": [0, len(solved)]}
    return {
        "success": sum(solved) / len(solved),
        "episodes": len(solved),
        "samples": 1,
        **facts,
        "results": results,
    } | changes


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run").begin(
        {"environment": {"id": "walk-v1"}}, title="A <walk>", model="tiny"
    )
    folder.metrics.write_text(line(1, success=0.25) + line(2, success=0.5, entropy=1.5) + '{"step": 3')
    folder.append_evaluation({"step": 0, "success": 0.1, "reference": {"random": {"success": 0.05}}})
    folder.append_evaluation({"step": 2, "success": 0.5})
    folder.write_final(final([True, False, True, True]))
    return folder


def test_metrics_are_a_row_per_step_and_evaluations_have_dotted_names_below(folder: RunFolder) -> None:
    metrics = RunResults(folder.path).metrics
    assert list(metrics.index) == [1, 2]
    assert list(metrics["success"]) == [0.25, 0.5]
    assert pd.isna(metrics.loc[1, "entropy"]) and metrics.loc[2, "entropy"] == 1.5
    assert list(metrics["warnings"]) == [[], ["fell"]]

    evaluations = RunResults(folder.path).evaluations
    assert dict(evaluations["success"]) == {0: 0.1, 2: 0.5}
    assert evaluations.loc[0, "reference.random.success"] == 0.05


def test_a_run_that_has_just_begun_has_no_rows(tmp_path: Path) -> None:
    run = RunResults(RunFolder.create(tmp_path / "new").begin({}).path)
    assert (len(run.metrics), len(run.evaluations), run.final) == (0, 0, None)
    assert "not yet" in run._repr_html_()
    with pytest.raises(BadEpisodes):
        run.episodes()
    with pytest.raises(FileNotFoundError, match="holds no run"):
        RunResults(tmp_path)


def test_episodes_are_those_of_the_last_evaluation_unless_another_is_named(folder: RunFolder) -> None:
    for step, kind, count in ((0, "eval", 1), (2, "eval", 2), (2, "final", 3)):
        played = [episode(0, solved=number > 0, member=number) for number in range(count)]
        folder.episodes.write(step, played, kind)
    run = RunResults(folder.path)
    assert (len(run.episodes()), len(run.episodes(kind="eval")), len(run.episodes(kind="eval", step=0))) == (3, 2, 1)
    assert [each.member for each in run.episodes(solved=True)] == [1, 2]
    assert [each.member for each in run.episodes(solved=False)] == [0]
    assert len(run.episodes(environment="elsewhere-v1")) == 0
    assert run.episodes()._repr_html_().count("<tr>") == 4
    with pytest.raises(BadEpisodes, match="keeps no train episodes of step 7"):
        run.episodes(kind="train", step=7)


def test_runs_are_paired_as_the_site_pairs_them(folder: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.create(tmp_path / "other").begin({})
    other.write_final(final([True, True, True, True]))
    row = RunResults(folder.path).compare(str(other.path)).loc["walk-v1"]
    assert (row["pairs"], row["only_first"], row["only_second"]) == (4, 0, 1)
    assert (row["success_first"], row["success_second"], row["success_difference"]) == (0.75, 1.0, 0.25)
    assert row["success_difference_low"] < 0.25 < row["success_difference_high"]
    other.write_final(final([True] * 4, version="2.0.0"))
    with pytest.raises(NotComparable, match="version"):
        RunResults(folder.path).compare(RunResults(other.path))


def test_it_shows_itself_and_its_texts_are_escaped(folder: RunFolder) -> None:
    shown = RunResults(folder.path)._repr_html_()
    assert "A &lt;walk&gt;" in shown and "walk-v1" in shown and "75 % of 4 episodes" in shown
    record = episode(0, solved=True)
    record.final_observation = "<script>"
    assert "<script>" not in record._repr_html_() and "&lt;script&gt;" in record._repr_html_()


def test_without_pandas_it_says_what_is_missing(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install '\.\[notebook\]'"):
        _ = RunResults(folder.path).metrics
