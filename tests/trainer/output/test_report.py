"""The report of a run, and the comparison of benchmarks."""

import base64
import json
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.comparison import EVALUATION, FORKS, RETURN, compare_runs
from benchmarks.training.pictures import draw_charts
from starpod.report.curves import Rule
from starpod.report.pages import plotly
from starpod.trainer.output.report import write_report
from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.words import withdrawal
from tests.support import charts_of
from tests.trainer.diagnostics.synthetic import WARNING, episode, write_run

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Notes tags, text and everything a browser would fetch; fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.fetched: list[str] = []
        self.feed(text.replace("<wbr>", ""))  # where a word may be broken
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.words += [value or "" for key, value in attrs if key == "aria-label"]
        named = [(key, value or "") for key, value in attrs if key in ("src", "href", "xlink:href", "action")]
        self.fetched += [f"{key}={value}" for key, value in named if not value.startswith(("#", "data:image/png"))]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def tells(self, *words: str) -> None:
        assert [each for each in words if each not in self.text] == []


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_report_describes_the_run_and_loads_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, steps=100, title="FrozenLake <local> & StarPO-S")
    commands = {"go on": "starpod train --resume"}
    path = write_report(tmp_path, commands)
    assert path == tmp_path / "report.html"
    page, source = read(path), path.read_text(encoding="utf-8")
    assert page.fetched == [] and "@import" not in source and "url(http" not in source
    packed = re.findall(r'<script type="text/plain" id="plotly">([^<]+)</script>', source)
    assert [base64.b64decode(each) for each in packed] == [plotly()]
    page.tells(
        "FrozenLake <local> & StarPO-S",
        "SmolLM2, dequantised · ",
        "4:12 wall time",
        "The intervals do not overlap: the policy has improved.",
        "avoid holes 86 %",
        "Own reward deviation in groups",
        "Deviation by chance: identical replies",
        "No warning was given.",
        "algorithm.preset starpo-s starpo-ppo",
        "starpod train --resume",
        "the same start before training",
        "the goal lies 4 down & 0 right; the hole is <next> to me",
        "reply, with the beginning that the prompt prefilled",
        "Instructions for the policy Reach the goal.",
    )
    assert len(charts_of(source)) >= 12 and "light-dark(" in source
    assert write_report(tmp_path, commands).read_text(encoding="utf-8") == source, "the same folder gives the same page"
    scripts = page.tags.count("script")
    file = RunFolder(tmp_path).episodes.files()[-1]
    file.write_text(file.read_text().replace("the goal", "</script><script>alert(1)</script><b>"))
    assert read(write_report(tmp_path)).tags.count("script") == scripts, "text of the policy cannot break the page"


def test_groups_that_were_searched_are_drawn_as_trees(tmp_path: Path) -> None:
    write_run(tmp_path, steps=2)
    folder = RunFolder(tmp_path)
    parent, won = episode(7, solved=False, group=3), episode(7, solved=True, turns=4, group=3, member=2)
    won.turns[:2], won.turns[2].actions, won.parent = parent.turns[:2], ["Up"], (0, 2)
    lone = episode(8, solved=True, group=4)
    for step in (1, 2):
        folder.episodes.write_rollouts(step, [parent, won, lone], max_bytes=10**9)
    assert "Branches" not in read(write_report(tmp_path)).text
    searched = folder.read_config() | {"collect": {"search": {"strategy": "pivots"}}}
    folder.config.write_text(json.dumps(searched))
    page = read(write_report(tmp_path))
    page.tells(
        "Branches Groups of episodes/train-000002.jsonl.gz",
        "group 3, seed 7 · 1 of 2 solved",
        "0: not solved",
        "2: solved",
        "before turn 3 of member 0: 2",
    )
    assert "group 4" not in page.text
    folder.episodes.path.joinpath("train-000002.jsonl.gz").write_bytes(b"torn")
    assert "Branches" not in read(write_report(tmp_path)).text


