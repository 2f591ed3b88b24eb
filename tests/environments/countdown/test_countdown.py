"""countdown-v1: the reader of answers, rewards, puzzles and the solver."""

import contextlib
import functools
import random
import warnings
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from starpod.env_server.episodes.live_episode import TurnResult, Want
from starpod.environments.countdown import Countdown
from starpod.environments.countdown.expression import MAX_LENGTH, MalformedExpression, parse
from starpod.environments.countdown.puzzles import signs_for, solve
from tests.environments import episodes

SEEDS = st.integers(0, 2**64 - 1)


start = functools.partial(episodes.start, Countdown, limits=Countdown.spec.limits)


def answer(text: Any, numbers: list[int], target: int, **options: Any) -> TurnResult:
    return start(numbers=numbers, target=target, **options).turn([text], Want())


@st.composite
def expressions(draw: st.DrawFn, depth: int = 4) -> tuple[str, float | None, list[int]]:
    """A text with the value and the numbers it must have, in all the ways to write it."""
    blank = draw(st.sampled_from(["", " ", "\t"]))
    kind = draw(st.sampled_from(["number", "sign", "pair", "pair"])) if depth else "number"
    if kind == "number":
        number = draw(st.integers(0, 999))
        return f"{blank}{number}", number, [number]
    if kind == "sign":
        text, value, numbers = draw(expressions(depth=depth - 1))
        return f"-({text}){blank}", None if value is None else -value, numbers
    left, a, first = draw(expressions(depth=depth - 1))
    right, b, second = draw(expressions(depth=depth - 1))
    operator = draw(st.sampled_from("+-*/"))
    value = None
    if a is not None and b is not None and not (operator == "/" and b == 0):
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[operator]
    return f"({left}){operator}{blank}({right})", value, first + second


@given(expressions())
def test_values_are_those_of_arithmetic(case: tuple[str, float | None, list[int]]) -> None:
    text, value, numbers = case
    if len(text) <= MAX_LENGTH:
        parsed = parse(text)
        assert (parsed.value, list(parsed.numbers), parsed.claim) == (value, numbers, None)


SIGNS = ["+", "-", "*", "/", "//", "%", "(", ")", " ", "\n", "\r", "\t", "\f", "\v", "\u00a0"]
WRITTEN = ["1", "2", "30", "07", "00", *SIGNS]


@given(st.lists(st.sampled_from(WRITTEN), max_size=9).map("".join).filter(lambda text: "**" not in text))
@example("(3 +\n5)")
@example("03 + 5")
@example("7 // 2 % 2 - -30 % 7")
@example("2(3)")
def test_answers_are_read_as_python_reads_them(text: str) -> None:
    """The original has Python evaluate them."""
    with warnings.catch_warnings(action="ignore"):
        try:
            value = eval(text, {"__builtins__": None}, {})
        except ZeroDivisionError:
            value = None
        except (SyntaxError, TypeError):
            value = ()
    if value == ():
        with pytest.raises(MalformedExpression):
            parse(text)
    else:
        assert parse(text).value == value


@given(st.text(alphabet="0123456789+-*/()= .#\n\u0663x", max_size=40) | st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(MalformedExpression):
        assert parse(text).numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("2 + 3 * 4", 14), ("20 - 5 - 3", 12), ("20 / 5 / 2", 2), ("- 2 * -3", 6), ("2--3", 5), ("+(4)", 4)),
        *(("1/3 + 1/6", 0.5), ("  7 ", 7), ("17 // 5", 3), ("-17 % 5", 3), ("2 ** 3 ** 2", 512), ("-2 ** 2", -4)),
        *(("16 ** (1 / 2)", 4), ("1 ** (9 ** 99)", 1), ("1000 ** 1000 // 1000 ** 999", 1000), ("2 ** -1", 0.5)),
        *(("9 ** 9 ** 9", None), ("9 ** 9999 ** 9999", None), ("(0 - 4) ** (1 / 2)", None), ("0 ** -1", None)),
        *(("7 % (3 - 3)", None), ("7 // 0", None)),
    ],
)
def test_precedence_and_what_has_no_value(text: str, value: float | None) -> None:
    assert parse(text).value == value


