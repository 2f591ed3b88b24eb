"""Properties of sudoku-v1."""

import contextlib
import functools
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.env_server.episodes.live_episode import Want
from starpod.environments.sudoku import Sudoku
from starpod.environments.sudoku.generation import CLEARED, generate
from starpod.environments.sudoku.grid import clashes, peers
from starpod.environments.sudoku.reading import read_action
from starpod.environments.sudoku.solver import solutions
from starpod.v1.values import EndReason
from tests.environments import episodes

PUZZLE = "2.1. .1.. ..24 4.3."
SOLUTION = "2413 3142 1324 4231"
"""A 4x4 puzzle and its only solution: row by row, with empty cells (1,2), (1,4), (2,1), (2,3), (2,4), ..."""


start = functools.partial(episodes.start, Sudoku)


seeds = st.integers(0, 2**64 - 1)
kinds = st.sampled_from([(4, "easy"), (4, "medium"), (4, "hard"), (9, "easy"), (9, "medium"), (9, "hard")])


def is_complete(grid: bytes, size: int) -> bool:
    side = math.isqrt(size)
    rows = [grid[start : start + size] for start in range(0, size * size, size)]
    boxes = [
        [rows[top + down][left + right] for down in range(side) for right in range(side)]
        for top in range(0, size, side)
        for left in range(0, size, side)
    ]
    return all(sorted(unit) == list(range(1, size + 1)) for unit in (*rows, *zip(*rows, strict=True), *boxes))


@given(seeds, kinds)
def test_every_puzzle_has_one_solution(seed: int, kind: tuple[int, str]) -> None:
    size, difficulty = kind
    puzzle, solution = generate(random.Random(seed), size, difficulty)
    assert is_complete(solution, size)
    assert all(digit in (0, solution[cell]) for cell, digit in enumerate(puzzle))
    assert puzzle.count(0) == int(size * size * CLEARED[difficulty])
    assert list(itertools.islice(solutions(puzzle, size, 10**6), 2)) == [solution]


def test_the_solver_counts_right() -> None:
    found = list(solutions(bytes(16), 4, 10**6))
    assert len(found) == len(set(found)) == 288, "the known number of 4x4 grids"
    assert all(is_complete(grid, 4) for grid in found)


def test_hard_and_large_puzzles() -> None:
    puzzle = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."
    assert is_complete(start(puzzle=puzzle).environment.solution, 9)
    episode = start(3, size=16, difficulty="medium")
    environment = episode.environment
    assert environment.puzzle.count(0) == 128
    assert next(solutions(environment.puzzle, 16, 10**5)) == environment.solution
    assert is_complete(environment.solution, 16)
    episode.turn([environment.expert_action()], Want())
    assert environment.observe().count("[") == 128 + 1  # one in the legend


actions = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=10).map(
    lambda triples: [",".join(map(str, triple)) for triple in triples]
)


@given(seeds, kinds)
@settings(max_examples=15)
def test_the_expert_wins_within_the_default_limits(seed: int, kind: tuple[int, str]) -> None:
    size, difficulty = kind
    episode = start(seed, Sudoku.spec.limits, size=size, difficulty=difficulty)
    cleared = episode.environment.puzzle.count(0)
    played = episodes.play_expertly(episode)
    assert sum(transition.reward for transition in played) == cleared + 10
    assert len(played) == cleared


@given(seeds, actions, st.sampled_from(["refuse", "place"]))
def test_the_expert_mends_what_others_got_wrong(seed: int, played: list[str], conflicts: str) -> None:
    episode = start(seed, size=4, difficulty="hard", max_steps=1000, conflicts=conflicts)
    environment = episode.environment
    for action in played:
        if not episode.end_reason:
            episode.turn([action], Want())
    for _ in range(40):
        if episode.end_reason:
            break
        action = environment.expert_action()
        if action is None:  # wrong digits can lock each other in for good
            assert conflicts == "refuse"
            return
        assert episode.turn([action], Want()).outcomes[0].valid
    assert episode.end_reason is EndReason.TERMINAL


@given(seeds, actions, st.sampled_from(["refuse", "place"]))
def test_valid_actions_are_those_that_are_not_refused(seed: int, played: list[str], conflicts: str) -> None:
    episode = start(seed, size=4, difficulty="hard", max_steps=1000, conflicts=conflicts)
    for action in played:
        if not episode.end_reason:
            episode.turn([action], Want())
    listed = set(episode.environment.valid_actions())
    for row, column, number in itertools.product(range(1, 5), repeat=3):
        action = f"place {number} at row {row} col {column}"
        assert episode.fork(None).environment.step(action).valid == (action in listed)


