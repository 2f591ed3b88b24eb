"""Task folders in Harbor's format, read without an engine."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from starpod.env_server.hosting.harbor_task import TaskError, TaskFolder
from starpod.env_server.hosting.request import HostingError
from tests.env_server.machines.tasks import write_task
from tests.support import run_starpod

TESTS = "echo 1 > /logs/verifier/reward.txt"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("[[steps]]\nname = 'one'\n", "needs several steps"),
        ("[environment]\nos = 'windows'\n", "needs Windows"),
        ("[environment]\ngpus = 1\n", "needs GPUs"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['a.example']\n", "needs a list of allowed hosts"),
        ("[verifier]\nnetwork_mode = 'public'\n", "needs a network for one phase only"),
        ("[verifier.environment]\ngpus = 1\n", "needs GPUs"),
        ("[[verifier.collect]]\ncommand = 'true'\n", "needs commands that collect artifacts"),
        ("artifacts = ['out']\n", "out is no absolute path"),
        ("artifacts = ['/app/../tests']\n", "/app/../tests is no absolute path"),
        ("[[artifacts]]\nsource = '/out'\nexclude = ['*.o']\n", "/out: exclude and service are not supported"),
        ("[environment]\nmemory_mb = 'much'\n", r"environment\.memory_mb: "),
        ("[environment]\nmemory = 'much'\n", "memory is 'much'; write it as 2G or 512M"),
        ("[environment\n", "Expected ']'"),
    ],
)
def test_tasks_that_cannot_be_served_are_refused(tmp_path: Path, settings: str, problem: str) -> None:
    write_task(tmp_path, tests=TESTS, settings=settings)
    with pytest.raises(TaskError, match=problem):
        TaskFolder.read(tmp_path)


@pytest.mark.parametrize("file", ["instruction.md", "environment/Dockerfile", "tests/test.sh"])
def test_missing_files_are_named(tmp_path: Path, file: str) -> None:
    (write_task(tmp_path, tests=TESTS) / file).unlink()
    with pytest.raises(TaskError, match=re.escape(file)):
        TaskFolder.read(tmp_path)


def test_old_names_of_settings_are_read(tmp_path: Path) -> None:
    settings = "[environment]\nmemory = '2G'\nstorage = '512M'\nallow_internet = true\n"
    task = TaskFolder.read(write_task(tmp_path, tests=TESTS, settings=settings))
    environment = task.configuration.environment
    assert (environment.memory_mb, environment.storage_mb, task.configuration.network_mode) == (2048, 512, "public")


def test_a_task_asks_for_a_network_or_has_none(tmp_path: Path) -> None:
    assert TaskFolder.read(write_task(tmp_path, tests=TESTS)).configuration.network_mode == "no-network"


def test_every_file_counts_for_the_version(tmp_path: Path) -> None:
    first = TaskFolder.read(write_task(tmp_path / "a", tests=TESTS))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert TaskFolder.read(tmp_path / "b").version == first.version
    (tmp_path / "b" / "tests" / "data").write_text("x")
    second = TaskFolder.read(tmp_path / "b")
    assert (second.version != first.version, second.image == first.image) == (True, True)


def test_variables_come_from_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = "[verifier.env]\nKEY = '${STARPOD_TEST_KEY}'\nURL = 'http://${STARPOD_TEST_HOST:-local}/'\n"
    task = TaskFolder.read(write_task(tmp_path, tests=TESTS, settings=settings))
    with pytest.raises(TaskError, match="needs the variable STARPOD_TEST_KEY: set it for the server"):
        task.variables("verifier")
    monkeypatch.setenv("STARPOD_TEST_KEY", "k")
    assert task.variables("verifier") == {"KEY": "k", "URL": "http://local/"}


@pytest.mark.parametrize(
    ("solution", "command"),
    [
        ("echo 'a' > b\n# why\ncd /", "echo 'a' > b\n# why\ncd /"),
        ("set -e\ntrue", "(\nset -e\ntrue\n)"),
        ("true || exit 1", "(\ntrue || exit 1\n)"),
    ],
)
def test_a_solution_is_the_command_that_an_agent_would_write(tmp_path: Path, solution: str, command: str) -> None:
    assert TaskFolder.read(write_task(tmp_path, tests=TESTS, solution=solution)).solution() == command


def test_a_solution_may_have_binary_files(tmp_path: Path) -> None:
    task = write_task(tmp_path, tests=TESTS, solution="cp /solution/data.bin .", more="text")
    (task / "solution" / "data.bin").write_bytes(b"\xff\x00")
    (task / "solution" / "text.bin").write_bytes(b"a\x00")
    command = TaskFolder.read(task).solution()
    assert command is not None
    assert "printf %s /wA= | base64 -d > /solution/data.bin" in command and "printf %s text >" in command
    assert "\0" not in command and "printf %s YQA= | base64 -d > /solution/text.bin" in command


def test_a_task_without_solution_has_none(tmp_path: Path) -> None:
    assert TaskFolder.read(write_task(tmp_path, tests=TESTS)).solution() is None


def test_without_an_engine_the_server_says_what_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harbor = pytest.importorskip("starpod.env_server.hosting.harbor", exc_type=ImportError)
    engine = pytest.importorskip("starpod.env_server.machines.docker_engine", exc_type=ImportError)
    # Without what other tests of this process have connected to.
    monkeypatch.setattr(harbor, "machine_pool", harbor.machine_pool.__wrapped__)
    monkeypatch.setattr(engine, "connect", engine.connect.__wrapped__)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    folder = write_task(tmp_path / "easy", tests=TESTS)
    problem = run_starpod("serve", f"harbor:{folder}", "--port", "0").complaint
    assert "harbor-easy-v1 cannot be served here: no container engine answers at unix:///" in problem
    assert problem.endswith("start Docker or Podman, or set DOCKER_HOST")
    problem = run_starpod("serve", f"harbor_set:{folder.parent}", "--port", "0").complaint
    assert "none of its tasks can be served: no container engine answers at unix:///" in problem


@pytest.mark.parametrize("setting", ["max_turns=nan", "command_seconds=inf", "warm=-1", "max_turns=0"])
def test_settings_that_no_session_could_have_are_refused(tmp_path: Path, setting: str) -> None:
    pytest.importorskip("docker")
    harbor = pytest.importorskip("starpod.env_server.hosting.harbor", exc_type=ImportError)
    with pytest.raises(HostingError, match=r"not a number from \S+ on"):
        harbor.host(f"{write_task(tmp_path, tests=TESTS)}#{setting}")


@pytest.mark.parametrize("reach", ["8100", ":8100", "gateway:", "gateway:0", "gateway:65536", "http://gateway"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, reach: str) -> None:
    pytest.importorskip("docker")
    harbor = pytest.importorskip("starpod.env_server.hosting.harbor", exc_type=ImportError)
    with pytest.raises(HostingError, match="write HOST:PORT, as in reach=127"):
        harbor.host(f"{write_task(tmp_path, tests=TESTS)}#reach={reach}")
