"""`starpod check` against `starpod serve`: real servers, every level, every built-in environment."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from starpod.check.cli import check
from starpod.check.runner import EnvironmentReport
from starpod.check.runner import check as run_check
from starpod.check.suite import REQUIREMENTS
from tests.skipped import not_by_time
from tests.support import ServerProcess, credentials, start_server

ENVIRONMENTS = (
    *("bandit-v1", "coding-v1", "countdown-v1", "desk-v1", "frozen_lake-v1", "game_2048-v1", "house-v1"),
    *("rubiks_cube-v1", "search_qa-v1", "sokoban-v1", "sudoku-v1", "tic_tac_toe-v1", "webshop-v1"),
    "word_problems-v1",
)
NEVER_SHOWN = {
    "C-92": "the server allows too many sessions to fill it",
    "C-95": "no token was given",
    "C-98": "it takes 75 s: run it with --slow",
    "F-10": "only for environments without fork, and this one has it",
    "N-11": "only for environments without snapshot, and this one has it",
}
NOT_BY_ALL = ("C-44", "C-58", "C-64", "C-65", "C-70")
"""One action ends it; it cannot list its actions; it has no score; it draws no PNG, as the shop without a Chromium."""
WITH_TOOLS = {"desk-v1": ("S-11", "S-12", "S-16")}
"""Its actions are no texts."""


@pytest.fixture(scope="module")
def reports(server: ServerProcess) -> dict[str, EnvironmentReport]:
    """A check of each environment, all of them at the same time."""

    async def check_all(also: str) -> dict[str, EnvironmentReport]:
        settings = {"also": also, "seconds": 90.0, "call_seconds": 30.0}
        found = await asyncio.gather(
            *(run_check(server.address, REQUIREMENTS, environments=[each], **settings) for each in ENVIRONMENTS)
        )
        return {environment.id: environment for report in found for environment in report.environments}

    with start_server() as other:
        return asyncio.run(check_all(other.address))


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_built_in_environment_keeps_the_contract(environment: str, reports: dict[str, EnvironmentReport]) -> None:
    results = reports[environment].results
    assert [f"{r.requirement.id}: {r.message}" for r in results if r.status in ("failed", "error")] == []
    skipped = not_by_time((r.requirement.id, r.message) for r in results if r.status == "skipped")
    assert skipped.items() >= NEVER_SHOWN.items()
    assert set(skipped) <= {*NEVER_SHOWN, *NOT_BY_ALL, *WITH_TOOLS.get(environment, ())}, skipped
    assert len(results) == len(REQUIREMENTS)


def test_a_guarded_and_small_server_keeps_the_contract(tmp_path: Path) -> None:
    """mTLS, a token, and so few sessions that the check can fill it."""
    files = credentials(tmp_path)
    serving = {"tls-certificate": "certificate", "tls-key": "key", "tls-client-ca": "ca", "token-file": "token"}
    options = [word for option, name in serving.items() for word in (f"--{option}", str(files[name]))]
    access = [word for name in ("certificate", "key", "ca") for word in (f"--{name}", str(files[name]))]

    def checked(*arguments: str) -> Result:
        return CliRunner().invoke(check, [guarded.address, *access, "--timeout", "90", *arguments])

    with start_server("bandit", "--max-sessions", "64", *options) as guarded:
        done = checked("--token-file", str(files["token"]), "--level", "core", "--json", "-")
        results = {result["id"]: result for result in json.loads(done.stdout)["environments"][0]["results"]}
        assert [f"{r['id']}: {r['message']}" for r in results.values() if r["status"] in ("failed", "error")] == []
        assert (results["C-92"]["status"], results["C-95"]["status"], done.exit_code) == ("passed", "passed", 0)
        refused = checked()
        assert refused.exit_code == 1 and "UNAUTHENTICATED" in refused.output