def test_every_form_of_a_placement() -> None:
    sentences = ["place 4 at row 1 col 2", "PLACE 4 AT ROW 1 COL 2", "place 0000000000004 at row 1 col 2"]
    pairs = ["place 4 at (1, 2)", "place 4 at 1,2", "4 at 1,2", "(1,2,4)", "1,2,4", " I would say: 1, 2, 4. "]
    for text in (*sentences, *pairs):
        assert read_action(text, 4) == (1, 2, 4), text
    transition = start(puzzle=PUZZLE).turn(["1,2,4"], Want())
    assert transition.reward == 1.0
    assert transition.outcomes[0].info["correct_placement"] is True


def test_a_number_out_of_range_is_repeated() -> None:
    outcome = start(puzzle=PUZZLE).turn(["12345678901,1,1"], Want()).outcomes[0]
    assert outcome.info == {"error": "Row 12345678901 is out of range (1-4)"}


def test_the_four_rewards() -> None:
    episode = start(puzzle=PUZZLE)
    wrong = episode.turn(["1,2,3"], Want())  # right is 4
    assert wrong.reward == 0.5 and not wrong.outcomes[0].info["correct_placement"]
    for invalid in ("1,4,1", "1,1,3", "5,1,1", "what", "1,2,3"):
        transition = episode.turn([invalid], Want())
        assert transition.reward == -0.1
        assert not transition.outcomes[0].valid and not transition.outcomes[0].effective
    while not episode.end_reason:
        last = episode.turn([episode.environment.expert_action()], Want())
    assert last.reward == 11.0 and last.success


def test_every_action_is_a_step_and_solving_on_the_last_one_counts() -> None:
    episode = start(puzzle=PUZZLE)
    ends = [episode.turn(["hello"], Want()).end_reason for _ in range(16)]
    assert ends == [EndReason.NONE] * 15 + [EndReason.ENVIRONMENT_LIMIT]
    last = start(puzzle=SOLUTION.replace("2413", "2410"), max_steps=1).turn(["1,4,3"], Want())
    assert last.terminated and last.success


def test_a_checklist_of_what_the_player_completed() -> None:
    episode = start(puzzle=PUZZLE, solution=SOLUTION, criteria=True)
    first, second, refused = (episode.turn([action], Want()).details for action in ("1,2,4", "1,4,3", "9,9,9"))
    assert first is not None and second is not None
    units = {f"{unit} {index}" for unit in ("row", "column", "box") for index in range(1, 5)}
    assert first.criteria == dict.fromkeys(units, False)
    assert second.criteria == {name: name == "row 1" for name in units}
    assert refused is None or refused.criteria is None
    plain = start(puzzle=PUZZLE).turn(["1,2,4"], Want()).details
    assert plain is None or plain.criteria is None


def test_conflicts_are_marked_where_they_may_be_placed() -> None:
    episode = start(puzzle=PUZZLE, conflicts="place")
    clash = episode.turn(["1,2,2"], Want())
    assert clash.reward == -0.1 and clash.outcomes[0].effective
    assert clash.observation.parts.splitlines()[3] == "*2**2*| [1] ."
    assert "conflicts with row 1, box (1,1)" in clash.observation.parts
    assert "\n\n⚠ CONFLICTS DETECTED:\n  - Cell (1,1): 2\n  - Cell (1,2): 2\n\n💡" in clash.observation.parts
    assert "*asterisks*" in episode.environment.instructions()
    mended = episode.turn(["1,2,4"], Want())
    assert mended.reward == 1.0
    assert mended.observation.parts.splitlines()[3] == "[2] 4 | [1] ."
    hidden = start(puzzle=PUZZLE, conflicts="place", show_conflicts=False)
    assert hidden.turn(["1,2,2"], Want()).observation.parts.splitlines()[3] == "[2] 2 | [1] ."


def test_a_digit_pays_once_its_clash_is_cleared() -> None:
    episode = start(puzzle=PUZZLE, conflicts="place")  # the first row is 2 4 1 3
    earned = [episode.turn([action], Want()).reward for action in ("1,4,4", "1,2,4", "1,4,3")]
    assert earned == [-0.1, -0.1, 2.0]  # the last for its own cell and for the 4 that has no rival any more
    earned = [episode.turn([action], Want()).reward for action in ("1,4,4", "1,4,3")]
    assert earned == [-0.1, 0.0], "overwriting a cell never pays twice"


