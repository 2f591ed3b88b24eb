"""The index follows the files, whatever happens to them, and says in sentences what it cannot read."""

import itertools
import json
import os
import shutil
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.trainer.output.run_folder import RunFolder
from starpod.trainer.output.sinks import JsonlSink
from starpod.ui import reading
from starpod.ui.index import NAME, POINTS, SORTS, Filter, NotAnIndex, RunIndex
from starpod.ui.indexer import Indexer
from tests.trainer.diagnostics.synthetic import episode, metrics_at

SECONDS = itertools.count(10**9)
"""Times of files, in seconds."""


def index_over(folder: Path) -> tuple[RunIndex, Indexer]:
    index = RunIndex(folder)
    indexer = Indexer(index)
    indexer.update()
    return index, indexer


@pytest.fixture
def indexed(tmp_path: Path, calm: Path) -> tuple[Path, RunIndex, Indexer]:
    shutil.copytree(calm, tmp_path / "calm")
    index, indexer = index_over(tmp_path)
    assert indexer.problem == index.database.problem == ""
    return tmp_path, index, indexer


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, calm: Path) -> RunIndex:
    """The index of a finished run."""
    folder = tmp_path_factory.mktemp("index")
    shutil.copytree(calm, folder / "calm")
    return index_over(folder)[0]


def only(index: RunIndex) -> dict[str, Any]:
    (run,) = index.runs()
    return run


def append(folder: Path, text: str, name: str = "metrics.jsonl") -> None:
    with open(folder / "calm" / name, "a") as file:
        file.write(text)


def stamp(path: Path) -> None:
    """Let a change be seen, though the clock of the file system may not have ticked since the last one."""
    os.utime(path, ns=(next(SECONDS) * 10**9,) * 2)


def configure(folder: Path, text: str) -> None:
    (folder / "calm" / "config.yaml").write_text(text)
    stamp(folder / "calm" / "config.yaml")


def steps(index: RunIndex) -> list[int]:
    return [line["step"] for line in index.curve(only(index)["run"]).lines if line["metrics"]]


def test_a_run_is_summed_up(index: RunIndex) -> None:
    run = only(index)
    assert run["path"] == "calm" and run["title"] == "The run calm"
    assert (run["environment"], run["algorithm"]) == ("frozen_lake-v1", "starpo-s")
    assert (run["status"], run["step"], run["iterations"], run["final"]) == ("ended", 150, 150, True)
    assert run["evaluation"]["success"] == 0.65
    assert steps(index) == list(range(1, 151))


