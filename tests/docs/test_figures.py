"""Figures stand once: in docs/benchmarks, as tables that are made from what the programs measured."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.tables import NAMES, README, RESULTS, page, readme
from benchmarks.training.experiment import EXPERIMENTS
from tests.docs.pages import is_benchmark


@pytest.mark.parametrize("name", NAMES)
def test_a_page_of_tables_is_what_the_figures_say(name: str) -> None:
    written = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert written == page(name), "stale: run python -m benchmarks.tables"


def test_the_readme_has_the_figures() -> None:
    assert README.read_text(encoding="utf-8") == readme(), "stale: run python -m benchmarks.tables"


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_figures_name_a_command_that_exists(file: Path) -> None:
    if file.stem.startswith("learning_"):
        assert file.stem.removeprefix("learning_") in EXPERIMENTS
        return
    command = json.loads(file.read_text(encoding="utf-8"))["command"]
    (name,) = re.findall(r"^python -m benchmarks\.([\w.]+)", command)
    assert is_benchmark(name)
