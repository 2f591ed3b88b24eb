"""The Makefile takes a Python that is there, and cleans up what it makes."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

MAKE = shutil.which("make")
pytestmark = pytest.mark.skipif(MAKE is None, reason="needs make")


@pytest.mark.parametrize(
    ("present", "words", "taken"),
    [
        ({"python3.11": 0, "python3.12": 0}, [], "python3.11"),
        ({"python3.12": 0, "python3.13": 0}, [], "python3.12"),
        ({"python3.11": 1, "python3.13": 0}, [], "python3.13"),  # Debian's, without python3.11-venv
        ({"python3.12": 0}, ["PYTHON=python3.13"], "python3.13"),
        ({}, [], "python3.11"),
    ],
)
def test_it_takes_the_first_python_that_makes_environments(
    present: dict[str, int], words: list[str], taken: str, tmp_path: Path
) -> None:
    for name in ("bash", "grep", "sed", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    for name, status in present.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    told = subprocess.run(
        [str(MAKE), "--eval", "told: ; @echo $(PYTHON)", "told", *words],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == f"{taken}\n"


def test_clean_removes_every_environment() -> None:
    made = set(re.findall(r"^\w*VENV := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    told = subprocess.run([str(MAKE), "--dry-run", "clean"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made <= set(told.stdout.split())
