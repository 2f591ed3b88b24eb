"""frozen_lake-v1: Gymnasium's dynamics, maps, observations, score and expert."""

import functools
import io
import math
from collections import Counter
from typing import Any

import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from starpod.env_server.episodes.live_episode import LiveEpisode, Want
from starpod.environments.frozen_lake import ACTIONS, FrozenLake
from starpod.v1.values import EndReason
from tests.environments import episodes
from tests.golden import Draws

SEEDS = st.integers(0, 2**64 - 1)
SHAPES = st.fixed_dictionaries(
    {
        "size": st.integers(2, 8),
        "frozen_probability": st.floats(0.5, 1),
        "success_rate": st.sampled_from([0.8, 1 / 3, 1.0, 0.05]),
    }
)


start = functools.partial(episodes.start, FrozenLake)


@given(seed=SEEDS, shape=SHAPES)
def test_transitions_are_gymnasiums(seed: int, shape: dict[str, Any]) -> None:
    environment = start(seed, **shape).environment
    success_rate = environment.options.success_rate
    reference = FrozenLakeEnv(desc=list(environment.map), success_rate=success_rate, is_slippery=success_rate < 1)
    side = (1 - success_rate) / 2
    # One draw in the middle of each stretch of the unit interval, with the stretch's length as its probability.
    stretches = ((side / 2, side), (side + success_rate / 2, success_rate), (1 - side / 2, side))
    for position, tile in enumerate("".join(environment.map)):
        if tile in "HG":
            continue
        for number, action in enumerate(ACTIONS):
            ours: Counter[tuple[int, float, bool]] = Counter()
            for draw, probability in stretches:
                environment.position = position
                environment._dynamics = Draws([draw])
                outcome = environment.step(action)
                ours[environment.position, outcome.reward, outcome.terminated] += probability
            theirs: Counter[tuple[int, float, bool]] = Counter()
            for probability, there, reward, terminated in reference.P[position][number]:
                theirs[there, reward, terminated] += probability
            assert {key for key, p in ours.items() if p} == {key for key, p in theirs.items() if p}
            for key, probability in theirs.items():
                assert math.isclose(ours[key], probability, abs_tol=1e-12)


def test_slips_know_nothing_of_the_map() -> None:
    """The original uses the same draw for tile t of the map and for the slip of step t."""
    slipped = {"H": [0, 0], "F": [0, 0]}
    for seed in range(1500):
        environment = start(seed, seed).environment
        tile = "".join(environment.map)[1]
        if tile in slipped:
            slips = environment.dynamics.random(), environment.dynamics.random()
            slipped[tile][0] += slips[1] >= 0.9
            slipped[tile][1] += 1
    for count, whole in slipped.values():
        assert whole > 100
        assert count / whole < 0.2


@given(seed=SEEDS, shape=SHAPES)
def test_drawn_maps_can_be_solved(seed: int, shape: dict[str, Any]) -> None:
    environment = start(seed, **shape).environment
    assert [len(row) for row in environment.map] == [shape["size"]] * shape["size"]
    FrozenLake.Options(map=environment.map)  # refuses maps without a path, or with two starts


def test_drawn_maps_have_as_many_holes_as_asked() -> None:
    for probability in (0.9, 0.8):
        tiles = "".join("".join(start(seed, frozen_probability=probability).environment.map) for seed in range(1000))
        share = tiles.count("H") / (len(tiles) - 2000)
        assert abs(share - (1 - probability)) < 0.025


@given(seed=SEEDS)
def test_the_expert_needs_the_fewest_moves_without_slip(seed: int) -> None:
    episode = start(seed, size=6, frozen_probability=0.7, success_rate=1.0)
    fewest = _fewest_moves(episode.environment.map)
    played = episodes.play_expertly(episode)
    assert (len(played), played[-1].reward) == (fewest, 1.0)


