"""Calls to this machine and programs on it do not depend on files in the working folder or on proxy settings."""

import os
from pathlib import Path

import pytest

from starpod.cli.main import reach_loopback_directly
from starpod.client import Fleet, SyncFleet
from starpod.client.programs import run_program
from tests.client.fake_server import FakeServer

PROCESS_CLASS = """
import random
from starpod.env_server import Concurrency, Environment, EnvironmentSpec, Outcome

class Sets(Environment):
    spec = EnvironmentSpec(
        id="sets-v1", version="1.0.0", title="x", actions=("left", "right"), concurrency=Concurrency.PROCESS
    )
    def reset(self, rng: random.Random) -> None:
        self.prize = rng.choice(list({"a", "b", "c", "d", "e", "f", "g", "h"}))
    def step(self, action: str) -> Outcome:
        return Outcome(reward=0.0, terminated=True, success=False)
    def render(self, mode: str = "text") -> str:
        return f"prize {self.prize}"
"""


@pytest.fixture
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with files that are named as modules of the standard library, and an environment."""
    for name in ("queue", "calendar", "selectors"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the standard library')\n")
    (tmp_path / "sets.py").write_text(PROCESS_CLASS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_service_and_its_processes_start(shadowed: Path) -> None:
    words = ("serve", str(shadowed / "sets.py"), "--workers", "2", "--port", "0")
    with run_program("the service", *words) as address, SyncFleet(address) as fleet:
        (session,) = fleet.open("sets-v1", seed=1)
        assert session.step("left").terminated


PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")


async def test_a_fleet_reaches_this_machine_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with FakeServer() as server, Fleet(server.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=1)
        assert session.step_index == 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"no_proxy": "corp.example, 127.0.0.1"}, "corp.example,127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_commands_and_their_programs_spare_this_machine(
    given: dict[str, str], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    for name, value in {**given, "no_grpc_proxy": "other.example"}.items():
        monkeypatch.setenv(name, value)
    reach_loopback_directly()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == kept
    assert dict(os.environ)["no_grpc_proxy"] == "other.example,localhost,127.0.0.1,::1"
