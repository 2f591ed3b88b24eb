"""game_2048-v1: slides and merges, the end, rewards, options and the expert."""

import functools
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server.episodes.live_episode import Limits, Want
from starpod.environments.game_2048 import ACTIONS, Game2048
from starpod.environments.game_2048.board import moves, slide, slide_line
from starpod.v1.values import EndReason
from tests.environments import episodes

start = functools.partial(episodes.start, Game2048)
LINES = st.lists(st.sampled_from([0, 2, 4, 8, 16]), min_size=2, max_size=6).map(tuple)
BOARDS = st.lists(st.sampled_from([0, 2, 4, 8]), min_size=9, max_size=9).map(tuple)


@pytest.mark.parametrize(
    ("line", "slid", "merged"),
    [
        ((2, 2, 2, 2), (4, 4, 0, 0), 8),
        ((2, 2, 2, 0), (4, 2, 0, 0), 4),
        ((4, 2, 2, 0), (4, 4, 0, 0), 4),
        ((2, 2, 4, 0), (4, 4, 0, 0), 4),  # a tile that merging made does not merge again
        ((0, 2, 0, 2), (4, 0, 0, 0), 4),
        ((2, 4, 2, 4), (2, 4, 2, 4), 0),
    ],
)
def test_a_line_slides_to_its_start(line: Any, slid: Any, merged: int) -> None:
    assert slide_line(line) == (slid, merged)


@given(line=LINES)
def test_a_slide_keeps_the_sum_and_leaves_no_gap(line: Any) -> None:
    slid, merged = slide_line(line)
    assert sum(slid) == sum(line) and len(slid) == len(line)
    assert bool(merged) == (len([*filter(None, slid)]) < len([*filter(None, line)]))
    assert list(slid) == sorted(slid, key=lambda tile: not tile)


@given(board=BOARDS)
def test_the_four_moves_are_one_move_on_a_turned_board(board: Any) -> None:
    def turned(cells: Any) -> Any:
        return tuple(cells[row * 3 + column] for column in (2, 1, 0) for row in range(3))

    for action, further in zip(("Up", "Left", "Down", "Right"), ("Left", "Down", "Right", "Up"), strict=True):
        slid, merged = slide(board, 3, action)
        assert (turned(slid), merged) == slide(turned(board), 3, further)


def test_a_move_that_moves_nothing_is_an_invalid_outcome_and_adds_no_tile() -> None:
    for reward, paid in (("log", 0.0), ("raw", -0.1), ("target", 0.0)):
        episode = start(board=[[2, 4], [0, 0]], target=32, reward=reward)
        before = episode.environment.board
        transition = episode.turn(["Up"], Want())
        outcome = transition.outcomes[0]
        assert outcome is not None and not outcome.valid and not outcome.effective
        assert (transition.reward, episode.environment.board) == (paid, before)


def test_the_target_is_paid_once_where_it_alone_is_paid() -> None:
    rewards = []
    episode = start(board=[[8, 8], [8, 8]], target=16, reward="target")
    for action in ("Right", "Up"):
        rewards.append(episode.turn([action], Want()).reward)
    assert rewards == [1.0, 0.0]
    assert max(episode.environment.board) == 32


def test_new_tiles_come_from_the_dynamics_seed_alone() -> None:
    def after(seed: int, luck: int) -> Any:
        episode = start(seed, luck)
        first = episode.environment.board
        episode.turn([episode.environment.valid_actions()[0]], Want())
        return first, episode.environment.board

    assert len({after(1, luck)[1] for luck in range(20)}) > 1
    tiles = Counter(max(set(after(seed, 0)[0])) for seed in range(400))
    assert 0.1 < tiles[4] / 400 < 0.28  # one of two tiles is a 4 with probability 0.19


def test_the_game_ends_when_nothing_moves_or_at_the_target() -> None:
    episode = start(board=[[8, 8], [2, 4]], target=16, end="target")
    transition = episode.turn(["Left"], Want())
    assert (transition.end_reason, transition.success) == (EndReason.TERMINAL, True)
    assert transition.reward == pytest.approx(0.40875, abs=1e-4)
    assert episode.environment.expert_action() is None
    assert episode.environment.score() == 1
    limited = start(limits=Limits(max_turns=1), board=[[8, 8, 0], [0] * 3, [0] * 3], target=16)
    transition = limited.turn(["Left"], Want())
    assert (transition.truncated, transition.success) == (True, True), "a limit takes no success away"
    locked = start(board=[[2, 8], [4, 0]], target=32, two_probability=1)
    transition = locked.turn(["Right"], Want())
    assert locked.environment.board == (2, 8, 2, 4)
    while not transition.end_reason:
        transition = locked.turn([locked.environment.valid_actions()[0]], Want())
    assert transition.end_reason is EndReason.TERMINAL
    assert transition.success is (max(locked.environment.board) >= 32)
    assert moves(locked.environment.board, 2) == []


def test_the_expert_reaches_256_where_a_random_player_does_not() -> None:
    for seed in range(2):
        episodes.play_expertly(start(seed, seed, target=256, end="target"))
        rng = random.Random(seed)
        other = start(seed, seed, target=256, end="target")
        while not other.end_reason:
            transition = other.turn([rng.choice(ACTIONS)], Want())
        assert not transition.success
