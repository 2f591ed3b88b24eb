"""`starpod check` against `starpod serve`: real processes, every level, every built-in environment."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from starpod.check.suite import REQUIREMENTS
from tests.skipped import not_by_time
from tests.support import ROOT, ServerProcess, credentials, start_server

ENVIRONMENTS = (
    *("bandit-v1", "coding-v1", "countdown-v1", "desk-v1", "frozen_lake-v1", "game_2048-v1", "house-v1"),
    *("rubiks_cube-v1", "search_qa-v1", "sokoban-v1", "sudoku-v1", "tic_tac_toe-v1", "webshop-v1"),
    "word_problems-v1",
)
NEVER_SHOWN = {
    "C-92": "the server allows too many sessions to fill it",
    "C-95": "no token was given",
    "C-98": "it takes 75 s: run it with --slow",
    "F-10": "the environment declares fork",
    "N-11": "the environment declares snapshot",
}
NOT_BY_ALL = ("C-44", "C-58", "C-64", "C-65", "C-70")
"""One action ends it; it cannot list its actions; it has no score; it draws no PNG, as the shop without a Chromium."""
WITH_TOOLS = {"desk-v1": ("S-11", "S-12", "S-16")}
"""Its actions are no texts."""
COMMAND = (sys.executable, "-m", "starpod.cli.main", "check", "--timeout", "90")


@pytest.fixture(scope="module")
def checks(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, "Check"]]:
    """A check of each environment, all running at the same time."""
    with start_server() as other, contextlib.ExitStack() as stack:
        yield {
            environment: stack.enter_context(Check(server, other, environment, tmp_path_factory.mktemp(environment)))
            for environment in ENVIRONMENTS
        }


class Check:
    """A running `starpod check` of one environment, with the files that it writes."""

    def __init__(self, server: ServerProcess, other: ServerProcess, environment: str, folder: Path) -> None:
        self.json, self.junit = folder / "report.json", folder / "report.xml"
        arguments = ["-e", environment, "--also", other.address, "--json", str(self.json), "--junit", str(self.junit)]
        self.process = subprocess.Popen(
            [*COMMAND, server.address, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> "Check":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_built_in_environment_keeps_the_contract(environment: str, checks: dict[str, Check]) -> None:
    check = checks[environment]
    output, _ = check.process.communicate(timeout=250)
    results = json.loads(check.json.read_text())["environments"][0]["results"]
    assert [f"{r['id']}: {r['message']}" for r in results if r["status"] in ("failed", "error")] == []
    assert check.process.returncode == 0, output
    assert "keeps the contract" in output
    skipped = not_by_time((r["id"], r["message"]) for r in results if r["status"] == "skipped")
    assert skipped.items() >= NEVER_SHOWN.items()
    assert set(skipped) <= {*NEVER_SHOWN, *NOT_BY_ALL, *WITH_TOOLS.get(environment, ())}, skipped
    cases = ElementTree.parse(check.junit).getroot().findall("testsuite/testcase")
    assert len(cases) == len(results) == len(REQUIREMENTS)


def test_json_alone_on_standard_output(server: ServerProcess) -> None:
    done = run_check(server.address, "-e", "bandit", "--level", "stream", "--json", "-")
    report = json.loads(done.stdout)
    results = report["environments"][0]["results"]
    # C-30, whether it steps at all, comes with every level.
    levels = {result["level"] for result in results if result["id"] != "C-30"}
    assert levels == {"stream"}
    assert any(result["id"] == "C-30" for result in results)
    assert report["passed"]
    assert done.returncode == 0


def test_a_guarded_and_small_server_keeps_the_contract(tmp_path: Path) -> None:
    """mTLS, a token, and so few sessions that the check can fill it."""
    files = credentials(tmp_path)
    serving = {"tls-certificate": "certificate", "tls-key": "key", "tls-client-ca": "ca", "token-file": "token"}
    calling = {"certificate": "certificate", "key": "key", "ca": "ca"}
    options = [word for option, name in serving.items() for word in (f"--{option}", str(files[name]))]
    access = [word for option, name in calling.items() for word in (f"--{option}", str(files[name]))]
    with start_server("bandit", "--max-sessions", "64", *options) as guarded:
        arguments = ("--token-file", str(files["token"]), "--level", "core", "--json", "-")
        done = run_check(guarded.address, *access, *arguments)
        results = {result["id"]: result for result in json.loads(done.stdout)["environments"][0]["results"]}
        assert [f"{r['id']}: {r['message']}" for r in results.values() if r["status"] in ("failed", "error")] == []
        assert (results["C-92"]["status"], results["C-95"]["status"]) == ("passed", "passed")
        assert done.returncode == 0
        refused = run_check(guarded.address, *access)
        assert refused.returncode == 1
        assert "UNAUTHENTICATED" in refused.stderr
