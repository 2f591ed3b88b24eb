"""`starpod new` and `starpod dev`: an environment of one's own, from nothing."""

import itertools
import json
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support import ROOT, run_starpod

VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "with-options": ("--options",),
    "with-expert": ("--expert",),
    "with-both": ("--options", "--expert"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which environments are written and run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_is_written_is_in_order(folder: Path) -> None:
    """Tests of a new environment pass, and its files are formatted."""
    for name, flags in VARIANTS.items():
        written = name.replace("-", "_")
        done = run_starpod("new", name, *flags)
        assert done.status == 0 and f"starpod train {written}.py" in done.out
        text = (folder / f"{written}.py").read_text()
        assert ("Field(" in text, "expert_action" in text) == ("--options" in flags, "--expert" in flags)
        assert "{" not in (folder / f"{written}.yaml").read_text()
    names = [name.replace("-", "_") for name in VARIANTS]
    forms = ("{}.py", "{}.yaml", "test_{}.py")
    assert {path.name for path in folder.iterdir()} == {form.format(name) for form in forms for name in names}
    style = ("--config", str(ROOT / "pyproject.toml"), str(folder))
    run_module("ruff", "check", *style)
    run_module("ruff", "format", "--check", *style)
    run_module("pytest", "-q", "-p", "no:cacheprovider", "test_plain.py", "test_with_both.py")


def run_module(*command: str, folder: Path | None = None) -> None:
    ran = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.minutes
def test_its_types_hold(folder: Path) -> None:
    for name in ("plain", "with-both"):
        run_starpod("new", name, *VARIANTS[name])
    run_module("mypy", "--strict", *map(str, folder.glob("*.py")), folder=ROOT)


@pytest.mark.minutes
def test_it_can_be_trained_as_it_is_and_evaluated_as_it_is_reported(folder: Path) -> None:
    run_starpod("new", "vault", "--options", "--expert")
    small = ("collect.groups=4", "warm_start.steps=4", "warm_start.episodes=50", "evaluation.episodes=8")
    done = run_starpod("train", "vault.yaml", *small, "stop.iterations=1", "--run-dir", "run")
    assert done.status == 0, done.err
    (told,) = re.findall(r"starpod (eval .*)", done.out + done.err)
    evaluated = run_starpod(*shlex.split(told), "--episodes", "4")
    assert evaluated.status == 0 and "vault-v1" in evaluated.out, evaluated.err
    final = json.loads((folder / "run" / "final.json").read_text())
    assert (final["environment"], final["options"], final["episodes"]) == ("vault-v1", {"marks": 10}, 8)


def test_nothing_is_overwritten(folder: Path) -> None:
    (folder / "test_vault.py").write_text("mine")
    done = run_starpod("new", "vault")
    assert done.status == 2 and "test_vault.py exists already" in done.complaint
    assert [path.name for path in folder.iterdir()] == ["test_vault.py"]


@pytest.mark.parametrize(
    "name", ["Vault", "2vaults", "va ult", "class", "starpod", "../vault", "calendar", "random", "numpy"]
)
def test_a_bad_name_is_refused(folder: Path, name: str) -> None:
    done = run_starpod("new", name)
    assert done.status == 2 and done.complaint
    assert list(folder.iterdir()) == []


# --- starpod dev ------------------------------------------------------------------------------------------------------


@contextmanager
def dev(folder: Path) -> Iterator["queue.SimpleQueue[str]"]:
    """The lines of `starpod dev vault.py`."""
    command = [sys.executable, "-m", "starpod.cli.main", "dev", "vault.py", "--no-open"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert process.stdout is not None
        reader = threading.Thread(target=lambda out: [lines.put(line) for line in out], args=(process.stdout,))
        reader.start()
        try:
            yield lines
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0
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


def test_a_file_is_checked_each_time_it_is_saved(folder: Path) -> None:
    run_starpod("new", "vault", "--expert")
    file = folder / "vault.py"
    right = file.read_text()
    with dev(folder) as lines:
        page = until(lines, "play it at").split()[-1]
        assert page.endswith("/play/vault-v1")
        assert "A dial" in right and "Turn the dial" in httpx.get(page).text
        until(lines, "keeps the contract")
        file.write_text(right.replace("def step", "de step"))
        assert "vault.py, line" in until(lines, "SyntaxError")
        file.write_text(right.replace("float(solved)", "1.0").replace('"Vault"', '"Another vault"'))
        until(lines, "R-07 MUST")
        assert "Another vault" in httpx.get(page).text
