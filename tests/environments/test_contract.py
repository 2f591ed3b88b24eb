"""Rules for every environment: it refuses invalid options and actions, and draws its start from the seed only."""

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from starpod.env_server import Limits, ToolCall
from starpod.env_server.authoring.environment import Environment
from starpod.env_server.episodes.live_episode import Want
from starpod.environments.bandit import Bandit
from starpod.environments.coding import Coding
from starpod.environments.countdown import Countdown
from starpod.environments.desk import Desk
from starpod.environments.frozen_lake import FrozenLake
from starpod.environments.game_2048 import Game2048
from starpod.environments.house import House
from starpod.environments.rubiks_cube import RubiksCube
from starpod.environments.search_qa import SearchQA
from starpod.environments.sokoban import Sokoban
from starpod.environments.sudoku import Sudoku
from starpod.environments.word_problems import WordProblems
from tests.environments.episodes import CASES, Case, each_case, start, start_case

ROOM = "#####\n#PXO#\n#####"
PUZZLE, SOLUTION, AMBIGUOUS = "2.1. .1.. ..24 4.3.", "2413 3142 1324 4231", "." * 12 + "1234"

REFUSED: dict[type[Environment], list[tuple[dict[str, Any], str]]] = {
    Bandit: [
        ({"pair": ("Cat", "cat")}, "differ in more than case"),
        ({"pair": ("Cat", " Dog")}, "cannot name an arm"),
        ({"low_reward": 0.3}, "the high arm pays 0.25 on average"),
        ({"high_probability": 1.5}, "less than or equal to 1"),
        ({"split": "validation"}, "'train' or 'test'"),
        ({"arms": 3}, "Extra inputs are not permitted"),
    ],
    Coding: [({"max_instructions": 9_000_000}, "raise max_seconds")],
    Countdown: [
        ({"numbers": [3, 5]}, "give both or neither"),
        ({"target": 5}, "give both or neither"),
        ({"numbers": [0, 5], "target": 5}, "1 to 4 whole numbers"),
        ({"numbers": [1] * 5, "target": 5}, "1 to 4 whole numbers"),
        ({"numbers": [3, 5], "target": 8, "operators": "+-*/"}, "operators only affect drawn puzzles"),
        ({"min_count": 4, "max_count": 3}, "min_count 4 is above max_count 3"),
        ({"operators": "+"}, "'\\+-' or '\\+-\\*/'"),
    ],
    Desk: [({"tasks": tasks}, "name one or more of schedule") for tasks in ([], ["sleep"], ["keep", "keep"])],
    FrozenLake: [
        ({"map": []}, "1 to 32 rows"),
        ({"map": ["SF", "FFG"]}, "row 1 has 3 tiles, row 0 has 2"),
        ({"map": ["SF", "xG"]}, "row 1 has 'x'; use only S, F, H and G"),
        ({"map": ["FF", "FG"]}, "has 0 tiles S; it needs one start"),
        ({"map": ["SG", "FG"]}, "has 2 tiles G; it needs one goal"),
        ({"map": ["SH", "HG"]}, "no path leads from S to G"),
        ({"map": ["SG"], "size": 5}, "size only affect drawn maps"),
        ({"size": 1}, "greater than or equal to 2"),
        ({"success_rate": 0}, "greater than 0"),
        ({"symbols": {"ice": "PP"}}, "one visible character"),
        ({"symbols": {"ice": "P"}}, "player and ice are both 'P'"),
        ({"observation": "picture"}, "'grid', 'coord', 'grid_coord' or 'local'"),
    ],
    Game2048: [
        ({"target": 100}, "no power of two"),
        ({"size": 2, "target": 64}, "lower target"),
        ({"board": [[2, 4], [4, 2]]}, "nothing can move"),
        ({"board": [[2, 3], [0, 0]]}, "powers of two"),
        ({"board": [[2, 2], [0]]}, "row 2 has 1 cells"),
        ({"board": [[16, 2], [0, 0]], "target": 16}, "raise target"),
        ({"board": [[2, 2], [0, 0]], "size": 3, "target": 16}, "leave size out"),
    ],
    House: [({"tasks": tasks}, "name one or more of place") for tasks in ([], ["cook"])],
    RubiksCube: [
        ({"scramble": ["X"]}, "no quarter turn"),
        ({"scramble": ["R", "R'"]}, "unsolved"),
        ({"scramble": []}, "unsolved"),
        ({"scramble": ["R"], "scramble_depth": 3}, "leave out"),
        ({"scramble_depth": 2, "min_distance": 3}, "raise scramble_depth"),
        ({"scramble_depth": 11, "min_distance": 11}, "set scramble_depth to 22"),
    ],
    SearchQA: [({"min_hops": 3}, "lower it")],
    Sokoban: [
        ({"layout": "#####\n#P_O#\n#####"}, "0 boxes and 1 targets"),
        ({"layout": "#####\n#_XO#\n#####"}, "0 players"),
        ({"layout": "#####\n#PXO\n#####"}, "row 1 of the layout has 4 cells, row 0 has 5"),
        ({"layout": "#####\n#P?O#\n#####"}, r"row 1, column 2 of the layout is '\?'; the symbols are: # wall"),
        ({"layout": "#####\n#P_√#\n#####"}, "on a target already"),
        ({"layout": "#####\n#P_O#\n#__X#\n#####"}, "no sequence of moves solves"),
        ({"layout": ROOM, "rows": 4}, "layout has 3 rows, the option rows says 4"),
        ({"layout": ROOM, "boxes": 2}, "layout has 1 boxes"),
        ({"layout": ROOM, "max_solution": 2}, "leave it out if you give a layout"),
        ({"layout": []}, "3 to 64 rows"),
        ({"min_solution": 5, "max_solution": 4}, "max_solution 4 is below min_solution 5"),
        ({"rows": 4, "columns": 4}, "at least 4x5"),
        ({"boxes": 5}, "take at most 4"),
        ({"symbols": {"wall": "X"}}, "share the symbol 'X'"),
        ({"symbols": {"wall": "##"}}, "at most 1 character"),
        ({"symbols": {"wall": " "}}, "give one visible character"),
    ],
    Sudoku: [
        ({"puzzle": "123"}, "puzzle is 3 characters: write the 16 or 81 cells"),
        ({"puzzle": [[0] * 4] * 3}, "puzzle has 3 rows: make it 4, 9 or 16"),
        ({"puzzle": [[0] * 4, [0] * 4, [0] * 4, [0] * 5]}, "row 4 of puzzle has 5 cells"),
        ({"puzzle": [[0, 0, 0, 7]] * 4}, "row 1 of puzzle holds 7"),
        ({"puzzle": AMBIGUOUS}, "more than one solution: give more digits, or say with `solution`"),
        ({"puzzle": "11.." + "." * 12}, "no solution: a digit is wrong"),
        ({"puzzle": SOLUTION}, "no empty cell"),
        ({"puzzle": PUZZLE, "size": 16}, "puzzle has 4 rows, the option size says 16"),
        ({"puzzle": PUZZLE, "difficulty": "hard"}, "leave it out if you give a puzzle"),
        ({"puzzle": PUZZLE, "solution": "3412 3142 1324 4231"}, r"solution has 3 at \(1,1\), puzzle has 2"),
        ({"puzzle": AMBIGUOUS, "solution": "1" * 12 + "1234"}, "no full grid without clashes"),
        ({"solution": SOLUTION}, "solution goes with a puzzle"),
        ({"size": 5}, "size"),
    ],
    WordProblems: [({"min_steps": 5, "max_steps": 2}, "lower it")],
}


