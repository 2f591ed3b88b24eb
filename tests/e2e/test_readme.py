"""What README.md shows works as it is written there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, ServerProcess, start_server

ADDRESS = "127.0.0.1:50051"
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PYTHON = [text for language, text in BLOCKS if language == "python"]
SHELL = [line.partition("#")[0].strip() for language, text in BLOCKS if not language for line in text.splitlines()]
COMMANDS = [line for line in SHELL if line.startswith("starpod ") and ADDRESS in line]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, *command], input="quit\n", capture_output=True, text=True, timeout=100, cwd=cwd
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def python_block(word: str) -> str:
    (block,) = [block for block in PYTHON if word in block]
    return block


@pytest.mark.parametrize("command", [command for command in COMMANDS if " check " not in command])
def test_command(server: ServerProcess, command: str) -> None:
    run("-m", "starpod.client.main", *shlex.split(command.replace(ADDRESS, server.address))[1:])


def test_client(server: ServerProcess) -> None:
    shown = run("-c", python_block("SyncFleet").replace(ADDRESS, server.address)).stdout
    assert shown.count("'") == 2 * 16  # an end reason for each session


def test_gymnasium(server: ServerProcess) -> None:
    run("-c", python_block("VectorEnv").replace(ADDRESS, server.address) + "environments.close()")


def test_environment(tmp_path: Path) -> None:
    (tmp_path / "doors.py").write_text(python_block("Doors"))
    with start_server("--environment-module", str(tmp_path / "doors.py")) as doors:
        (check,) = [command for command in COMMANDS if " check " in command]
        run("-m", "starpod.client.main", *shlex.split(check.replace(ADDRESS, doors.address))[1:])
