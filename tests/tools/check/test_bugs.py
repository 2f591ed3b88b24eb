"""A bug of the environment or the server is told once, whatever it makes impossible to show."""

import asyncio
import contextlib
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from starpod.check.cli import check as check_command
from starpod.check.runner import Result, Unreachable, check
from starpod.check.suite import REQUIREMENTS
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import start_server
from tests.tools.check.reference_server import ReferenceService, serve

ENVIRONMENT = """
from starpod.env_server import Environment, EnvironmentSpec, Limits, Outcome

class Broken(Environment):
    spec = EnvironmentSpec(id="broken-v1", version="1.0.0", title="Broken", actions=("left", "right"))

    def reset(self, rng):
        self.number = rng.random()

    def step(self, action):
        {step}

    def render(self, mode="text"):
        {render}
"""


def _examine(tmp_path: Path, step: str, render: str = 'return f"{self.number}"', level: str = "") -> list[Result]:
    file = tmp_path / "broken.py"
    file.write_text(ENVIRONMENT.replace("{step}", step).replace("{render}", render))
    chosen = [each for each in REQUIREMENTS if not level or each.level == level]
    with start_server("--environment-module", str(file)) as server:
        return asyncio.run(check(server.address, chosen)).results


def _failures(results: list[Result]) -> dict[str, str]:
    return {result.requirement.id: result.message for result in results if result.status in ("failed", "error")}


@pytest.mark.parametrize(
    ("step", "cause"),
    [
        ("return 1.0", "step returned 1.0; return an Outcome"),
        ("return self.number", "return an Outcome"),
        ("return 'text', 1.0, True, {}", "step returned ('text', 1.0, True, {}); return an Outcome"),
        ("raise KeyError('left')", "Step raised KeyError: 'left'"),
    ],
)
def test_a_broken_step_is_one_failure(tmp_path: Path, step: str, cause: str) -> None:
    results = _examine(tmp_path, step)
    failures = _failures(results)
    assert list(failures) == ["C-30"]
    assert cause in failures["C-30"]
    assert "To fix it" not in failures["C-30"]
    skipped = {result.message for result in results if result.status == "skipped"}
    assert "stopped by the bug that C-30 reports" in skipped


def test_it_is_told_where_the_requirement_that_tells_it_is_not_asked_for(tmp_path: Path) -> None:
    failures = _failures(_examine(tmp_path, "return 1.0", level="stream"))
    assert len(failures) == 1
    assert "step returned 1.0; return an Outcome" in next(iter(failures.values()))


def test_a_bug_elsewhere_is_one_failure_of_the_first_that_meets_it(tmp_path: Path) -> None:
    results = _examine(tmp_path, "return Outcome()", 'if self.number: raise KeyError("frame")\n        return "x"')
    (message,) = _failures(results).values()
    assert "KeyError: 'frame'" in message


def test_a_server_that_raises_is_one_failure() -> None:
    class Raises(ReferenceService):
        async def step(self, request: Any) -> Any:
            raise ZeroDivisionError("a bug")

    ids = ("C-30", "C-31", "C-33", "C-41", "C-42", "C-64")

    async def examine() -> list[Result]:
        async with serve(Raises()) as address:
            return (await check(address, [each for each in REQUIREMENTS if each.id in ids])).results

    assert list(_failures(asyncio.run(examine()))) == ["C-30"]


@pytest.mark.parametrize("level", ["fork", "snapshot", "stream"])
def test_no_level_alone_passes_a_broken_step(tmp_path: Path, level: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(ENVIRONMENT.replace("{step}", "return 1.0").replace("{render}", "return ''"))
    with start_server("--environment-module", str(file)) as server:
        result = CliRunner().invoke(check_command, [server.address, "--level", level])
    assert result.exit_code == 1
    assert "C-30" in result.output


def test_a_server_that_drains_is_told_once() -> None:
    """It used to be 83 failures."""
    opening = pb.OpenRequest(environment_id="bandit-v1", seed=1)
    with start_server("bandit") as server, grpc.insecure_channel(server.address) as channel:
        stub = EnvironmentServiceStub(channel)
        stub.Open(opening)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(grpc.RpcError):
            while True:
                stub.Open(opening)
        with pytest.raises(Unreachable, match="is draining and opens no sessions"):
            asyncio.run(check(server.address, REQUIREMENTS))