@pytest.mark.parametrize("kind", REFUSED)
def test_options_that_make_no_sense_are_refused(kind: type[Environment]) -> None:
    for options, message in REFUSED[kind]:
        with pytest.raises(ValidationError, match=message):
            kind.Options(**options)


LIMITS = {
    Bandit: Limits(1, 1, 1),
    Countdown: Limits(1, 1, 1),
    FrozenLake: Limits(5, 5, 10),
    Sokoban: Limits(5, 5, 10),
}


def test_default_limits_are_the_published_ones() -> None:
    assert {kind: kind.spec.limits for kind in LIMITS} == LIMITS


SENSELESS: dict[type[Environment], list[Any]] = {
    Bandit: ["", "left", "1", "Phoenixs"],
    Coding: [7, None, "x" * 20_001],
    Desk: [
        *("", "hello there", "finish {", "finish [1]", 'finish {"now": true}', "finish " + "[" * 5000, 7),
        *('list_events {"day": "Sunday"}', 'read_mail {"id": "1"}', 'read_mail {"id": true}', 'read_mail {"id": 99}'),
        *('read_file {"name": "../../etc/passwd"}', 'write_file {"name": "", "text": ""}'),
        'send_mail {"to": "nobody@nowhere", "subject": "", "body": ""}',
        'add_event {"title": "a", "day": "Monday", "start": 16, "hours": 2, "attendee": ""}',
        'write_file {"name": "a", "text": "%s"}' % ("x" * 2001),
        *(ToolCall("no_such_tool", {}), ToolCall("find_contact", {}), ToolCall("delete_event", {"id": 10**30})),
    ],
    FrozenLake: ["", "Jump"],
    House: ["", "fly", "take", 7, "go to " + "x" * 200, "GO TO nowhere 1", "put apple 1 in fridge 1"],
    SearchQA: ["", "search[]", "search[ ]", "find[x]", "the answer", 3, "search[" + "x" * 1000 + "]"],
    Sokoban: ["Jump", "wait", ""],
    Sudoku: ["9" * 5000 + ",1,1", None, 5, b"1,2,4", "9" * 10_000 + ",1,1"],
    WordProblems: [
        *("", "42", "calculate[", "calculate[a]", "calculate[__import__('os')]", "answer[x]", "answer[1e5]", 7),
        "1" * 9999,
    ],
}
SAID = {Desk: "Error: ", House: "Nothing happens."}
"""How the observation after a senseless action begins where it says what was wrong."""