def _fewest_moves(rows: tuple[str, ...]) -> int:
    """Return the length of the shortest path, by an independent search over (row, column)."""
    at = {(r, c): tile for r, row in enumerate(rows) for c, tile in enumerate(row)}
    seen = {place for place, tile in at.items() if tile == "S"}
    edge, moves = set(seen), 0
    while not any(at[place] == "G" for place in edge):
        edge = {(r + d, c + e) for r, c in edge for d, e in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        edge = {place for place in edge if at.get(place, "H") != "H"} - seen
        seen |= edge
        moves += 1
    return moves


@pytest.mark.parametrize("success_rate", [0.8, 1 / 3])
def test_the_expert_is_close_to_the_best_within_an_episode(success_rate: float) -> None:
    """Against the best that any policy can do in 10 actions, by dynamic programming over Gymnasium's table."""
    expert = best = 0.0
    for seed in range(40):
        environment = start(seed, frozen_probability=0.8, success_rate=success_rate).environment
        origin = environment.position
        table = FrozenLakeEnv(desc=list(environment.map), success_rate=success_rate).P
        choice = {}
        for position, tile in enumerate("".join(environment.map)):
            if tile in "SF":
                environment.position = position
                choice[position] = ACTIONS.index(environment.expert_action())
        expert_values = best_values = dict.fromkeys(table, 0.0)
        for _ in range(10):
            expert_values = {p: _worth(table[p][choice.get(p, 0)], expert_values) for p in table}
            best_values = {p: max(_worth(table[p][action], best_values) for action in range(4)) for p in table}
        expert += expert_values[origin]
        best += best_values[origin]
    assert 0.97 * best < expert <= best + 1e-9


def _worth(transitions: list[tuple[float, int, float, bool]], values: dict[int, float]) -> float:
    return sum(p * (reward + (0 if ended else values[there])) for p, there, reward, ended in transitions)


def test_the_expert_takes_the_first_of_equals() -> None:
    environment = start(map=["SFG", "HFH", "HHH"], success_rate=0.8).environment
    assert environment.expert_action() == "Right"
    detour = start(map=["FFFF", "SHHG", "FFFF"], success_rate=1.0).environment
    assert detour.expert_action() == "Down"  # both ways are as long, and Down comes before Up


@pytest.mark.parametrize("success_rate", [1.0, 0.8])
def test_the_expert_knows_the_way_from_afar(success_rate: float) -> None:
    """Along one lane of 526 moves to and fro between holes, where values shrink to nothing."""
    lanes = ["F" * 32, "H" * 31 + "F", "F" * 32, "F" + "H" * 31] * 7 + ["F" * 32, "H" * 31 + "F", "G" + "F" * 31]
    lanes[0] = "S" + lanes[0][1:]
    environment = start(map=lanes, success_rate=success_rate).environment
    assert _fewest_moves(environment.map) == 526
    for row, lane in enumerate(lanes):
        for column, tile in enumerate(lane):
            if tile in "SF":
                turned = column == (0 if row % 4 in (2, 3) else 31)
                along = "Down" if turned else "Left" if row % 4 == 2 else "Right"
                environment.position = 32 * row + column
                assert environment.expert_action() == along, (row, column)


def test_the_goal_pays_as_asked() -> None:
    episode = start(map=["SG"], success_rate=1, goal_reward=10)
    assert "earns 10." in episode.environment.instructions()
    transition = LiveEpisode.load(FrozenLake, episode.save()).turn(["Right"], Want())
    assert (transition.reward, transition.success) == (10.0, True)
    assert start(map=["SG"], success_rate=1).turn(["Right"], Want()).reward == 1.0


def test_a_hole_ends_without_reward_and_the_border_holds() -> None:
    episode = start(map=["SH", "FG"], success_rate=1)
    transition = episode.turn(["right", "Down"], Want())
    assert (transition.reward, transition.success, transition.end_reason) == (0.0, False, EndReason.TERMINAL)
    assert transition.outcomes[1] is None
    assert episode.environment.score() == 0
    assert transition.observation.parts == "_X\n_G"
    transition = start(map=["SFG"], success_rate=1).turn(["Up", "Left", "Down", "Right"], Want())
    assert [outcome.effective for outcome in transition.outcomes] == [False, False, False, True]


SLOPE = {"map": ["SFF", "HFG"], "success_rate": 1}


BOARD = "Board size: 2 rows x 3 cols (zero-indexed).\nStart: (0, 0)\nGoal: (1, 2)\n"


@pytest.mark.parametrize(
    ("observation", "actions", "text"),
    [
        ("grid", ["Right"], "_P_\nO_G"),
        ("coord", ["Right"], f"{BOARD}Player: (0, 1)\nHoles: (1, 0)"),
        ("grid_coord", ["Down"], f"Coordinates: \n{BOARD}Player in hole: (1, 0)\nHoles: (1, 0)\nGrid Map: \n___\nX_G"),
        ("local", [], "P 0 0 G 1 2 Down Right # O _ #"),
        ("local", ["Right", "Down"], "P 1 1 G 1 2 - Right O # G _"),
        ("local", ["Right", "Right", "Down"], "√ 1 2 G 1 2 - - _ # # _"),
    ],
)
def test_observations(observation: str, actions: list[str], text: str) -> None:
    episode = start(observation=observation, **SLOPE)
    assert episode.turn(actions, Want()).observation.parts == text


@pytest.mark.parametrize("observation", FrozenLake.spec.observation_modes)
def test_own_symbols_are_shown_and_explained(observation: str) -> None:
    symbols = {"player": "A", "ice": ".", "hole": "B", "goal": "C", "player_in_hole": "D", "player_on_goal": "E"}
    environment = start(observation=observation, symbols={**symbols, "edge": "%"}, **SLOPE).environment
    seen = environment.observe()
    text = environment.instructions()
    if observation != "coord":
        assert "A" in seen
        assert not set("P_O√X") & set(seen.replace("Player", "").replace("Board", ""))
        assert "A you, . ice, B hole, C goal, D you in a hole, E you on the goal" in text
    assert ("%" in text) == (observation == "local")
    assert "2 rows and 3 columns" in text
    assert "slippery" not in text
    assert "probability 0.333" in start(success_rate=1 / 3).environment.instructions()


def test_equal_states_equal_keys() -> None:
    keys = set()
    for observation in FrozenLake.spec.observation_modes:
        for route in (["Right", "Down"], ["Left", "Right", "Right", "Left", "Up", "Down"]):
            episode = start(observation=observation, **SLOPE)
            episode.turn(route, Want())
            keys.add(episode.environment.state_key())
    assert len(keys) == 1
    assert start(**SLOPE).environment.state_key() not in keys
    other = start(map=["SFH", "HFG"], success_rate=1)
    other.turn(["Right", "Down"], Want())
    assert other.environment.state_key() not in keys, "another map with the same surroundings"


def test_sessions_on_one_map_share_their_tables() -> None:
    one, other = start(0, 0, **SLOPE).environment, start(1, 1, **SLOPE).environment
    assert one._cached_lake is other._cached_lake
    assert one._cached_lake is not None


def test_every_position_has_its_picture() -> None:
    environment = start(**SLOPE).environment
    frames = set()
    for environment.position in range(6):
        frames.add(environment.render("png"))
    assert len(frames) == 6
    assert {Image.open(io.BytesIO(frame)).size for frame in frames} == {(3 * 64 + 32, 2 * 64 + 32)}
    environment.position = 1
    assert environment.render("text") == "┌───────┐\n│ _ P _ │\n│ O _ G │\n└───────┘"
    assert Image.open(io.BytesIO(start(size=16).environment.render("png"))).size == (792, 792)
