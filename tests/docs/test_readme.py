"""A new user follows README.md from top to bottom: every block runs as it is written there.

Python blocks are run, or saved where the line above them says so. `starpod serve` starts a server; what comes after it
with the usual address is meant for it. What takes minutes or needs what a test has not is checked in its place below.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from starpod.trainer.configuration.loading import load_config
from tests.docs.pages import blocks, inline, words
from tests.docs.reader import Reader
from tests.support import ROOT, start_server
from tests.training import SMALL

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = blocks(README)
NEEDS = {"docker compose": "needs Docker"}
"""Commands that no ordinary machine runs, and what the block says about them to the reader."""


def makes(command: str) -> None:
    subprocess.run([*words(command), "--dry-run"], cwd=ROOT, capture_output=True, check=True)


def installs(command: str) -> None:
    (wanted,) = (word for word in words(command) if word.startswith(".["))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(wanted[2:-1].split(",")) <= set(extras)


def composes(command: str) -> None:
    """`docker compose up [--scale SERVICE=N]`, over files that have these services."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert re.fullmatch(r"docker compose up( --scale \w+=\d+)*", command), "unknown arguments of compose"
    for service in re.findall(r"--scale (\w+)=", command):
        assert "profiles" not in services[service]
    assert "trainer" in services


def trains(command: str) -> None:
    """The configuration and what is changed in it are sound."""
    name, *changes = words(re.sub(r" --run-dir \S+| --list", "", command))[2:] or ["frozen_lake"]
    load_config(name, changes)


LATER = re.compile(r"starpod (eval|watch|export) ")
"""Needs a trained policy: test_a_policy_is_trained_played_watched_and_exported."""

ENDLESS = re.compile(r"starpod (dev|ui)\b")
"""Goes on until Ctrl-C: tests/tools/cli/test_new.py and tests/tools/ui."""

ELSEWHERE: dict[str, Callable[[str], None]] = {
    "make ": makes,
    "pip install ": installs,
    "docker compose ": composes,
    "starpod train ": trains,
}


def test_the_page_from_top_to_bottom(reader: Reader) -> None:
    assert len(BLOCKS) > 5
    for block in BLOCKS:
        if block.language == "python":
            reader.python(block)
            continue
        assert block.is_shell, f"no test runs a block of {block.language}: {block.text}"
        for command in block.commands:
            if command.startswith("starpod train vault.py"):
                assert "id: vault-v1" in reader.starpod(command, "--dry-run")
            elif check := next((check for start, check in ELSEWHERE.items() if command.startswith(start)), None):
                check(command)
            elif command.startswith("starpod serve"):
                reader.serve(command)
            elif not (LATER.match(command) or ENDLESS.match(command)):
                assert command.startswith("starpod "), f"no test runs {command!r}"
                reader.starpod(command)


@pytest.mark.parametrize("command", sorted(NEEDS))
def test_what_cannot_be_run_everywhere_says_so(command: str) -> None:
    (text,) = [block.text for block in BLOCKS if command in block.text]
    first = next(line for line in text.splitlines() if line.startswith(command))
    assert NEEDS[command] in first


def test_commands_in_the_prose() -> None:
    """Commands between backticks name existing jobs and targets, and servers start."""
    commands = [code for code in inline(README) if code.startswith(("starpod train ", "make "))]
    assert len(commands) > 2
    for command in commands:
        (trains if command.startswith("starpod") else makes)(command)
    for command in (code for code in inline(README) if code.startswith("starpod serve ")):
        with start_server(*words(command)[2:]) as server:
            assert server.port
    for changes in (code for code in inline(README) if re.match(r"algorithm=\w", code)):
        load_config("echo_trap", changes.split())


@pytest.mark.minutes
def test_python_blocks_have_types(tmp_path: Path) -> None:
    files = []
    for number, block in enumerate(block for block in BLOCKS if block.language == "python"):
        files.append(tmp_path / f"readme_{number}.py")
        files[-1].write_text(block.text)
    done = subprocess.run([sys.executable, "-m", "mypy", *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.minutes
def test_a_policy_is_trained_played_watched_and_exported(reader: Reader) -> None:
    """The block under "Train", with a run of an iteration."""
    (block,) = [block for block in BLOCKS if "starpod export" in block.text]
    reader.address = reader.shared.address
    small = (*SMALL[1:], "stop.iterations=1")
    for command in block.commands:
        if command.startswith("starpod train ") and "--list" not in command:
            changes = [word for word in small if word.partition("=")[0] not in command]
            reader.starpod(command, *changes)
        else:
            reader.starpod(command, *(["--episodes", "8"] if " eval " in command else []))
    assert list(reader.folder.glob("*-model/*.safetensors"))
