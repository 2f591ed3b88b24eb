"""tic_tac_toe-v1: rules, perfect play, opponents, two agents in one session."""

import functools

from hypothesis import given
from hypothesis import strategies as st

from starpod.client import Fleet
from starpod.env_server.episodes.live_episode import LiveEpisode, TurnResult, Want
from starpod.env_server.operation.config import ServerConfig
from starpod.env_server.registry import Registry
from starpod.env_server.server.server import EnvironmentServer
from starpod.environments.tic_tac_toe import TicTacToe
from starpod.environments.tic_tac_toe.board import (
    EMPTY,
    best_cells,
    free_cells,
    is_over,
    take,
    value,
    winning_line,
)
from starpod.v1.values import EndReason
from tests.environments import episodes

start = functools.partial(episodes.start, TicTacToe)
EXTRAS = Want(valid_actions=True, expert_action=True, score=True)
SEEDS = st.integers(0, 2**64 - 1)


def play(episode: LiveEpisode, *cells: str) -> TurnResult:
    """The last of these moves' transitions."""
    return [episode.turn([cell], EXTRAS) for cell in cells][-1]


def whose_turn(transition: TurnResult) -> str:
    assert transition.extras is not None
    return transition.extras.agent_id


def test_two_agents_move_in_turn_and_the_winner_is_paid() -> None:
    episode = start(opponent="none")
    moves = [episode.turn([cell], Want()) for cell in "15293"]
    assert [whose_turn(move) for move in moves[:-1]] == ["O", "X", "O", "X"]
    assert [move.reward for move in moves] == [0, 0, 0, 0, 1]
    assert (moves[-1].end_reason, moves[-1].success) == (EndReason.TERMINAL, False)
    assert moves[-1].parts == "X has three in a row.\nX X X\n4 O 6\n7 8 O"


def test_a_draw_pays_nobody_and_a_taken_cell_passes_no_turn() -> None:
    episode = start(opponent="none")
    assert whose_turn(play(episode, "5")) == "O"
    taken = play(episode, "5")
    assert taken.outcomes[0] is not None and not taken.outcomes[0].valid
    assert whose_turn(taken) == "O" and taken.extras is not None
    assert taken.extras.valid_actions == list("12346789") and taken.extras.expert_action == "1"
    last = play(episode, *"13746289")
    assert last.success and last.extras is not None and last.extras.score == 1
    assert (last.parts, last.reward, last.end_reason) == ("It is a draw.\nO X X\nX X O\nO O X", 0, EndReason.TERMINAL)


def test_against_an_opponent_there_is_one_agent_and_a_loss_is_fined() -> None:
    lost = start(opponent="expert", opening=0)
    while not lost.end_reason:
        board = lost.environment.board
        worst = min(free_cells(board), key=lambda cell: -value(take(board, cell)))
        last = lost.turn([str(worst + 1)], EXTRAS)
    assert last.reward == -1 and last.success is False and last.extras is not None and last.extras.score == 0
    episode = start(opponent="random", side="X")
    transition = play(episode, "5")
    assert whose_turn(transition) == "" and episode.environment.board.count("O") == 1
    assert episode.turn(["5"], Want()).parts.startswith("You are X.\n")
    assert start(side="O").environment.board.count("X") == 1


@given(SEEDS, st.sampled_from(["random", "expert"]), st.integers(0, 4))
def test_the_expert_gets_what_the_position_is_worth(seed: int, opponent: str, opening: int) -> None:
    episode = start(seed=seed, dynamics_seed=seed, opponent=opponent, opening=opening)
    scores, reward = [], 0.0
    while not episode.end_reason:
        action = episode.environment.expert_action()
        assert action in episode.environment.valid_actions()
        transition = episode.turn([action], EXTRAS)
        assert transition.extras is not None
        scores.append(transition.extras.score)
        reward += transition.reward
    assert transition.success and scores[-1] == 1 and all(score == 0.9 for score in scores[:-1])
    worth = episode.environment.worth
    assert reward == worth or (opponent == "random" and reward > worth)


def test_perfect_play_is_that_of_a_plain_search() -> None:
    @functools.cache
    def plain(board: str) -> int:
        if winning_line(board):
            return -1
        return max((-plain(take(board, cell)) for cell in free_cells(board)), default=0)

    reached, fresh = {EMPTY}, {EMPTY}
    while fresh:
        fresh = {take(board, cell) for board in fresh if not is_over(board) for cell in free_cells(board)} - reached
        reached |= fresh
    assert len(reached) == 5478
    for board in reached:
        assert (value(board) > 0) - (value(board) < 0) == plain(board)
        assert all(-plain(take(board, cell)) == plain(board) for cell in best_cells(board))
        assert bool(best_cells(board)) is not is_over(board)


async def test_a_caller_is_told_whose_turn_it_is() -> None:
    server = EnvironmentServer(Registry([TicTacToe]), ServerConfig(port=0))
    await server.start()
    try:
        async with Fleet(server.address) as fleet:
            sessions = await fleet.open("tic_tac_toe-v1", seed=1, count=3, options={"opponent": "none"})
            assert [session.observation.agent_id for session in sessions] == ["X"] * 3
            moved = await fleet.step_many(sessions, ["1", "2", "2"])
            assert [transition.observation.agent_id for transition in moved] == ["O"] * 3
            assert (await sessions[0].fork())[0].observation.agent_id == "O"
    finally:
        await server.stop(0)
