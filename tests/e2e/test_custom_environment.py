"""examples/custom_environment.py: short, served, checked and played."""

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from starpod.cli.main import starpod
from starpod.client import SyncFleet, Want
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