def test_what_was_spent_is_counted_and_no_rate_times_a_time(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    """Rates of an asynchronous run are of another span than the time that its step waited for episodes."""
    folder, index, indexer = indexed
    counted = {"collect/episodes": 16.0, "collect/turns_mean": 2.0, "collect/tokens_per_turn": 5.0}
    timed = {"time/collect": 1.0, "rate/environment_steps_per_s": 3.0, "rate/sampled_tokens_per_s": 3.0}
    with open(folder / "calm" / "metrics.jsonl", "w") as file:
        for step in range(1, 4):
            file.write(json.dumps({"step": step, "time": float(step), "metrics": counted | timed}) + "\n")
        file.write(json.dumps({"step": 4, "time": 4.0, "metrics": counted}) + "\n")  # taught from files
    indexer.update()
    curve = index.curve(only(index)["run"])
    assert list(curve.env_steps.values()) == [32.0, 64.0, 96.0, 96.0]
    assert list(curve.tokens.values()) == [160.0, 320.0, 480.0, 480.0]


def test_what_is_appended_is_read_from_there_on(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    folder, index, indexer = indexed
    sink = JsonlSink(folder / "calm" / "metrics.jsonl")
    sink.write(151, metrics_at(151), ["it echoes"])
    sink.close()
    before = indexer.changes_of("calm")
    indexer.update()
    assert steps(index)[-1] == 151 and only(index)["last_warning"] == [151, "it echoes"]
    assert indexer.changes_of("calm") > before
    told, another = indexer.changes, Indexer(index)
    for each in (indexer, another):  # what was read is not read again, by another site neither
        each.update()
    assert (indexer.changes, another.changes) == (told, 0)
    append(folder, "\n", "evaluations.jsonl")
    another.update()
    assert another.changes > 0


def test_a_run_elsewhere_that_is_quiet_for_long_is_interrupted(
    indexed: tuple[Path, RunIndex, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, index, indexer = indexed
    (folder / "calm" / "run.json").write_text("{}")
    configure(folder, "stop: {iterations: 200}")
    append(folder, json.dumps({"step": 151, "time": time.time(), "metrics": metrics_at(151)}) + "\n")
    indexer.update()
    assert only(index)["status"] == "running" and only(index)["left"] > 0
    configure(folder, "stop: {iterations: 151}")
    indexer.update()
    assert only(index)["status"] == "running" and only(index)["left"] is None  # it is evaluated now
    # Minutes count from the first iteration, and not from the start of the services and the warm start.
    configure(folder, "stop: {minutes: 1000}")
    indexer.update()
    assert only(index)["left"] == pytest.approx(60_000 - only(index)["seconds"])
    monkeypatch.setattr(reading, "QUIET_SECONDS", 0.0)
    indexer.update()
    assert only(index)["status"] == "interrupted" and only(index)["left"] is None


def test_a_run_that_was_stopped_is_not_shown_as_ended(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    folder, index, indexer = indexed
    RunFolder(folder / "calm").end("stopped by SIGINT and saved", seconds=9.0)
    indexer.update()
    assert only(index)["status"] == "stopped"


def test_the_last_evaluation_is_shown_next_to_the_final_figure_of_an_earlier_policy(
    indexed: tuple[Path, RunIndex, Indexer],
) -> None:
    folder, index, indexer = indexed
    assert only(index)["last"] is None
    append(folder, '{"step": 175, "success": 0.0}\n', "evaluations.jsonl")
    indexer.update()
    run = only(index)
    assert (run["evaluation"]["success"], run["last"]) == (0.65, {"step": 175, "success": 0.0, "return_mean": None})


def test_a_half_written_line_waits_and_a_damaged_one_is_reported(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    folder, index, indexer = indexed
    line = json.dumps({"step": 151, "time": 1.0, "metrics": {"collect/success": 0.5}})
    append(folder, "{damaged\n" + line[:20])
    indexer.update()
    assert steps(index)[-1] == 150
    assert only(index)["problems"] == ["metrics.jsonl, line 151, is damaged and skipped"]
    append(folder, line[20:] + "\n")
    indexer.update()
    assert steps(index)[-1] == 151


def test_a_resumed_run_that_cuts_its_metrics_is_read_again(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    folder, index, indexer = indexed
    JsonlSink(folder / "calm" / "metrics.jsonl", resumed_step=100).close()
    indexer.update()
    assert steps(index) == list(range(1, 101))


def test_a_deleted_run_and_deleted_episodes_are_gone(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    folder, index, indexer = indexed
    run = only(index)["run"]
    assert index.count(Filter(run, kind="train")) == 5
    (folder / "calm" / "episodes" / "train-000150.jsonl.gz").unlink()
    indexer.update()
    assert index.count(Filter(run, kind="train")) == 0 and index.count(Filter(run, kind="final")) == 20
    shutil.rmtree(folder / "calm")
    indexer.update()
    assert index.runs() == [] and index.count(Filter(run)) == 0


def test_a_damaged_file_of_episodes_is_reported_and_its_good_part_kept(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    folder, index, indexer = indexed
    episodes = folder / "calm" / "episodes"
    whole = (episodes / "train-000150.jsonl.gz").read_bytes()
    (episodes / "train-000151.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    lines = (episodes / "final-000150.jsonl").read_text().splitlines()
    (episodes / "other-000001.jsonl").write_text("\n".join([lines[0], '{"turns": 3}', "{", lines[1]]) + "\n")
    indexer.update()
    files = {file["name"]: file for file in index.files(only(index)["run"])}
    assert "cannot be read" in files["train-000151.jsonl.gz"]["problem"]
    assert files["other-000001.jsonl"]["episodes"] == 2 and "damaged" in files["other-000001.jsonl"]["problem"]


def test_a_growing_file_of_episodes_is_read_from_where_it_ended(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    """Each line is indexed once, because the words of a removed episode stay in the index."""
    folder, index, indexer = indexed
    run, name = only(index)["run"], "m-1.jsonl"

    def grow(seed: int, *, solved: bool, mode: str = "a") -> list[dict[str, Any]]:
        with open(folder / "calm" / "episodes" / name, mode) as file:
            file.write(json.dumps(episode(seed, solved=solved, group=seed).to_json()) + "\n")
        stamp(folder / "calm" / "episodes")  # only an evaluation's files are looked at in each pass
        indexer.update()
        return index.episodes(Filter(run, kind="m", sort="oldest"))

    def words() -> int:
        with index.database.reading() as database:
            return int(database.execute("SELECT count(*) FROM words_docsize").fetchone()[0])

    before = words()
    first, second = grow(1, solved=False)[0], grow(2, solved=True)[1]
    rows = grow(1, solved=True)  # it was played again
    assert [(row["grp"], row["outcome"]) for row in rows] == [(1, "solved"), (2, "solved")]
    assert rows[1] == second and rows[0]["id"] != first["id"]
    assert words() == before + 3 and index.count(Filter(run, kind="m", text="goal")) == 2
    rows = grow(3, solved=False, mode="w")
    assert [row["grp"] for row in rows] == [3] and index.count(Filter(run, kind="m")) == 1


def test_a_run_that_holds_something_else_stops_no_other(indexed: tuple[Path, RunIndex, Indexer], calm: Path) -> None:
    folder, index, indexer = indexed
    (folder / "calm" / "metrics.jsonl").write_text('{"step": 1, "metrics": {}, "warnings": 3}\n')
    (folder / "calm" / "run.json").write_text('{"time": "today"}')
    (folder / "calm" / "final.json").write_text('{"success": "most"}')
    shutil.copytree(calm, folder / "later")
    indexer.update()
    assert {run["path"] for run in index.runs()} == {"calm", "later"}
    assert "The files of calm are not those of a run" in indexer.problem
    (folder / "calm" / "metrics.jsonl").unlink()
    indexer.update()
    (odd,) = [run for run in index.runs() if run["path"] == "calm"]
    assert indexer.problem == "" and odd["problems"] and not odd["final"] and odd["started"] == odd["written"]


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({}, 5),
        ({"outcome": "solved"}, 3),
        ({"outcome": "unknown"}, 1),
        ({"malformed": True}, 1),
        ({"truncated": True}, 1),
        ({"text": "XYLO*"}, 1),
        ({"text": "XYLOPHONE"}, 1),
        ({"text": "XYLO"}, 0),
        ({"text": "goal right"}, 4),
        ({"text": "goal xylophone"}, 0),
        ({"seed": "8"}, 2),
        ({"step": 150}, 5),
        ({"step": 149}, 0),
        ({"environment": "sokoban-v1"}, 0),
        ({"text": 'a" OR "b* NEAR('}, 0),
    ],
)
def test_filters(index: RunIndex, wanted: dict[str, Any], count: int) -> None:
    asked = Filter(only(index)["run"], kind="train", **wanted)
    assert index.count(asked) == len(index.episodes(asked)) == count
    assert index.search(asked) == (index.episodes(asked), count) or not asked.text
    assert index.search(asked, first=50) == ([], count)


def test_words_are_looked_for_in_one_run(
    indexed: tuple[Path, RunIndex, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many episodes of other runs hold them, and however often."""
    folder, index, indexer = indexed
    shutil.copytree(folder / "calm", folder / "second")
    monkeypatch.setattr("starpod.ui.index.SEARCHED", 4)
    indexer.update()
    for run in index.runs():
        assert index.count(Filter(run["run"], text="goal")) == 4


def test_the_newest_with_a_common_word_are_found(
    indexed: tuple[Path, RunIndex, Indexer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was read last: an older step whose file is read again comes after a newer one."""
    folder, index, indexer = indexed
    run = RunFolder(folder / "calm")
    for step in (152, 151):
        run.episodes.write_rollouts(step, [episode(step, solved=True, group=step)], max_bytes=2**20)
        indexer.update()
    monkeypatch.setattr("starpod.ui.index.SEARCHED", 1)
    asked = Filter(only(index)["run"], text="goal")
    assert [row["step"] for row in index.episodes(asked)] == [152] and index.count(asked) == 1


def test_episodes_by_what_a_part_of_the_reward_was(index: RunIndex) -> None:
    run = only(index)["run"]
    bits = dict(index.facets(run)["parts"])
    assert set(bits) == {"environment", "format"}
    solved, fined = Filter(run, kind="final", paid=1 << bits["environment"]), Filter(run, fined=1 << bits["format"])
    assert {row["outcome"] for row in index.episodes(solved)} == {"solved"} and index.count(solved) == 13
    assert index.count(fined) > 0 and {row["outcome"] for row in index.episodes(fined)} == {"unsolved"}
    assert index.count(Filter(run, paid=1 << bits["format"])) == 0


def test_orders(index: RunIndex) -> None:
    run = only(index)["run"]
    rewards = [row["reward"] for row in index.episodes(Filter(run, sort="best"), limit=200)]
    assert rewards == sorted(rewards, reverse=True)
    assert [row["reward"] for row in index.episodes(Filter(run, sort="worst"), limit=200)] == sorted(rewards)


@pytest.mark.parametrize("sort", SORTS)
def test_later_pages_are_found_from_the_end(index: RunIndex, sort: str) -> None:
    wanted = Filter(only(index)["run"], kind="final", sort=sort)
    every, count = index.episodes(wanted, limit=200), index.count(wanted)
    pages = [index.episodes(wanted, first=first, limit=7, count=count) for first in range(0, count + 7, 7)]
    assert count == 20 and [row for page in pages for row in page] == every


def test_a_long_run_keeps_few_points_that_are_means(tmp_path: Path) -> None:
    """However the file grew, the curves hold each iteration once."""
    run = tmp_path / "long"
    run.mkdir()
    index = RunIndex(tmp_path)
    indexer = Indexer(index)
    count = 5 * POINTS
    for first in range(0, count, count // 2):
        with open(run / "metrics.jsonl", "a") as file:
            for step in range(first, first + count // 2):
                metrics = {"collect/success": step / count, "time/step": 2.0}
                metrics |= {"information/first_turn/bound": float(step)} if step % 100 == 0 else {}
                file.write(json.dumps({"step": step, "time": float(step), "metrics": metrics}) + "\n")
        indexer.update()
    curve = index.curve(only(index)["run"])
    assert POINTS // 2 <= len(curve.lines) <= POINTS
    successes = [line["metrics"]["collect/success"] for line in curve.lines]
    assert successes == sorted(successes)
    assert sum(successes) / len(successes) == pytest.approx((count - 1) / 2 / count, rel=1e-3)
    rare = [line["metrics"]["information/first_turn/bound"] for line in curve.lines if len(line["metrics"]) == 3]
    assert rare == [float(step) for step in range(0, count, 100)]
    assert curve.seconds[count - 1] == 2.0 * count


def test_a_full_disk_is_a_sentence_and_mends_itself(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    folder, index, indexer = indexed

    pages = sqlite3.connect(folder / NAME).execute("PRAGMA page_count").fetchone()[0]
    connect = index.database.connect

    def full() -> sqlite3.Connection:
        database = connect()
        database.execute(f"PRAGMA max_page_count = {pages}")  # the next page that is needed is SQLITE_FULL
        return database

    shutil.copytree(folder / "calm", folder / "second")
    index.database.connect = full  # type: ignore[method-assign]
    indexer.update()
    assert "disk is full" in indexer.problem and "make room" in indexer.problem
    assert index.run("calm") is not None
    index.database.connect = connect  # type: ignore[method-assign]
    indexer.update()
    assert indexer.problem == "" and {run["path"] for run in index.runs()} == {"calm", "second"}


def test_a_damaged_index_is_rebuilt(indexed: tuple[Path, RunIndex, Indexer]) -> None:
    folder, _, _ = indexed
    for suffix in ("-wal", "-shm"):
        Path(f"{folder / NAME}{suffix}").unlink(missing_ok=True)
    (folder / NAME).write_bytes(b"no database" * 1000)
    index, _ = index_over(folder)
    assert index.database.problem == "" and only(index)["step"] == 150


def test_a_file_that_is_no_index_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine" * 100)
    with closing(sqlite3.connect(tmp_path / "mine.sqlite")) as database:
        database.execute("CREATE TABLE runs (id)")
    with closing(sqlite3.connect(tmp_path / "old.sqlite")) as database:  # an index of an earlier version
        database.executescript("CREATE TABLE runs (id); CREATE TABLE points (id); CREATE TABLE episodes (id);")
    for name in ("notes.txt", "mine.sqlite"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(NotAnIndex, match=name):
            RunIndex(tmp_path, str(tmp_path / name))
        assert (tmp_path / name).read_bytes() == before
    for _ in range(2):
        index = RunIndex(tmp_path, str(tmp_path / "old.sqlite"))
        assert index.database.problem == "" and index.runs() == []


def test_a_folder_that_cannot_be_written_is_indexed_in_memory(tmp_path: Path, calm: Path) -> None:
    shutil.copytree(calm, tmp_path / "calm")
    (tmp_path / NAME).mkdir()  # no file can be opened there, whoever asks
    index, _ = index_over(tmp_path)
    assert "cannot be written" in index.database.problem and only(index)["path"] == "calm"
    index.database.close()


@settings(max_examples=8)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_curves_do_not_depend_on_how_a_file_grew(sizes: list[int]) -> None:
    """Read in any pieces, a file gives the same points."""
    data = b"".join(
        json.dumps({"step": step, "time": 0.0, "metrics": {"m": step}}).encode() + b"\n" for step in range(40)
    )
    found = []
    for cuts in ([], sizes):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run" / "metrics.jsonl"
            path.parent.mkdir()
            index = RunIndex(Path(folder))
            indexer = Indexer(index)
            place = 0
            for cut in [*cuts, len(data)]:
                with open(path, "ab") as file:
                    file.write(data[place : place + cut])
                place += cut
                indexer.update()
            found.append(index.curve(only(index)["run"]))
    assert found[0] == found[1]


def test_an_index_in_memory_is_read_while_it_is_written(tmp_path: Path, calm: Path) -> None:
    shutil.copytree(calm, tmp_path / "calm")
    index = RunIndex(tmp_path, ":memory:")
    with closing(index.database.connect()) as writer:
        for number in range(30):
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("INSERT INTO runs (path, summary, state) VALUES (?, '{}', '{}')", (f"run-{number}",))
            index.runs()
            assert index.files(1) == []
            writer.execute("COMMIT")
    assert len(index.runs()) == 30
    index.database.close()
