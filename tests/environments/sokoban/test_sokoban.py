"""Properties of sokoban-v1."""

import functools
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server.authoring.environment import OptionsError
from starpod.env_server.episodes.live_episode import Want
from starpod.environments.sokoban import Sokoban, SokobanOptions, generation
from starpod.environments.sokoban.generation import generate
from starpod.environments.sokoban.room import MOVES
from starpod.environments.sokoban.solver import solve
from starpod.v1.values import EndReason
from tests.environments import episodes

start = functools.partial(episodes.start, Sokoban)


rooms = st.builds(
    lambda rows, columns, boxes, depth: {"rows": rows, "columns": columns, "boxes": boxes, "search_depth": depth},
    st.integers(5, 8),
    st.integers(5, 8),
    st.integers(1, 2),
    st.integers(8, 60),
)
seeds = st.integers(0, 2**64 - 1)


@given(seeds, rooms)
def test_every_generated_room_is_fit_to_play_and_solvable(seed: int, options: dict[str, int]) -> None:
    environment = start(seed, **options).environment
    board, player, boxes = environment.board, environment.player, environment.boxes
    assert (board.rows, board.columns) == (options["rows"], options["columns"])
    assert len(boxes) == len(board.targets) == options["boxes"]
    assert player in board.floor and player not in boxes
    assert boxes <= board.floor and boxes.isdisjoint(board.targets)
    for cell in board.floor:
        assert {cell + delta for delta in board.deltas.values()} <= set(range(len(board.text)))
        assert "\n" not in board.text[cell]
    assert isinstance(solve(board, player, boxes), list)


@given(seeds, st.integers(1, 6), st.integers(0, 6))
def test_the_solution_is_as_long_as_asked(seed: int, least: int, more: int) -> None:
    environment = start(seed, min_solution=least, max_solution=least + more).environment
    plan = solve(environment.board, environment.player, environment.boxes)
    assert isinstance(plan, list)
    assert least <= len(plan) <= least + more


def test_a_search_for_an_impossible_length_ends_and_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_ROOMS", 20)
    with pytest.raises(ValueError, match=r"none of 20 rooms .* of 60 to"):
        start(min_solution=60)
    # On large boards a room costs a hundred times what it costs on small ones.
    large = {"rows": 11, "columns": 11, "boxes": 3}
    room = start(3, **large).environment.render("text")
    monkeypatch.setattr(generation, "MAX_RESET_STATES", 10_000)
    with pytest.raises(OptionsError, match=r"none of [1-9] rooms .* of 200 to"):
        start(3, **large, min_solution=200)
    assert start(3, **large).environment.render("text") == room


@pytest.mark.parametrize(
    ("options", "length", "walls"),
    [
        ({}, 4.04, 0.342),
        ({"search_depth": 30}, 4.00, 0.342),
        ({"rows": 8, "columns": 8, "boxes": 2, "search_depth": 10}, 5.82, 0.496),
    ],
)
def test_rooms_are_like_the_published_ones(options: dict[str, int], length: float, walls: float) -> None:
    """Means over fixed seeds, with room for some four standard errors."""
    lengths, shares = [], []
    for seed in range(300):
        made = {"rows": 6, "columns": 6, "boxes": 1, "search_depth": 300} | options
        board, player, boxes = generate(random.Random(seed), SokobanOptions(**made))
        plan = solve(board, player, boxes)
        assert isinstance(plan, list)
        lengths.append(len(plan))
        shares.append(1 - len(board.floor) / ((made["rows"] - 2) * (made["columns"] - 2)))
    assert statistics.mean(lengths) == pytest.approx(length, abs=0.5)
    assert statistics.mean(shares) == pytest.approx(walls, abs=0.04)


@given(seeds, rooms)
def test_the_expert_solves_in_the_fewest_moves(seed: int, options: dict[str, int]) -> None:
    episode = start(seed, **options)
    environment = episode.environment
    plan = solve(environment.board, environment.player, environment.boxes)
    assert isinstance(plan, list)
    assert environment.expert_action() == episode.fork(None).environment.expert_action()
    assert len(episodes.play_expertly(episode, rising=False)) == len(plan)


@given(seeds, st.lists(st.sampled_from(tuple(MOVES)), min_size=1, max_size=40))
def test_the_state_key_is_the_state_without_its_history(seed: int, actions: list[str]) -> None:
    episode = start(seed, rows=6, columns=6, search_depth=20)
    environment = episode.environment
    seen: dict[Any, bytes] = {}
    for action in actions:
        if episode.end_reason:
            break
        transition = episode.turn([action], Want(state_key=True))
        state = environment.player, environment.boxes
        key = transition.observation.state_key
        assert len(key) == 16
        assert seen.setdefault(state, key) == key
    assert len(set(seen.values())) == len(seen)


def test_the_push_that_solves_pays_10_9_and_ends() -> None:
    episode = start(layout="#####\n#PXO#\n#####")
    transition = episode.turn(["right"], Want())
    assert transition.reward == 10.9
    assert transition.terminated and transition.success
    assert episode.environment.render() == "#####\n#_P√#\n#####"


