"""Pictures of kept episodes: their file, the order in which they are drawn, and the report that shows them."""

import base64
import re
from pathlib import Path

import pytest

from starpod.trainer.data.episode import Episode
from starpod.trainer.output import report
from starpod.trainer.output.pictures import in_order, read_pictures, write_pictures
from starpod.trainer.output.report import write_report
from starpod.trainer.output.run_folder import RunFolder
from tests.trainer.diagnostics.synthetic import episode, write_run

ONE, TWO = b"\x89PNG one", b"\x89PNG two"


def test_each_picture_is_kept_once_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "pictures.zip"
    drawn = {("eval-000000.jsonl", 0, 0): [ONE, TWO, ONE], ("final-000150.jsonl", 3, 0): [TWO]}
    write_pictures(path, drawn)
    assert read_pictures(path) == drawn
    assert path.read_bytes().count(ONE) == 1
    wanted = ("final-000150.jsonl", 3, 0)
    assert read_pictures(path, [wanted, ("eval-000000.jsonl", 7, 0)]) == {wanted: [TWO]}
    path.write_bytes(path.read_bytes()[:40])
    assert read_pictures(path) == {} == read_pictures(tmp_path / "none.zip")


def test_some_of_each_kind_come_first(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path).begin({})
    for step in (0, 25, 50):
        folder.episodes.write(step, [episode(number, solved=number > 5, group=number) for number in range(8)])
    folder.episodes.write(25, [episode(9, solved=True)], "final")
    first = [(shown[0], each.success) for shown, each in list(in_order(folder))[:5]]
    assert set(first) == {
        ("eval-000000.jsonl", True), ("eval-000000.jsonl", False), ("eval-000050.jsonl", True),
        ("eval-000050.jsonl", False), ("final-000025.jsonl", True),
    }  # fmt: skip
    assert len(list(in_order(folder))) == 17


def test_the_report_shows_all_kept_episodes_and_pictures_of_those_that_have_some(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=50)
    folder.episodes.write(50, [episode(3, solved=True), Episode(1, 0, "frozen_lake-v1", end="failed")], "final")
    write_pictures(folder.pictures, {("final-000050.jsonl", 0, 0): [ONE, TWO, ONE, TWO]})
    text = write_report(tmp_path).read_text(encoding="utf-8")
    shown = re.findall(r'<details class="episode" id="([^"]+)" data-when="([^"]+)" data-outcome="([^"]+)"', text)
    assert len(shown) == len({name for name, _, _ in shown}) == 8 + 8 + 2 + 8
    assert {when for _, when, _ in shown} == {"before training", "after training", "final evaluation", "step 25"}
    assert "the first, the last and the final evaluation, and of 1 between." in text
    assert {outcome for _, _, outcome in shown} == {"solved", "not solved", "failed"}
    assert text.count(base64.b64encode(ONE).decode()) == 1 and text.count("<use ") == 4
    assert re.findall(r"<figcaption>(.*?)</figcaption>", text) == [
        "1 · <b>Down</b>", "2 · <b>Down Right</b>", '3 · <b>Down</b> <span class="plus">+1</span>',
        "end · <b>solved</b>",
    ]  # fmt: skip
    # A link leads from each to the same start before training.
    assert text.count('href="#eval-000000-') == 8


def test_evaluations_in_between_are_shown_if_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path, steps=150)  # evaluated every 25
    size = folder.episodes.files()[1].stat().st_size
    monkeypatch.setattr(report, "BETWEEN", 2 * size + size // 2)
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert set(re.findall('data-when="(step [^"]+)"', text)) == {"step 50", "step 100"}
    assert "and of 2 between; 3 more evaluations would make the page too large, and are in episodes/." in text
    monkeypatch.setattr(report, "BETWEEN", 0)
    assert "the final evaluation; 5 more evaluations" in write_report(tmp_path).read_text(encoding="utf-8")


def test_the_header_says_what_ran_where_and_when(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=25)
    config = {"environments": {"lake": {"id": "frozen_lake-v1"}, "arms": {"id": "bandit-v1"}}}
    folder.begin({**config, "algorithm": {"preset": "starpo-s"}}, resume=True)
    text = re.sub("<[^>]+>", " ", write_report(tmp_path).read_text(encoding="utf-8"))
    header = " ".join(text.split())
    assert "Environment frozen_lake-v1, bandit-v1 Model SmolLM2, dequantised Algorithm starpo-s Date " in header
    assert re.search(r"Date \d\d \w+ 20\d\d, \d\d:\d\d Machine \d+ cores, ", header)
