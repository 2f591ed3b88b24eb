"""examples/asked_user.py: checked with a stand-in for a model, and played with SmolLM2 behind `starpod gateway`."""

import subprocess
import sys
from pathlib import Path

import pytest

from starpod.client import SyncFleet
from tests.fake_openai import Model
from tests.support import ServerProcess, start_server

EXAMPLE = ("examples/asked_user.py",)


class Agreeing(Model):
    """A model that always says yes."""

    def reply(self, question: str) -> str:
        return "Yes, it is."


@pytest.mark.minutes
def test_it_keeps_the_contract(tmp_path: Path) -> None:
    with Agreeing() as model:
        variables = {"ANIMAL_MODEL_URL": model.url}
        with start_server(*EXAMPLE, "--effects", str(tmp_path), environment=variables) as server:
            command = [sys.executable, "-m", "starpod.cli.main", "check", server.address, "--timeout", "90"]
            result = subprocess.run(command, capture_output=True, text=True)
            assert result.returncode == 0, result.stdout


@pytest.mark.smollm
@pytest.mark.timeout(1200)
def test_smollm2_is_asked_once(tmp_path: Path) -> None:
    """The episode is played again by another server, when the model is gone."""
    program = [sys.executable, "-m", "starpod.cli.main", "gateway", "smollm2", "--out", str(tmp_path / "gateway")]
    model = ServerProcess([*program, "--max-model-len", "256", "--max-sessions", "1"], {"OMP_NUM_THREADS": "2"})
    variables = {"ANIMAL_MODEL_URL": f"{model.address}/v1"}
    arguments = (*EXAMPLE, "--effects", str(tmp_path / "effects"))
    try:
        with start_server(*arguments, environment=variables) as server, SyncFleet(server.address) as fleet:
            first = play(fleet)
    finally:
        model.close()
    assert first[0] != first[1] and first[2] in ("0.0", "1.0")
    with start_server(*arguments, environment=variables) as server, SyncFleet(server.address) as fleet:
        assert play(fleet) == first


def play(fleet: SyncFleet) -> list[str]:
    """Return the observation and the reward of each turn."""
    (session,) = fleet.open("animal-v1", seed=1)
    shown = [session.observation.text, session.step("How many legs does it have?").observation.text]
    return [*shown, str(session.step("It is the cat.").reward)]
