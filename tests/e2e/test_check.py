"""`starpod check` against `starpod serve`: real processes, every level, every built-in environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from starpod.client.check.suite import REQUIREMENTS
from tests.support import ROOT, ServerProcess, start_server

ENVIRONMENTS = ("bandit-v1", "countdown-v1", "frozen_lake-v1", "sokoban-v1", "sudoku-v1")
NEVER_SHOWN = {
    "C-92": "the server allows too many sessions to fill it",
    "C-95": "no token was given",
    "F-10": "the environment declares fork",
    "N-11": "the environment declares snapshot",
}


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "starpod.client.main", "check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_built_in_environment_keeps_the_contract(
    environment: str, server: ServerProcess, other_server: ServerProcess, tmp_path: Path
) -> None:
    file, junit = tmp_path / "report.json", tmp_path / "report.xml"
    done = run_check(
        server.address, "-e", environment, "--also", other_server.address, "--json", str(file), "--junit", str(junit)
    )
    report = json.loads(file.read_text())
    results = report["environments"][0]["results"]
    assert [f"{r['id']}: {r['message']}" for r in results if r["status"] in ("failed", "error")] == []
    assert done.returncode == 0, done.stderr
    assert "keeps the contract" in done.stdout
    skipped = {r["id"]: r["message"] for r in results if r["status"] == "skipped"}
    assert skipped.items() >= NEVER_SHOWN.items()
    assert len(skipped) <= len(NEVER_SHOWN) + 4, skipped
    cases = ElementTree.parse(junit).getroot().findall("testsuite/testcase")
    assert len(cases) == len(results) == len(REQUIREMENTS)


def test_json_alone_on_standard_output(server: ServerProcess) -> None:
    done = run_check(server.address, "-e", "bandit", "--level", "stream", "--json", "-")
    report = json.loads(done.stdout)
    assert {result["level"] for result in report["environments"][0]["results"]} == {"stream"}
    assert report["passed"]
    assert done.returncode == 0


def test_token_and_full_server_are_shown_where_there_are_such(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with start_server("bandit", "--token-file", str(token)) as guarded:
        done = run_check(guarded.address, "--token-file", str(token), "--level", "core", "--json", "-")
        results = {result["id"]: result for result in json.loads(done.stdout)["environments"][0]["results"]}
        assert results["C-95"]["status"] == "passed", results["C-95"]["message"]
        assert done.returncode == 0, [r for r in results.values() if r["status"] == "failed"]
        refused = run_check(guarded.address)
        assert refused.returncode == 1
        assert "UNAUTHENTICATED" in refused.stderr


@pytest.fixture(scope="module")
def other_server() -> object:
    with start_server() as process:
        yield process
