"""`starpod new` and `starpod dev`: an environment of one's own, from nothing."""

import itertools
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import ROOT

STARPOD = (sys.executable, "-m", "starpod.cli.main")
VARIANTS = [(), ("--options",), ("--expert",), ("--options", "--expert")]


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200)


def new(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run(*STARPOD, "new", *words, folder=folder)


@pytest.mark.parametrize("flags", VARIANTS, ids=" ".join)
def test_what_is_written_is_in_order(tmp_path: Path, flags: tuple[str, ...]) -> None:
    told = new("two-vaults", *flags, folder=tmp_path)
    assert told.returncode == 0, told.stderr
    assert "starpod train two_vaults.py" in told.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"two_vaults.py", "two_vaults.yaml", "test_two_vaults.py"}
    style = ("--config", str(ROOT / "pyproject.toml"), ".")
    for command in (("ruff", "check", *style), ("ruff", "format", "--check", *style)):
        done = run(sys.executable, "-m", *command, folder=tmp_path)
        assert done.returncode == 0, done.stdout
    text = (tmp_path / "two_vaults.py").read_text()
    assert ("Field(" in text, "expert_action" in text) == ("--options" in flags, "--expert" in flags)
    assert "{" not in (tmp_path / "two_vaults.yaml").read_text()


@pytest.mark.parametrize("flags", [VARIANTS[0], VARIANTS[-1]], ids=" ".join)
def test_its_own_test_and_types_hold(tmp_path: Path, flags: tuple[str, ...]) -> None:
    new("vault", *flags, folder=tmp_path)
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    files = [str(path) for path in tmp_path.glob("*.py")]
    typed = run(sys.executable, "-m", "mypy", "--strict", *files, folder=ROOT)
    assert typed.returncode == 0, typed.stdout


@pytest.mark.minutes
def test_it_can_be_trained_as_it_is(tmp_path: Path) -> None:
    new("vault", "--options", "--expert", folder=tmp_path)
    small = ("collect.groups=4", "warm_start.steps=4", "warm_start.episodes=50", "evaluation.episodes=8")
    done = run(*STARPOD, "train", "vault.yaml", *small, "stop.iterations=1", "--run-dir", "run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["environment"], final["options"], final["episodes"]) == ("vault-v1", {"marks": 10}, 8)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test_vault.py").write_text("mine")
    done = new("vault", folder=tmp_path)
    assert (done.returncode, "test_vault.py exists already" in done.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["test_vault.py"]


@pytest.mark.parametrize("name", ["Vault", "2vaults", "va ult", "class", "starpod", "../vault"])
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    done = new(name, folder=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert list(tmp_path.iterdir()) == []


# --- starpod dev ------------------------------------------------------------------------------------------------------


@contextmanager
def dev(folder: Path) -> Iterator["queue.SimpleQueue[str]"]:
    """The lines of `starpod dev vault.py`."""
    command = [*STARPOD, "dev", "vault.py", "--no-open"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert process.stdout is not None
        reader = threading.Thread(target=lambda out: [lines.put(line) for line in out], args=(process.stdout,))
        reader.start()
        try:
            yield lines
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
            reader.join()


def until(lines: "queue.SimpleQueue[str]", text: str) -> str:
    """The next line with this text."""
    seen = []
    for _ in itertools.repeat(None):
        try:
            seen.append(lines.get(timeout=120))
        except queue.Empty:
            break
        if text in seen[-1]:
            return seen[-1]
    raise AssertionError(f"no line with {text!r} in {seen}")


def test_a_file_is_checked_each_time_it_is_saved(tmp_path: Path) -> None:
    import httpx

    new("vault", "--expert", folder=tmp_path)
    file = tmp_path / "vault.py"
    right = file.read_text()
    with dev(tmp_path) as lines:
        page = until(lines, "play it at").split()[-1]
        assert page.endswith("/play/vault-v1")
        assert "A dial" in right and "Turn the dial" in httpx.get(page).text
        until(lines, "keeps the contract")
        file.write_text(right.replace("def step", "de step"))
        assert "vault.py, line" in until(lines, "SyntaxError")
        file.write_text(right.replace("float(solved)", "1.0"))
        until(lines, "R-07 MUST")
        file.write_text(right.replace('"Vault"', '"Another vault"'))
        until(lines, "keeps the contract")
        assert "Another vault" in httpx.get(page).text