def test_warnings_are_reported_and_marked(tmp_path: Path) -> None:
    write_run(tmp_path, steps=100, collapse=True)
    page = read(write_report(tmp_path))
    assert f"Step 66 {WARNING}" in page.text and "1 warning" in page.text
    # In each chart of learning, of the signals, of success and of return.
    marks = [chart["marks"] for chart in charts_of((tmp_path / "report.html").read_text()) if chart["marks"]]
    assert marks == [[[66, WARNING, "", None]]] * (7 + 5 + 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        over = withdrawal(WARNING.partition(" has")[0], "the task is solved")
        file.write(json.dumps({"step": 101, "time": 9e9, "metrics": {}, "warnings": [over]}) + "\n")
    assert "0 warnings" in read(write_report(tmp_path)).text


def evaluated(folder: RunFolder, *successes: float, **more: Any) -> None:
    """Evaluations every 25 steps."""
    for step, success in enumerate(successes):
        line = {"success": success, "success_low": success - 0.05, "success_high": success + 0.05}
        folder.append_evaluation({"step": 25 * step, **line, **more})


def test_the_headline_is_the_final_figure_and_the_curve_says_that_it_chose(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path).begin({})
    evaluated(folder, 0.1, 0.8, 0.4)
    worse = "The best selection evaluation was 80 % at step 25, and the policy has become worse since."
    read(write_report(tmp_path)).tells(worse)
    folder.cut_after(0)
    evaluated(folder, 0.1, 0.8, 0.7, episodes=256)
    read(write_report(tmp_path)).tells("latest 70 %", "the final seeds are played when the run is over")
    final = {"step": 25, "success": 0.74, "success_low": 0.68, "success_high": 0.79, "episodes": 256}
    folder.write_final({**final, "greedy": {"success": 0.77}})
    page = read(write_report(tmp_path))
    page.tells(
        "final 74 %",
        "last 70 %",
        "Final: the checkpoint of step 25, which the selection seeds chose, on start states that neither taught",
        "The intervals do not overlap: the policy has improved.",
        "The best selection evaluation was 80 % at step 25.",
        "Sampled greedily, it reaches 77 %.",
        "Success on selection seeds",
    )
    assert "latest" not in page.text


def test_the_return_has_its_own_curve_if_purchases_are_graded(tmp_path: Path) -> None:
    folders: list[Path] = []
    for name, graded in (("plain", 0.0), ("graded", 0.4)):
        folder = RunFolder.create(tmp_path / name).begin({})
        folders.append(folder.path)
        for step, success in ((0, 0.0), (25, 0.05)):
            value = success + graded * (1 + step / 25)
            figures = {"return_mean": value, "return_low": value - 0.1, "return_high": value + 0.1}
            interval = {"success_low": 0.0, "success_high": success + 0.05}
            line = {"step": step, "success": success, **interval, **figures}
            rung = {"reference": {"random": {"success": 0.0, "return_mean": 0.125}}} if step == 0 else {}
            folder.append_evaluation({**line, **rung})
        page = read(write_report(folder.path))
        titles = {chart["title"]: chart for chart in charts_of(folder.report.read_text())}
        assert ("Return on selection seeds" in titles) == bool(graded)
        rules = [label for chart in titles.values() for _, label in chart["rules"]]
        assert ("random 0.125" in rules) == bool(graded)
        assert ("Its intervals do not overlap: the policy has improved." in page.text) == bool(graded)
    told = "The return went from 0.4 (0.3 to 0.5) to 0.85 (0.75 to 0.95)."
    assert told in page.text and "The intervals overlap: the difference may be chance." in page.text
    (chart,) = compare_runs({"graded": folders[1:]}, (RETURN,))
    assert chart.lines[0].band[0][0] == 0 and chart.lines[0].band[-1][0] == 25
    assert (chart.title, chart.rules) == ("Return on selection seeds", [Rule(0.125, "random 0.125")])


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a").begin({"seed": 0})
    with pytest.raises(FileNotFoundError, match="nothing to report"):
        write_report(folder.path)
    folder.append_evaluation({"step": 0, "time": 0.0, "success": 0.1})
    assert "10 %" in read(write_report(folder.path)).text
    folder.metrics.write_text('{"step": 1, "time": 1.0, "metrics": {"collect/success": null}}\n{"step": 2, "ti')
    assert "a" in read(write_report(folder.path)).text


# --- comparing -------------------------------------------------------------------------------------------------------


def test_runs_and_seeds_in_one_picture(tmp_path: Path) -> None:
    kinds: dict[str, list[Path]] = {"StarPO-S": [], "vanilla": []}
    for label, folders in kinds.items():
        for seed in range(2):
            folders.append(
                write_run(tmp_path / f"{label}-{seed}", steps=50, seed=seed, collapse=label == "vanilla").path
            )
    charts = compare_runs(kinds)
    assert len(charts) == 6
    for chart in charts:
        assert [(line.label, len(line.faint)) for line in chart.lines] == [("StarPO-S", 2), ("vanilla", 2)]
    pytest.importorskip("matplotlib")
    draw_charts(tmp_path / "trap.svg", charts)
    assert len(re.findall('id="axes_[0-9]+"', (tmp_path / "trap.svg").read_text())) == len(charts)


def add_metrics(folder: RunFolder, more: Mapping[str, float]) -> None:
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    folder.metrics.write_text("".join(json.dumps({**x, "metrics": x["metrics"] | more}) + "\n" for x in lines))


def test_curves_over_what_was_collected(tmp_path: Path) -> None:
    for name, episodes in (("few", 64.0), ("many", 128.0)):
        folder = write_run(tmp_path / name, steps=50)
        add_metrics(folder, {"collect/episodes": episodes, "collect/turns_mean": 2.0, "collect/tokens_per_turn": 5.0})
    few, many = tmp_path / "few", tmp_path / "many"
    axes = ("environment steps", "sampled tokens")
    runs = {"few": [few], "both": [few, many]}
    for chart, axis_name, factor in zip(compare_runs(runs, [EVALUATION], axes), axes, (1, 5), strict=True):
        ends = {line.label: line.points[-1][0] for line in chart.lines}
        assert (chart.x_label, ends) == (axis_name, {"few": 50 * 64 * 2 * factor, "both": 50 * 96 * 2 * factor})


def test_runs_that_end_at_other_steps_have_a_mean_of_their_ends(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{steps}", steps=steps) for steps in (50, 60)]
    for folder, success in zip(runs, (0.2, 0.6), strict=True):
        add_metrics(folder, {"collect/episodes": 1.0, "collect/turns_mean": 1.0})
        last = {**folder.read_evaluations()[-1], "step": folder.read_metrics()[-1]["step"], "success": success}
        folder.append_evaluation(last)
    both = {"both": [folder.path for folder in runs]}
    ((line,),) = (chart.lines for chart in compare_runs(both, [EVALUATION], ("environment steps",)))
    assert (line.points[-1], line.band[-1]) == ((55, 0.4), (55, 0, 1))


def test_runs_that_fork_have_a_line_over_forks_and_others_none(tmp_path: Path) -> None:
    runs = {name: [write_run(tmp_path / name, steps=50).path] for name in ("plain", "searched")}
    add_metrics(RunFolder(runs["searched"][0]), {"search/forks": 3.0})
    ((line,),) = (chart.lines for chart in compare_runs(runs, [EVALUATION], (FORKS,)))
    assert (line.label, line.points[-1][0]) == ("searched", 150)
    imitated = RunFolder(tmp_path / "imitated")
    imitated.path.mkdir()
    imitated.append_evaluation({"step": 0, "time": 0.0, "success": 0.5, "success_low": 0.4, "success_high": 0.6})
    runs["imitated"] = [imitated.path]
    ((_, dot),) = (chart.lines for chart in compare_runs(runs, [EVALUATION], (FORKS,)))
    assert (dot.label, list(dot.points)) == ("imitated", [(0, 0.5)]), "a run without iterations is a dot"
    # A metric that no run has gets no chart either.
    assert compare_runs({"plain": runs["plain"]}, [EVALUATION, "no/such"], (FORKS,)) == []


def test_one_of_several_environments_has_a_chart_of_its_own(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=20)
    folder = RunFolder(tmp_path / "run")
    for line in folder.read_evaluations():
        own = {"success": 0.25, "success_low": 0.2, "success_high": 0.3, "reference": {"random": {"success": 0.125}}}
        folder.append_evaluation({**line, "environments": {"lake": own}})
    (chart,) = compare_runs({"both": [folder.path]}, ["evaluation/success/lake"])
    assert (chart.title, chart.rules) == ("Success on selection seeds: lake", [Rule(0.125, "random 12 %")])
    read(write_report(folder.path)).tells("Environments", "lake 25 % (20 to 30 %)")
