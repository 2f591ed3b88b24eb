"""Drawing and solving of puzzles."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from fractions import Fraction


def draw_puzzle(
    rng: random.Random, *, min_count: int, max_count: int, max_number: int, max_target: int, operators: str
) -> tuple[tuple[int, ...], int]:
    """Draw numbers and a target that can be reached with them.

    Args:
        max_number: largest number; the smallest is 1.
        max_target: largest target; the smallest is 1.
        operators: characters of the operators with which the target can be reached, such as "+-".
    """
    while True:
        count = rng.randint(min_count, max_count)
        numbers = tuple(rng.randint(1, max_number) for _ in range(count))
        target = _combine(rng, numbers, operators)
        if 1 <= target <= max_target:
            return numbers, target


def _combine(rng: random.Random, numbers: Sequence[int], operators: str) -> int:
    """Return the value of a random expression of all numbers. With "+-*/", all intermediate results are integers."""
    if operators == "+-":
        return sum(rng.choice((-1, 1)) * number for number in numbers)
    pool = list(numbers)
    while len(pool) > 1:
        left, right = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        results = [left + right, left - right, left * right]
        if right and left % right == 0:
            results.append(left // right)
        pool.append(rng.choice(results))
    return pool[0]


def signs_for(numbers: Sequence[int], target: int) -> tuple[int, ...] | None:
    """Return signs with which the numbers add up to the target, or None.

    RAGEN's data set contains only puzzles for which such signs exist, but RAGEN only considers the first four numbers
    of a puzzle.
    """
    for signs in itertools.product((1, -1), repeat=len(numbers)):
        if sum(sign * number for sign, number in zip(signs, numbers, strict=True)) == target:
            return signs
    return None


@functools.lru_cache(maxsize=256)
def solve(numbers: tuple[int, ...], target: int) -> str | None:
    """Return an expression of all numbers whose value is the target, or None.

    Sums and differences are tried first, then all operators. This takes up to 20 ms for four numbers.
    """
    if signs := signs_for(numbers, target):
        text = " ".join(f"{'+' if sign > 0 else '-'} {number}" for sign, number in zip(signs, numbers, strict=True))
        return text.removeprefix("+ ")
    expression = _search([(Fraction(number), str(number)) for number in numbers], target)
    return expression and expression[1:-1]


def _search(pool: list[tuple[Fraction, str]], target: int) -> str | None:
    """Try all ways to combine two values until one is left. Return an expression with the target as value, or None."""
    if len(pool) == 1:
        value, text = pool[0]
        return text if value == target else None
    for i, j in itertools.combinations(range(len(pool)), 2):
        new_pool = [pool[k] for k in range(len(pool)) if k not in (i, j)]
        for result in _results(*pool[i], *pool[j]):
            if expression := _search([*new_pool, result], target):
                return expression
    return None


def _results(a: Fraction, a_text: str, b: Fraction, b_text: str) -> list[tuple[Fraction, str]]:
    results = [
        (a + b, f"({a_text} + {b_text})"),
        (a - b, f"({a_text} - {b_text})"),
        (b - a, f"({b_text} - {a_text})"),
        (a * b, f"({a_text} * {b_text})"),
    ]
    if b:
        results.append((a / b, f"({a_text} / {b_text})"))
    if a:
        results.append((b / a, f"({b_text} / {a_text})"))
    return results
