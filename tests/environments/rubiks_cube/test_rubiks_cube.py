"""rubiks_cube-v1: turns, scrambles, shortest solutions, options and the end."""

import functools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.env_server.episodes.live_episode import Want
from starpod.environments.rubiks_cube import ACTIONS, RubiksCube
from starpod.environments.rubiks_cube.cube import SOLVED, hold, is_solved, turn
from starpod.environments.rubiks_cube.environment import scrambled
from starpod.environments.rubiks_cube.solver import best_action, distance
from starpod.v1.values import EndReason
from tests.environments import episodes

start = functools.partial(episodes.start, RubiksCube)
TURNS = st.lists(st.sampled_from(ACTIONS), max_size=30)


@given(turns=TURNS, action=st.sampled_from(ACTIONS))
def test_turns_are_those_of_a_group(turns: list[str], action: str) -> None:
    cube = scrambled(tuple(turns))
    undo = action[0] if action.endswith("'") else action + "'"
    assert turn(turn(cube, action), undo) == cube
    assert scrambled((*turns, *[action] * 4)) == cube
    assert set(Counter(cube).values()) == {4}


def test_turns_of_two_faces_have_the_orders_of_a_cube() -> None:
    """Facts about the real cube: six times R U R' U' is nothing; opposite faces commute and turn the whole cube."""
    assert scrambled(("R", "U", "R'", "U'") * 6) == SOLVED
    assert scrambled(("R", "U", "R'", "U'") * 3) != SOLVED
    assert scrambled(("L", "R")) == scrambled(("R", "L"))
    assert scrambled(("U", "D'")) != SOLVED and is_solved(scrambled(("U", "D'")))


@given(turns=TURNS)
def test_how_a_cube_is_held_changes_no_distance(turns: list[str]) -> None:
    cube = scrambled(tuple(turns))
    turned = turn(turn(cube, "F"), "B'")
    assert hold(turned) == hold(cube)
    assert is_solved(cube) == is_solved(turned)


def test_distances_are_the_published_counts() -> None:
    """The number of 2x2x2 cubes by quarter turns needed (OEIS A079761): 1, 6, 27, 120, 534, 2256, 8969, 33058, ..."""
    edge, seen, counts = [hold(SOLVED)], {hold(SOLVED)}, []
    for _ in range(6):
        counts.append(len(edge))
        edge = list({hold(turn(cube, action)) for cube in edge for action in ACTIONS} - seen)
        seen.update(edge)
    assert counts == [1, 6, 27, 120, 534, 2256]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), depth=st.integers(1, 20))
def test_the_expert_solves_every_cube_in_the_fewest_turns(seed: int, depth: int) -> None:
    episode = start(seed, scramble_depth=depth, max_steps=14)
    fewest = distance(episode.environment.cube)
    assert 1 <= fewest <= min(depth, 14)
    played = episodes.play_expertly(episode)
    assert (len(played), played[-1].reward) == (fewest, 1)
    assert best_action(episode.environment.cube) is None


def test_drawn_scrambles_have_the_requested_distance() -> None:
    for seed in range(30):
        assert distance(start(seed, scramble_depth=6, min_distance=4).environment.cube) >= 4
        assert not is_solved(start(seed, scramble_depth=2).environment.cube)
    assert len({start(seed).environment.cube for seed in range(60)}) == 12


def test_the_last_turn_truncates() -> None:
    episode = start(scramble=["R"], max_steps=2)
    transition = episode.turn(["U", "D", "L"], Want())
    assert (transition.end_reason, transition.success) == (EndReason.ENVIRONMENT_LIMIT, False)
    assert transition.outcomes[2] is None
    assert episode.environment.expert_action() is None


def test_even_the_farthest_cubes_are_drawn_in_little_time() -> None:
    assert distance(start(1, scramble_depth=30, min_distance=11).environment.cube) >= 11