@given(seeds, st.lists(st.tuples(*[st.integers(1, 4)] * 3), max_size=40))
def test_every_cell_that_holds_its_digit_without_a_clash_has_paid(seed: int, played: list[tuple[int, ...]]) -> None:
    episode = start(seed, size=4, difficulty="hard", conflicts="place", max_steps=1000, invalid_reward=0.0)
    sudoku, earned = episode.environment, 0.0
    for placement in played:
        if not episode.end_reason:
            earned += episode.turn([",".join(map(str, placement))], Want()).reward
    for cell, fixed in enumerate(sudoku.puzzle):
        digit = sudoku.grid[cell]
        if not fixed and digit == sudoku.solution[cell] and not clashes(sudoku.grid, sudoku.size, cell, digit):
            assert sudoku.paid[cell] == 1.0
    assert earned == sum(sudoku.paid.values()) + 10.0 * sudoku._solved()


def test_a_full_grid_with_a_clash_is_not_solved() -> None:
    episode = start(puzzle=SOLUTION.replace("2413", "2410"), conflicts="place", max_steps=5)
    full = episode.turn(["1,4,1"], Want())
    assert not full.end_reason and episode.environment.score() < 1
    assert episode.turn(["1,4,3"], Want()).success


def test_formats() -> None:
    assert start(puzzle=PUZZLE, observation="simple").environment.observe() == (
        "2 . | 1 .\n. 1 | . .\n---------\n. . | 2 4\n4 . | 3 ."
    )
    detailed = start(puzzle=PUZZLE, observation="detailed").environment.observe()
    assert detailed.splitlines()[3:9] == [
        "[2] . | [1] .",
        " . [1]|  .  .",
        "-------------",
        " .  . | [2][4]",
        "[4] . | [3] .",
        "",
    ]
    feedback = start(puzzle=PUZZLE).environment.observe()
    assert feedback.startswith(detailed)
    assert feedback.endswith("Progress: 7/16 cells filled (7 initial, 0 placed)\nSteps: 0/16")
    assert "  - (1,2): [3, 4]\n" in feedback


def test_a_cell_without_candidates_is_not_listed() -> None:
    """The original lists no cell without candidates, either."""
    seen = start(puzzle=PUZZLE).turn(["1,2,3"], Want()).observation.parts
    listed = seen.split("EMPTY CELLS:\n")[1].split("\n\n")[0]
    assert listed.split("\n") == [
        *("  - (2,3): [4]", "  - (2,4): [2, 3]", "  - (3,1): [1, 3]"),
        *("  - (4,2): [2]", "  - (4,4): [1]"),
    ]


def test_candidates_are_listed_as_asked() -> None:
    assert "VALID NUMBERS" not in start(1).environment.observe()
    assert "VALID NUMBERS" in start(1, show_candidates=True).environment.observe()
    assert "VALID NUMBERS" not in start(puzzle=PUZZLE, show_valid_numbers=False).environment.observe()


def test_pictures() -> None:
    environment = start(1).environment
    assert environment.render("html").count("<td") == 81
    assert environment.render("text") in environment.observe()


# --- options ---------------------------------------------------------------------------------------------------------

AMBIGUOUS = "...." * 3 + "1234"
FULL = "2143 4321 3412 1234".replace(" ", "")


def test_a_puzzle_of_several_solutions_may_name_one() -> None:
    episode = start(puzzle=AMBIGUOUS, solution=FULL)
    assert episode.turn(["1,1,2"], Want()).reward == 1.0
    while not episode.end_reason:
        last = episode.turn([episode.environment.expert_action()], Want())
    assert last.success


def test_the_instructions_fit_the_options() -> None:
    text = start(size=4).environment.instructions()
    assert "4 rows" in text and "2x2 box" in text
    assert "After 16 actions at the latest" in text and "You have" not in text  # limits of the episode may be narrower


@pytest.mark.parametrize("observation", ["simple", "detailed", "with_feedback"])
def test_a_grid_of_another_size_is_never_searched_for_its_peers(observation: str) -> None:
    """A forged snapshot may contain such a grid. Finding its peers would take hours."""
    sudoku = start(observation=observation, conflicts="place").environment
    sudoku.grid = sudoku.puzzle = bytes(40_000)
    for call in (sudoku.observe, sudoku.valid_actions, sudoku.expert_action):
        with contextlib.suppress(IndexError):
            call()
    assert peers.cache_info().currsize <= 3