def test_on_off_and_blocked() -> None:
    episode = start(layout=["#######", "#_P√__#", "#_XO__#", "#_____#", "#######"])
    off = episode.turn(["Right"], Want())
    assert off.reward == -1.1 and not off.end_reason
    blocked = episode.turn(["Up"], Want())
    assert blocked.reward == -0.1
    assert not blocked.outcomes[0].effective and blocked.outcomes[0].valid
    for action in ("Left", "Left", "Down"):
        episode.turn([action], Want())
    on = episode.turn(["Right"], Want())
    assert on.reward == 0.9 and not on.end_reason


def test_rewards_are_options() -> None:
    layout = "######\n#PX_O#\n######"
    pay = {"step_reward": -2.0, "box_on_reward": 3.0, "solved_reward": 40.0}
    episode = start(layout=layout, **pay)
    assert [episode.turn(["Right"], Want()).reward for _ in range(2)] == [-2.0, 41.0]


def test_max_steps_truncates_and_solving_on_the_last_one_counts() -> None:
    corridor = "######\n#PX_O#\n######"
    last = start(layout=corridor, max_steps=3).turn(["Left"] * 3, Want())
    assert last.end_reason is EndReason.ENVIRONMENT_LIMIT
    assert last.truncated and last.success is False
    last = start(layout=corridor, max_steps=2).turn(["Right", "Right"], Want())
    assert last.terminated and last.success


def test_a_dead_box_ends_the_experts_advice() -> None:
    episode = start(layout=["######", "#_P__#", "#_X__#", "#____#", "#__O_#", "#____#", "######"])
    environment = episode.environment
    assert environment.expert_action() is not None
    before = environment.score()
    episode.turn(["Down"] * 3, Want())
    assert environment.expert_action() is None
    assert environment.score() < before


# --- observations ----------------------------------------------------------------------------------------------------

LAYOUT = ["######", "#S_X_#", "#√___#", "#____#", "######"]


BOARD = "Board size: 5 rows x 6 cols (zero-indexed).\nTargets: (1, 1), (2, 1)\nBoxes: (1, 3)\n"


@pytest.mark.parametrize(
    ("observation", "layout", "shown"),
    [
        ("coord", LAYOUT, f"{BOARD}Boxes on target: (2, 1)\nPlayer on target: (1, 1)"),
        ("padded", LAYOUT[1:4], " #  S  _  X  _  # \n #  √  _  _  _  # \n #  _  _  _  _  # "),
        ("local", LAYOUT, "S 1 1 - Right # √ # _\nX 1 3 - Left # _ _ _\n√ 2 1 - - S _ # _\nO 1 1\nO 2 1"),
    ],
)
def test_observations(observation: str, layout: list[str], shown: str) -> None:
    assert start(layout=layout, observation=observation).environment.observe() == shown


def test_an_observation_may_be_a_picture() -> None:
    environment = start(layout=LAYOUT, observation="rgb").environment
    (picture,) = environment.observe()
    assert picture.mime == "image/png" and picture.data.startswith(b"\x89PNG")
    assert environment.observe()[0].data == picture.data


symbol_sets = st.lists(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=("Z", "C", "M")),
    min_size=7,
    max_size=7,
    unique=True,
)


@given(seeds, symbol_sets)
def test_custom_symbols_are_what_board_and_legend_show(seed: int, characters: list[str]) -> None:
    names = ("wall", "empty", "target", "box_on_target", "box", "player", "player_on_target")
    symbols = dict(zip(names, characters, strict=True))
    custom = start(seed, symbols=symbols).environment
    default = start(seed).environment
    translation = dict(zip("#_O√XPS", characters, strict=True))
    board = custom.observe()
    assert board == "".join(translation.get(character, character) for character in default.observe())
    for name, symbol in symbols.items():
        assert f"{symbol} {name.replace('_', ' ')}" in custom.instructions()
    again = start(layout=board, symbols=symbols).environment
    assert again.observe() == board
    assert again.state_key() == custom.state_key() == default.state_key()


@pytest.mark.parametrize("symbols", ["default", "letters"])
@pytest.mark.parametrize("observation", ["grid", "grid_coord", "local"])
def test_the_legend_explains_every_symbol_on_the_board(symbols: str, observation: str) -> None:
    environment = start(boxes=2, symbols=symbols, observation=observation).environment
    legend = environment.instructions()
    for symbol in set(environment.render()) - {"\n"}:
        assert f" {symbol} " in legend


@pytest.mark.parametrize(
    "options",
    [{"rows": 4, "columns": 5}, {"rows": 5, "columns": 5, "boxes": 2}, {"boxes": 4}, {"rows": 20, "columns": 20}],
)
def test_the_extremes_can_be_generated(options: dict[str, int]) -> None:
    assert start(7, **options).environment.boxes
