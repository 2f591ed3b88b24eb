"""examples/custom_environment.py: short, served, checked, played, and stepped through the Gymnasium adapter."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
from click.testing import CliRunner

from starpod.cli.main import starpod
from starpod.client import SyncFleet, Want
from starpod.client.gymnasium import StarpodVectorEnv
from tests.support import ROOT, ServerProcess, start_server

EXAMPLE = ROOT / "examples" / "custom_environment.py"


@pytest.fixture(scope="module")
def custom() -> Iterator[ServerProcess]:
    with start_server(str(EXAMPLE)) as server:
        yield server


def test_it_fits_on_a_page_and_is_all_that_is_served(custom: ServerProcess) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    with SyncFleet(custom.address) as fleet:
        assert [spec.id for spec in fleet.describe()] == ["guess-v1"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("check ADDRESS --timeout 90", "keeps the contract"),
        ("play ADDRESS guess --seed 7 --option highest=2", "Solved: the task ended after"),
    ],
)
def test_it_keeps_the_contract_and_is_played(custom: ServerProcess, words: str, told: str) -> None:
    result = CliRunner().invoke(starpod, words.replace("ADDRESS", custom.address).split(), input="1\n2\n")
    assert result.exit_code == 0 and told in result.output, result.output


def test_its_expert_halves_the_range(custom: ServerProcess) -> None:
    with SyncFleet(custom.address) as fleet:
        (session,) = fleet.open("guess-v1", seed=3, options={"highest": 1000}, want=Want(expert_action=True))
        turns = 0
        while not session.done:
            action = session.observation.expert_action
            assert action is not None
            transition = session.step(action)
            turns += 1
        assert (transition.success, transition.reward) == (True, 1.0)
        assert turns <= 10  # 2**10 > 1000


def test_it_is_stepped_through_gymnasiums_vector_env(custom: ServerProcess) -> None:
    """Halving the range that each observation shows solves every copy."""
    environments = StarpodVectorEnv(8, custom.address, "guess-v1", options={"highest": 64})
    try:
        observations, infos = environments.reset(seed=1)
        assert list(infos["instructions"]) == ["Find the hidden number between 1 and 64."] * 8
        solved = np.zeros(8, dtype=bool)
        for _ in range(7):  # 2**7 > 64
            ranges = [list(map(int, re.findall(r"\d+", observation))) for observation in observations]
            guesses = tuple(str(sum(between) // 2) for between in ranges)
            observations, rewards, terminated, truncated, _ = environments.step(guesses)
            assert not truncated.any()
            assert (rewards == terminated).all()
            solved |= terminated
        assert solved.all()
    finally:
        environments.close()