def test_the_largest_values_are_computed_and_shown_in_short() -> None:
    largest = "*".join(["9999**713"] * 18)
    assert answer(f"{largest} // 3", [3, 5], 8).outcomes[0].info == {"value": "a number of 170532 bits"}
    transition = answer("999**999 * 999**999", [999] * 4, 8)
    assert (transition.reward, transition.outcomes[0].info) == (0.1, {"value": "a number of 19909 bits"})
    assert answer("99**99", [99, 99], 8).outcomes[0].info == {"value": str(99**99)}
    assert answer("5 / (3 - 3)", [3, 3, 5], 8).outcomes[0].info == {"value": "undefined"}


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "()", "3 5", "3, 5", "[3 + 5]", "(3", "3)", "3 +", "* 3", "2 *** 3", "2(3)", "3 + x"),
        *("3 +\n5", "03 + 5", "3\u00a0+ 5"),
        *("3.5", "1e3", "3_5", "3 + 5 # eight", "3 + 5;", "3 + 5 == 8", "3 + 5 = eight", "3 = 2 + 1", "٣"),
        "__import__('os')",
        "9" * (MAX_LENGTH + 1),
        "(" * MAX_LENGTH,
    ],
)
def test_no_expression(text: str) -> None:
    with pytest.raises(MalformedExpression):
        parse(text)
    transition = answer(text, [3, 5], 8)
    assert (transition.reward, transition.success, transition.terminated) == (0.0, False, True)
    outcome = transition.outcomes[0]
    assert outcome.valid is False
    assert outcome.info["problem"]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("3 + 5", 1.0),
        ("5 + 3 = 8", 1.0),
        ("5 + 3 = 9", 0.1),  # says what is not so
        ("5 - 3", 0.1),
        ("5 ** 3", 0.1),
        ("(5 +\n3)", 1.0),
        ("5 - 3 = 2", 0.1),
        ("5 / (3 - 3)", 0.0),  # one 3 too many
        ("8", 0.0),
        ("3 + 5 + 0", 0.0),
        ("3 5", 0.0),
        (5, 0.0),
    ],
)
def test_rewards(text: Any, reward: float) -> None:
    transition = answer(text, [3, 5], 8)
    assert transition.reward == reward
    assert transition.success is (reward == 1.0)
    assert transition.outcomes[0].criteria == {"uses_the_numbers": reward > 0, "hits_the_target": reward == 1.0}
    assert transition.observation.parts == f"Your answer get {reward:g} points."


def test_rewards_are_options() -> None:
    options = {"reward_correct": 10.0, "reward_numbers": 0.5, "reward_wrong": -1.0}
    for text, reward in (("3 + 5", 10.0), ("3 - 5", 0.5), ("3", -1.0), ("?", -1.0)):
        assert answer(text, [3, 5], 8, **options).reward == reward


@given(
    seed=SEEDS,
    counts=st.tuples(st.integers(2, 4), st.integers(2, 4)).map(sorted),
    operators=st.sampled_from(["+-", "+-*/"]),
    max_number=st.integers(2, 200),
    max_target=st.integers(10, 999),
)
def test_puzzles_can_be_solved(seed: int, counts: list[int], operators: str, max_number: int, max_target: int) -> None:
    shape = {"min_count": counts[0], "max_count": counts[1], "max_number": max_number, "max_target": max_target}
    episode = start(seed, operators=operators, **shape)
    environment = episode.environment
    assert counts[0] <= len(environment.numbers) <= counts[1]
    assert all(1 <= number <= max_number for number in environment.numbers)
    assert 1 <= environment.target <= max_target
    if operators == "+-":
        assert signs_for(environment.numbers, environment.target)
    transition = episode.turn([environment.expert_action()], Want())
    assert (transition.reward, transition.success) == (1.0, True)


def test_multiplication_makes_puzzles_that_signs_cannot_solve() -> None:
    puzzles = [start(seed, operators="+-*/").environment for seed in range(50)]
    assert not all(signs_for(puzzle.numbers, puzzle.target) for puzzle in puzzles)


def test_the_solver_finds_what_needs_fractions_and_knows_when_there_is_nothing() -> None:
    text = solve((3, 3, 8, 8), 24)
    assert text is not None
    assert answer(text, [3, 3, 8, 8], 24).success  # though floating point makes it 23.99999999999999
    assert answer(text, [3, 3, 8, 8], 24).outcomes[0].info == {"value": "24"}
    assert solve((1, 1, 1, 1), 9) is None
    assert start(numbers=(1, 1, 1, 1), target=9).environment.expert_action() is None


@given(st.lists(st.integers(1, 20), min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_the_solver_solves_what_it_can(numbers: list[int], rng: random.Random) -> None:
    """Any expression of the numbers sets a target that the solver must reach."""
    pool = [Fraction(number) for number in numbers]
    while len(pool) > 1:
        a, b = pool.pop(rng.randrange(len(pool))), pool.pop(rng.randrange(len(pool)))
        pool.append(rng.choice([a + b, a - b, a * b, *([a / b] if b else [])]))
    if pool[0].denominator == 1:
        text = solve(tuple(numbers), int(pool[0]))
        assert text is not None
        assert answer(text, numbers, int(pool[0])).success


def test_a_long_answer_is_kept_and_shown_in_part() -> None:
    episode = start(numbers=[3, 5], target=8)
    assert episode.environment.observe() == "Target: 8, nums: [3, 5]"
    assert episode.environment.render("text").startswith("Target 8\n┌───┐  ┌───┐\n│ 3 │  │ 5 │")
    before = episode.environment.render("png")
    episode.turn(["3 + 5 \n\u4e09 (" + "x" * 300], Want())
    assert episode.environment.render("png") != before
    assert len(episode.environment.answer) == MAX_LENGTH
