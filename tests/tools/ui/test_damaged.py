"""One bad file, whoever wrote it, costs its run at most: others are indexed, pages answer, memory stays bounded."""

import gzip
import json
import math
import os
import random
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from starpod.trainer.checkpoints.folders import folder_name
from starpod.trainer.evaluation.compare import NotComparable, read_evaluation
from starpod.ui import indexer as indexer_module
from starpod.ui.app import create_app
from starpod.ui.index import RunIndex
from starpod.ui.indexer import Indexer
from starpod.ui.reading import DAMAGED, checkpoints

DEEP = "[" * 100_000
MANY_DIGITS = "9" * 400
BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 64))
MANY_METRICS = {f"m/{number}": 1.0 for number in range(100_000)}
EPISODE = {"group": 1, "member": 0, "environment": "e-v1", "turns": [{"text": "hi", "observation": "x", "reward": 1.0}]}


def text(name: str, content: str) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(content.encode("utf-8", "surrogatepass"))

    return write


def an_episode(**changes: object) -> Callable[[Path], None]:
    line = json.dumps({**EPISODE, **changes}).replace('"HUGE"', MANY_DIGITS).replace('"DEEP"', DEEP)
    return text("episodes/train-1.jsonl", line + "\n")


def fifo(name: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return make


def link(name: str, target: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)

    return make


def compressed(name: str, head: bytes, size: int, filling: bytes = b" ") -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        with gzip.open(run / name, "wb", compresslevel=1) as file:
            file.write(head)
            for _ in range(size // 2**20):
                file.write(filling * 2**20)

    return make


def sparse(name: str, size: int) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).parent.mkdir(exist_ok=True)
        with open(run / name, "wb") as file:
            file.truncate(size)

    return make


FILES = ("config.yaml", "run.json", "metrics.jsonl", "evaluations.jsonl", "final.json", "notes.json")
KINDS: dict[str, Callable[[Path], object]] = {
    **{f"deep {name}": text(name, DEEP + "\n") for name in FILES},
    **{f"fifo {name}": fifo(name) for name in (*FILES, "episodes/train-1.jsonl")},
    **{f"silent fifo {name}": fifo(name) for name in ("checkpoints/best", "checkpoints/latest")},
    "silent fifo .lock": lambda run: (fifo(".lock")(run), (run / "run.json").unlink()),  # of a run that has not ended
    **{f"link {name}": link(name, "/etc/passwd") for name in (*FILES, "episodes/train-1.jsonl")},
    **{f"endless {name}": link(name, "/dev/zero") for name in FILES},
    **{f"large {name}": sparse(name, 2**31) for name in (*FILES, "episodes/train-1.jsonl")},
    "aliases": text("config.yaml", BOMB),
    "metrics with many digits": text(
        "metrics.jsonl", f'{{"step": 1, "time": 1.0, "metrics": {{"a": {MANY_DIGITS}}}}}\n'
    ),
    "step with many digits": text("metrics.jsonl", f'{{"step": {MANY_DIGITS}, "time": 1.0, "metrics": {{}}}}\n'),
    "time with many digits": text("run.json", f'{{"time": {MANY_DIGITS}}}'),
    "no numbers": text("run.json", '{"time": "noon", "title": ["a"], "ended": 3}'),
    "limits that are none": text("config.yaml", f"stop: {{iterations: {MANY_DIGITS}, minutes: [1]}}\n"),
    "half a pair": an_episode(
        environment="e\ud800", turns=[{"text": "\udc00", "observation": "", "parts": {"\udc01": 1}}]
    ),
    "half a pair, raw": text("episodes/train-1.jsonl", json.dumps(EPISODE).replace("hi", "\udc00") + "\n"),
    "group with many digits": an_episode(group="HUGE"),
    "infinite group": an_episode(group=float("inf")),
    "infinite reward": an_episode(turns=[{"reward": float("inf")}]),
    "reward with many digits": an_episode(turns=[{"reward": "HUGE"}]),
    "deep episode": an_episode(info="DEEP"),
    "turns that are none": an_episode(turns=[3]),
    "a bomb of one line": compressed("episodes/train-1.jsonl.gz", b"", 2**27),
    "a bomb of many lines": compressed("episodes/train-1.jsonl.gz", b"", 2**27, b"\n"),
    "many metrics": text("metrics.jsonl", json.dumps({"step": 1, "time": 1.0, "metrics": MANY_METRICS}) + "\n"),
    "seeds as a list": an_episode(seed=[1]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_run_is_indexed_and_the_memory_bounded(tmp_path: Path, calm: Path, kind: str) -> None:
    for name in ("good", "bad"):
        shutil.copytree(calm, tmp_path / name)
    KINDS[kind](tmp_path / "bad")
    index = RunIndex(tmp_path)
    indexer = Indexer(index)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        indexer.update()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 2**10  # KiB
    runs = {run["path"]: run for run in index.runs()}
    assert runs["good"]["step"] == 150 and not runs["good"]["problems"]
    assert sum(file["episodes"] for file in index.files(runs["good"]["run"])) > 0
    assert "root:" not in json.dumps(runs)
    checkpoints(tmp_path / "bad")  # as the page of the run does
    with suppress(NotComparable, OSError, *DAMAGED):  # as the page of a comparison does
        read_evaluation(tmp_path / "bad")
    told = [indexer.problem, *runs.get("bad", {}).get("problems", ())]
    told += [file["problem"] for file in index.files(runs["bad"]["run"])] if "bad" in runs else []
    silent = (
        "silent",
        "half a pair",
        "metrics with",
        "time with",
        "no numbers",
        "limits that",
        "link episodes",
        "fifo episodes",
        "seeds",
    )
    assert any(told) or kind.startswith(silent)


def test_checkpoints_that_were_saved_again_are_listed_with_their_marks(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    names = [folder_name(5), folder_name(25), folder_name(25, 2), folder_name(25, 10)]
    for name in (*names, ".temporary-step-00000030", "step-x"):
        (folder / name).mkdir(parents=True)
    (folder / "latest").write_text(f"{names[3]}\n")
    (folder / "best").write_text(f"{names[2]}\n")
    listed = [(each["name"], each["step"], each["marks"]) for each in checkpoints(tmp_path)]
    assert listed == [(names[3], 25, ["latest"]), (names[2], 25, ["best"]), (names[1], 25, []), (names[0], 5, [])]


EXTREME = st.sampled_from([math.inf, -math.inf, math.nan, 10**400, -(2**63), "\ud800", "", None, True, [], {}])
VALUE = st.recursive(
    EXTREME | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.sampled_from([*FILES, "episodes/train-1.jsonl"]), st.integers(0, 2**32), VALUE, st.binary(max_size=20))
def test_random_files_cost_no_other_run(
    tmp_path_factory: pytest.TempPathFactory, calm: Path, name: str, number: int, value: Any, noise: bytes
) -> None:
    """A value of a good file is another one, or some of its bytes are noise."""
    folder, luck = tmp_path_factory.mktemp("runs"), random.Random(number)
    for run in ("good", "bad"):
        shutil.copytree(calm, folder / run)
    path = folder / "bad" / name
    if name.startswith("episodes"):
        path.write_text(json.dumps(EPISODE) + "\n")
    data = path.read_bytes()
    places = [match.span() for match in re.finditer(rb'(?<=: )("[^"]*"|[-\d.]+|\[[^\[\]]*\])', data)]
    if places and luck.random() < 0.7:
        start, end = luck.choice(places)
        changed = json.dumps(value).encode()
    else:
        start = end = luck.randrange(len(data) + 1)
        changed = noise
    path.write_bytes(data[:start] + changed + data[end:])
    index = RunIndex(folder)
    indexer = Indexer(index)
    indexer.update()
    runs = {run["path"]: run for run in index.runs()}
    assert runs["good"]["step"] == 150 and not runs["good"]["problems"]
    assert sum(file["episodes"] for file in index.files(runs["good"]["run"])) > 0
    shutil.rmtree(folder)


OTHERS: list[Any] = ["word", 3, [1], {"a": [1]}, None]


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "final.json", "evaluations.jsonl"])
def test_pages_of_a_run_answer_whatever_the_types_of_its_values(tmp_path: Path, calm: Path, name: str) -> None:
    """Each value of a file in turn is of another type, or missing."""
    shutil.copytree(calm, tmp_path / "bad")
    index, path = RunIndex(tmp_path, ":memory:"), tmp_path / "bad" / name
    client, indexer = TestClient(create_app(index), base_url="http://127.0.0.1"), Indexer(index)
    values = yaml.safe_load(path.read_text().splitlines()[0] if name.endswith("jsonl") else path.read_text())
    for number, key in enumerate(values):
        other = OTHERS[number % len(OTHERS)]
        changed = {**values, key: other} if number % 6 else {each: values[each] for each in values if each != key}
        path.write_text(json.dumps(changed) + "\n")
        indexer.update()
        for page in ("/", "/runs/bad"):
            assert client.get(page).status_code == 200
    index.database.close()


def test_a_page_never_sees_a_run_without_its_summary(
    tmp_path: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages read an index in memory while the indexer writes it."""
    shutil.copytree(calm, tmp_path / "new")
    index, summarise = RunIndex(tmp_path, ":memory:"), indexer_module.summarise
    seen: list[Any] = []

    def look_and_summarise(*given: Any) -> dict[str, Any]:
        seen.extend(index.runs())
        return summarise(*given)

    monkeypatch.setattr(indexer_module, "summarise", look_and_summarise)
    Indexer(index).update()
    assert not seen and index.runs()[0]["status"]
    index.database.close()


def test_an_episode_of_other_types_is_a_sentence(tmp_path: Path, calm: Path) -> None:
    shutil.copytree(calm, tmp_path / "bad")
    an_episode(environment={"a": 1}, turns=[{"text": "hi", "observation": "x", "fresh": [1]}])(tmp_path / "bad")
    index = RunIndex(tmp_path, ":memory:")
    Indexer(index).update()
    client = TestClient(create_app(index), base_url="http://127.0.0.1")
    for page in ("/episode", "/group"):
        answer = client.get(page, params={"run": "bad", "file": "train-1.jsonl", "group": 1, "member": 0})
        assert answer.status_code < 500 and "damaged" in answer.text
    index.database.close()
