"""TextArena's games for one player, and for two in turn, as services."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("textarena", reason="TextArena is not installed: make test-hosting")

import textarena

from starpod.client import BadArgument, EnvironmentBug, SyncFleet
from starpod.env_server.hosting.families import add_hosted
from starpod.env_server.hosting.textarena import host
from starpod.env_server.registry import Registry
from tests.env_server.hosting.checks import check_contract, check_copies, check_recovery, check_refusal, words
from tests.support import ServerProcess

MASTERMIND, TIC_TAC_TOE = "textarena-mastermind-v0", "textarena-tic-tac-toe-v0"
MEGA_EASY = "textarena-2048-mega-easy-v0"
PLAYER_ACTION = textarena.ObservationType.PLAYER_ACTION


WORDS = words("textarena", "Mastermind-v0", "2048-v0-mega-easy", "Cryptarithm-v0", "TicTacToe-v0#players=2")


def test_a_game_is_the_packages_own(fleet: SyncFleet) -> None:
    """2048 draws a tile after each move: the first member of a group draws as the package does."""
    own = textarena.make("2048-v0-mega-easy-raw")
    own.reset(num_players=1, seed=11)
    (session,) = fleet.open(MEGA_EASY, seed=11)
    moves = random.Random(0).choices(["[left]", "[up]", "[right]", "[down]"], k=12)
    _, messages = own.get_observation()
    assert session.observation.text == "\n".join(text.strip() for _, text, _ in messages)
    for move in moves:
        ended, _ = own.step(move)
        _, messages = own.get_observation()
        said = [text.strip() for _, text, kind in messages if kind is not PLAYER_ACTION]
        transition = session.step(move)
        assert transition.observation.text == "\n".join(said)
        assert transition.terminated == ended
        if ended:
            break


def test_an_observation_is_what_is_new(fleet: SyncFleet) -> None:
    (session,) = fleet.open(MASTERMIND, seed=1)
    assert "You are playing Mastermind" in session.observation.text
    transition = session.step("1 2 3 4")  # brackets are put around it, as the package's own wrapper does
    assert transition.observation.text.startswith("Submitted [1 2 3 4]. Feedback:")
    assert (transition.outcomes[0].valid, transition.terminated, transition.reward) == (True, False, 0.0)
    assert "You are playing Mastermind" in session.render()


def test_a_bad_move_is_an_outcome(fleet: SyncFleet) -> None:
    (session,) = fleet.open(MASTERMIND, seed=1)
    transition = session.step("nonsense")
    assert (transition.outcomes[0].valid, transition.terminated) == (False, False)
    assert "invalid move" in transition.observation.text
    transition = session.step("nonsense")
    assert (transition.outcomes[0].valid, transition.terminated, transition.success) == (False, True, False)
    assert "Invalid Move" in transition.info["reason"]


def test_the_code_can_be_found(fleet: SyncFleet) -> None:
    own = textarena.make("Mastermind-v0-raw")
    own.reset(num_players=1, seed=5)
    code = " ".join(map(str, own.state.game_state["secret_code"]))
    (session,) = fleet.open(MASTERMIND, seed=5)
    transition = session.step(f"[{code}]")
    assert (transition.reward, transition.success) == (1.0, True)


def test_callers_choose_the_difficulty(fleet: SyncFleet) -> None:
    (session,) = fleet.open(MASTERMIND, seed=1, options={"code_length": 3, "max_turns": 2})
    assert "3 digits long" in session.observation.text
    with pytest.raises(BadArgument):
        fleet.open(MASTERMIND, options={"colours": 3})


def test_a_reward_that_is_no_number_is_the_games_bug(fleet: SyncFleet) -> None:
    """This version of the package gives the reason of an invalid move as its reward."""
    (session,) = fleet.open("textarena-cryptarithm-v0", seed=1)
    session.step("nonsense")
    with pytest.raises(EnvironmentBug, match="which is not a number"):
        session.step("nonsense")


def test_copies_continue_equally(fleet: SyncFleet) -> None:
    check_copies(fleet, MEGA_EASY, "[left]", "[up]")


def test_two_players_take_turns(fleet: SyncFleet) -> None:
    own = textarena.make("TicTacToe-v0-raw")
    own.reset(num_players=2, seed=3)
    (session,) = fleet.open(TIC_TAC_TOE, seed=3)
    observation = session.observation
    for move in ("[0]", "[3]", "[1]", "[4]", "[4]", "[8]", "[5]"):  # one is taken already
        player, messages = own.get_observation()
        said = [text.strip() for who, text, kind in messages if who != player or kind is not PLAYER_ACTION]
        assert (observation.agent_id, observation.text) == (f"Player {player}", "\n".join(said))
        own.step(move)
        transition = session.step(move)
        observation = transition.observation
    assert (transition.reward, transition.success, observation.agent_id) == (1.0, True, "Player 1")
    assert (
        transition.info["rewards"]
        == {"Player 0": -1, "Player 1": 1}
        == {f"Player {n}": r for n, r in own.close()[0].items()}
    )


def test_who_gives_a_second_invalid_move_loses(fleet: SyncFleet) -> None:
    (session,) = fleet.open(TIC_TAC_TOE, seed=1)
    first = session.step("nonsense")
    assert (first.outcomes[0].valid, first.observation.agent_id) == (False, "Player 0")
    last = session.step("nonsense")
    assert (last.reward, last.terminated, last.outcomes[0].valid) == (-1.0, True, False)


def test_it_keeps_the_contract(server: ServerProcess) -> None:
    check_contract(server, MASTERMIND, TIC_TAC_TOE)


async def test_episodes_survive_a_killed_server(server: ServerProcess) -> None:
    await check_recovery(server, MEGA_EASY, ["[left]", "[up]", "[right]"])


def test_trying_a_game_leaves_the_random_streams_alone() -> None:
    random.seed(3)
    before = random.getstate()
    host("2048-v0")
    assert random.getstate() == before


def test_a_star_hosts_all_that_fit_and_can_be() -> None:
    registry = Registry()
    ids = add_hosted(registry, "textarena:T*-v0")  # Tic-tac-toe's kin are for two, others need data of NLTK
    assert {"textarena-tower-of-hanoi-v0", "textarena-three-card-monte-v0"} <= set(ids)
    assert "textarena-tic-tac-toe-v0" not in ids


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("Mastermind", "did you mean Mastermind-v0"),
        ("Mastermind-v0?colours=3", "takes no 'colours'"),
        ("TicTacToe-v0", "number of players"),
        ("Mastermind-v0#players=2", "number of players"),
        ("Mastermind-v0#concurrency=inline", "use one of process"),
    ],
)
def test_what_cannot_be_hosted_says_why(wanted: str, problem: str) -> None:
    check_refusal(host, wanted, problem)
