"""The folder of one run."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import read_groups
from starpod.trainer.data.updates import TokenRecord, Verdict
from starpod.trainer.output import run_folder
from starpod.trainer.output.files import CannotWrite
from starpod.trainer.output.run_folder import RunExists, RunFolder, differences, git_state
from tests.trainer.diagnostics.synthetic import episode

CONFIG = {"seed": 1, "model": {"name": "tiny", "layers": 2}}
DEFAULTS = {"seed": 0, "model": {"name": "tiny", "layers": 4}}


def test_it_holds_what_was_asked_for_and_with_what_code(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "run").begin(CONFIG, defaults=DEFAULTS, title="a lake")
    assert yaml.safe_load(folder.config.read_text()) == CONFIG == folder.read_config()
    facts = folder.read_facts()
    assert facts["title"] == "a lake" and facts["differs_from_defaults"] == {"seed": [1, 0], "model.layers": [2, 4]}
    assert "torch" in facts["packages"] and facts["platform"]["cores"] >= 1
    assert folder.checkpoints.is_dir() and folder.episodes.path.is_dir()


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    folder = RunFolder.create(tmp_path, resume=True).begin(CONFIG)
    failed = folder.read_facts()
    assert "resumed" not in failed and (tmp_path / "notes.txt").exists()
    # Nothing was measured yet: a start that failed is no run, and another one has its own id and title.
    again = RunFolder.create(tmp_path).begin(CONFIG, title="a lake").read_facts()
    assert again["title"] == "a lake" and again["id"] != failed["id"] and "resumed" not in again
    folder.metrics.write_text("")
    before = folder.facts.read_text()
    with pytest.raises(RunExists, match=r"holds a run already.*--resume.*--run-dir"):
        RunFolder.create(tmp_path).begin({"seed": 2})
    assert folder.facts.read_text() == before and folder.read_config() == CONFIG
    with pytest.raises(CannotWrite, match="cannot write"):
        RunFolder.create(tmp_path / "notes.txt" / "run").begin(CONFIG)


@pytest.mark.parametrize("resume", [False, True])
def test_a_configuration_of_the_user_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 3 # mine")
    with pytest.raises(RunExists, match=r"config\.yaml is not of a run.*--run-dir"):
        RunFolder.create(tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    # A run that is killed between its two files is told from that.
    run = RunFolder.create(tmp_path / "run")
    monkeypatch.setattr(run_folder, "dump_yaml", lambda values: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception, match="killed"):
        run.begin(CONFIG)
    monkeypatch.undo()
    assert RunFolder.create(run.path, resume=resume).begin(CONFIG, resume=resume).read_config() == CONFIG


def test_resuming_keeps_the_id_and_notes_what_changed(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path).begin(CONFIG, title="a lake")
    first.end("killed", seconds=3.0)
    second = RunFolder.create(tmp_path, resume=True).begin({**CONFIG, "seed": 5}, resume=True)
    facts = second.read_facts()
    assert second.id == first.id and facts["title"] == "a lake" and "ended" not in facts
    assert [start["changed"] for start in facts["resumed"]] == [{"seed": [5, 1]}]
    assert second.read_config()["seed"] == 5


def names_of(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.episodes.path.iterdir())


def test_what_came_after_a_step_is_cut_and_an_evaluation_that_is_done_again_appears_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path).begin(CONFIG)
    played = [episode(seed, solved=seed == 1) for seed in range(3)]
    for step, success in ((0, 0.1), (50, 0.2), (100, 0.3), (50, 0.25), (100, 0.3)):
        folder.append_evaluation({"step": step, "success": success})
        path = folder.episodes.write(step, played)
    assert [Episode.from_json(json.loads(line)) for line in path.read_text().splitlines()] == played
    folder.write_final({"step": 50})
    folder.episodes.write(50, [], "final")
    with folder.evaluations.open("a") as file:
        file.write('{"step": 15')
    folder.cut_after(50)
    assert folder.read_evaluations() == [{"step": 0, "success": 0.1}, {"step": 50, "success": 0.25}]
    # The run continues, so it has no final evaluation.
    assert folder.read_final() is None
    assert names_of(folder) == ["eval-000000.jsonl", "eval-000050.jsonl"]


def test_differences_in_both_directions() -> None:
    found = differences({"a": 1, "b": {"c": 2}}, {"b": {"c": 3, "d": 4}})
    assert found == {"a": [1, None], "b.c": [2, 3], "b.d": [None, 4]}
    assert differences(CONFIG, CONFIG) == {}


def test_the_commit_and_whether_it_is_what_ran(tmp_path: Path) -> None:
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "code.py").write_text("1")
    assert git_state(tmp_path) is None  # a package inside somebody else's repository
    subprocess.run([*git, "add", "code.py"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    state = git_state(tmp_path)
    assert state is not None and len(state["commit"]) == 40 and not state["dirty"]
    (tmp_path / "code.py").write_text("2")
    assert (git_state(tmp_path) or {})["dirty"]


def test_the_oldest_rollouts_make_room_with_what_updates_made_of_them(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path).begin(CONFIG)
    played = [episode(seed, solved=True) for seed in range(4)]
    verdicts = {0: Verdict(True, "first")}
    tokens = TokenRecord(np.zeros(3, np.float16), np.ones(3, np.float16), np.ones(3, np.uint8))

    def write(step: int, max_bytes: int) -> bool:
        written = folder.episodes.write_rollouts(step, played, max_bytes=max_bytes)
        folder.episodes.write_update(step, verdicts, [(each, tokens) for each in played], max_bytes=max_bytes)
        return written

    def names(*steps: int) -> list[str]:
        return [f"train-{step:06d}.{kind}.gz" for step in steps for kind in ("jsonl", "update")]

    assert write(1, 10**6) and names_of(folder) == names(1)
    size = sum((folder.episodes.path / name).stat().st_size for name in names(1))
    assert all(write(step, 3 * size + size // 2) for step in range(2, 7))
    assert names_of(folder) == names(4, 5, 6)
    # They are read as any others are: here to train on.
    assert [group.id for group in read_groups(tmp_path)] == [0, 1, 2]
    folder.cut_after(5)
    assert names_of(folder) == names(4, 5)
    # If the rollouts alone are too large, their update is not written, either.
    assert not write(5, size // 8)
    assert names_of(folder) == []
