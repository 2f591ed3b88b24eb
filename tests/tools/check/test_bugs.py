"""A bug of the environment or the server is reported once, even if it makes many requirements impossible to check."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from starpod.check.cli import check as check_command
from starpod.check.requirement import Requirement
from starpod.check.runner import CannotCheck, Result, check
from starpod.check.suite import REQUIREMENTS
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import start_server
from tests.tools.check.reference_server import ReferenceService, serve

HEAD = "from starpod.env_server import Environment, EnvironmentSpec, Limits, Outcome\n"
ENVIRONMENT = """
class {id}(Environment):
    spec = EnvironmentSpec(id="{id}-v1", version="1.0.0", title="Broken", actions=("left", "right"))

    def reset(self, rng):
        self.number = rng.random()

    def step(self, action):
        {step}

    def render(self, mode="text"):
        {render}
"""
STEPS = {
    "number": ("return 1.0", "step returned 1.0; return an Outcome"),
    "changing": ("return self.number", "return an Outcome"),
    "gym": ("return 'text', 1.0, True, {}", "step returned ('text', 1.0, True, {}); return an Outcome"),
    "raising": ("raise KeyError('left')", "Step raised KeyError: 'left'"),
}
SOME = [each for each in REQUIREMENTS if each.id in ("C-30", "C-31", "C-33", "C-41", "C-42", "C-64")]
STREAM = [each for each in REQUIREMENTS if each.level == "stream"]
RENDERS = 'if self.number: raise KeyError("frame")\n        return "x"'
LONG_KEY = 'return "x"\n\n    def state_key(self):\n        return bytes(181)'


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of environments with a bug each."""
    file = tmp_path_factory.mktemp("bugs") / "broken.py"
    steps = [(id_, step, 'return f"{self.number}"') for id_, (step, _) in STEPS.items()]
    steps += [("picture", "return Outcome()", RENDERS), ("key", "return Outcome()", LONG_KEY)]
    texts = [
        ENVIRONMENT.replace("{id}", id_).replace("{step}", step).replace("{render}", render)
        for id_, step, render in steps
    ]
    file.write_text(HEAD + "".join(texts))
    with start_server(str(file)) as server:
        yield server.address


def _examine(address: str, id_: str, chosen: Sequence[Requirement] = REQUIREMENTS) -> list[Result]:
    return asyncio.run(check(address, chosen, environments=[id_])).results


def _failures(results: list[Result]) -> dict[str, str]:
    return {result.requirement.id: result.message for result in results if result.status in ("failed", "error")}


def test_a_state_key_that_is_no_digest_is_told_how_to_make_one(address: str) -> None:
    message = _failures(_examine(address, "key", [each for each in REQUIREMENTS if each.id == "C-63"]))["C-63"]
    assert "181 bytes" in message and "`return digest(text)` with `digest` of starpod.env_server" in message


@pytest.mark.parametrize("id_", STEPS)
def test_a_broken_step_is_one_failure(address: str, id_: str) -> None:
    """Two requirements suffice, whose messages differ most."""
    results = _examine(address, id_, REQUIREMENTS if id_ in ("changing", "raising") else SOME)
    failures = _failures(results)
    assert list(failures) == ["C-30"]
    assert STEPS[id_][1] in failures["C-30"] and "To fix it" not in failures["C-30"]
    skipped = {result.message for result in results if result.status == "skipped"}
    assert "stopped by the bug that C-30 reports" in skipped


def test_it_is_reported_even_if_its_requirement_is_not_checked(address: str) -> None:
    (message,) = _failures(_examine(address, "number", STREAM)).values()
    assert STEPS["number"][1] in message


def test_a_bug_elsewhere_is_one_failure_of_the_first_that_meets_it(address: str) -> None:
    (message,) = _failures(_examine(address, "picture")).values()
    assert "KeyError: 'frame'" in message


@pytest.mark.parametrize("level", ["fork", "snapshot", "stream"])
def test_no_level_alone_passes_a_broken_step(address: str, level: str) -> None:
    result = CliRunner().invoke(check_command, [address, "--environment", "number", "--level", level])
    assert result.exit_code == 1 and "C-30" in result.output


def test_a_server_that_raises_is_one_failure() -> None:
    class Raises(ReferenceService):
        async def step(self, request: Any) -> Any:
            raise ZeroDivisionError("a bug")

    async def examine() -> list[Result]:
        async with serve(Raises()) as address:
            return (await check(address, SOME)).results

    assert list(_failures(asyncio.run(examine()))) == ["C-30"]


def test_a_server_that_drains_is_reported_once() -> None:
    """There used to be 83 failures."""
    opening = pb.OpenRequest(environment_id="bandit-v1", seed=1)
    with start_server("bandit") as server, grpc.insecure_channel(server.address) as channel:
        stub = EnvironmentServiceStub(channel)
        stub.Open(opening)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(grpc.RpcError):
            while True:
                stub.Open(opening)
        with pytest.raises(CannotCheck, match="is draining and opens no sessions"):
            asyncio.run(check(server.address, REQUIREMENTS))