@pytest.mark.parametrize(("kind", "action"), [(kind, action) for kind, rows in SENSELESS.items() for action in rows])
def test_a_senseless_action_is_an_invalid_outcome_that_changes_nothing(kind: type[Environment], action: Any) -> None:
    episode = start(kind, 1, **({"pair": ("Phoenix", "Dragon")} if kind is Bandit else {}))
    key = episode.environment.state_key()
    transition = episode.turn([action], Want())
    outcome = transition.outcomes[0]
    assert outcome is not None and not outcome.valid and not outcome.effective and not transition.end_reason
    assert outcome.reward == (-0.1 if kind is Sudoku else 0)
    assert kind is Sudoku or episode.environment.state_key() == key  # its key holds the steps that are left
    assert str(transition.parts).startswith(SAID.get(kind, "")) and len(transition.parts) < 3000


@settings(max_examples=5)
@given(seed=st.integers(0, 2**64 - 1), luck=st.integers(0, 2**64 - 1))
@each_case
def test_the_seed_alone_draws_the_start(case: Case, seed: int, luck: int) -> None:
    one, other = (start_case(case, seed, dynamics_seed) for dynamics_seed in (seed, luck))
    assert one.environment.observe() == other.environment.observe()
    assert one.environment.state_key() == other.environment.state_key()


@pytest.mark.parametrize("kind", [*dict.fromkeys(case[0] for case in CASES), Coding])
def test_every_mode_draws_the_state(kind: type[Environment]) -> None:
    episode = start(kind, 2)
    modes = kind.spec.render_modes
    before = {mode: episode.environment.render(mode) for mode in modes}
    for _ in range(6):
        if not episode.end_reason:
            episode.turn([episode.environment.expert_action()], Want())
    for mode in modes:
        after = episode.environment.render(mode)
        assert after != before[mode], mode
        if mode == "png":
            assert min(Image.open(io.BytesIO(after)).size) >= 100  # type: ignore[arg-type]
