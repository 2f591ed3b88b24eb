"""The generated tasks for a shell: the reference solution solves each, and nothing else does."""

import fnmatch
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from starpod.trainer.configuration.loading import load_config
from tests.support import ROOT

GENERATOR = [sys.executable, str(ROOT / "examples/machine_tasks.py")]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    subprocess.run([*GENERATOR, str(folder), "--seed", "3"], check=True)
    return folder


def passes(task: Path, folder: Path, command: str) -> bool:
    """Whether the task's verifier accepts its files after a command, without a container."""
    files = task / "environment/files"
    shutil.copytree(files, folder) if files.exists() else folder.mkdir()
    prepare = (task / "environment/Dockerfile").read_text().rpartition("RUN ")[2]
    for part in (prepare, command):
        subprocess.run(
            ["bash", "-ec", part], cwd=folder, check=True, capture_output=True, env={"PATH": "/usr/bin:/bin"}
        )
    check = [sys.executable, str(task / "tests/check.py")]
    return subprocess.run(check, cwd=folder, capture_output=True).returncode == 0


@pytest.mark.parametrize("kind", ["find", "edit", "fix", "count", "permissions", "git", "archive", "script"])
def test_the_solution_alone_passes(tasks: Path, tmp_path: Path, kind: str) -> None:
    names = [f"{kind}-{level}" for level in range(1, 6)]
    solutions = {name: (tasks / name / "solution/solve.sh").read_text() for name in names}
    verdicts = {
        name: [
            passes(tasks / name, tmp_path / f"{name}-{tried}", command) for tried, command in enumerate((":", solution))
        ]
        for name, solution in solutions.items()
    }
    assert verdicts == {name: [False, True] for name in names}, json.dumps(verdicts, indent=1)


def test_equal_seeds_make_equal_tasks(tasks: Path, tmp_path: Path) -> None:
    for seed in ("3", "4"):
        subprocess.run([*GENERATOR, str(tmp_path / seed), "--seed", seed], check=True)
    contents = [
        {file.relative_to(folder): file.read_text() for file in folder.rglob("*") if file.is_file()}
        for folder in (tasks, tmp_path / "3", tmp_path / "4")
    ]
    assert contents[0] == contents[1] != contents[2]
    assert len({name.parts[0] for name in contents[0]}) == 40


def test_the_job_trains_and_evaluates_on_different_tasks(tmp_path: Path) -> None:
    subprocess.run([*GENERATOR, str(tmp_path / "machine_tasks"), "--copies", "20", "--levels", "1"], check=True)
    names = [folder.name for folder in (tmp_path / "machine_tasks").iterdir()]
    config = load_config(str(ROOT / "examples/machine_tasks.yaml"))
    trained, evaluated = (
        set(fnmatch.filter(names, str(options["task"])))
        for options in (config.environment.options, config.evaluation.options)
    )
    assert len(trained) == len(evaluated) == 80
    assert not trained & evaluated
