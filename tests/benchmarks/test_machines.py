"""The benchmarks of tasks in containers run, with a dozen faults."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.env_server.machines.tasks import BASE, missing

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("name", "words", "rows"),
    [("machine_faults", ["--faults", "12", "--crowd", "4", "--shared-engine"], 9), ("machines", ["--rounds", "1"], 3)],
)
def test_a_benchmark_of_containers_runs(
    name: str, words: list[str], rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := missing():
        pytest.skip(reason)
    result = tmp_path / "result.json"
    monkeypatch.setattr(sys, "argv", [name, "--base", BASE, "--json", str(result), *words])
    try:
        runpy.run_module(f"benchmarks.serving.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert not ended.code, "a rule was broken"
    assert len(json.loads(result.read_text())["results"]) == rows
