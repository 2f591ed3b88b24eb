"""Coding tasks: descriptions, reference implementations, and arguments of tests. Some of their numbers are random."""

from __future__ import annotations

import functools
import random
import string
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple


class CodingTask(NamedTuple):
    """A function to write, with the arguments of its tests."""

    function: str
    signature: str
    text: str
    program: str
    """Reference implementation, whose results are the expected ones."""
    arguments: tuple[Any, ...]


def _numbers(rng: random.Random, low: int = -20, high: int = 60, max_length: int = 12) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(0, max_length))]


def _word(rng: random.Random, letters: str = string.ascii_lowercase, max_length: int = 12) -> str:
    return "".join(rng.choice(letters) for _ in range(rng.randint(0, max_length)))


class _Family(NamedTuple):
    """Tasks that only differ in two numbers, `{a}` and `{b}` in the texts."""

    function: str
    signature: str
    text: str
    body: str
    ranges: tuple[tuple[int, int], tuple[int, int]]
    draw: Callable[[random.Random, int, int], list[Any]]


_FAMILIES = (
    _Family(
        "count_between",
        "numbers: list[int]) -> int",
        "Return how many of the numbers are at least {a} and at most {b}.",
        "return sum(1 for number in numbers if {a} <= number <= {b})",
        ((-10, 10), (11, 40)),
        lambda rng, a, b: [_numbers(rng)],
    ),
    _Family(
        "sum_of_multiples",
        "numbers: list[int]) -> int",
        "Return the sum of those numbers that are divisible by {a} or by {b}.",
        "return sum(number for number in numbers if number % {a} == 0 or number % {b} == 0)",
        ((2, 5), (6, 9)),
        lambda rng, a, b: [_numbers(rng)],
    ),
    _Family(
        "rotate",
        "items: list[int]) -> list[int]",
        "Return the list rotated by {a} places to the right: the last item moves to the front, {a} times.",
        "cut = len(items) - {a} % len(items) if items else 0\nreturn items[cut:] + items[:cut]",
        ((1, 7), (0, 0)),
        lambda rng, a, b: [_numbers(rng)],
    ),
    _Family(
        "shift_letters",
        "text: str) -> str",
        "Replace each lower-case letter by the one {a} places further in the alphabet, going on with a after z. Leave "
        "all other characters as they are.",
        'return "".join(chr((ord(c) - 97 + {a}) % 26 + 97) if "a" <= c <= "z" else c for c in text)',
        ((1, 25), (0, 0)),
        lambda rng, a, b: [_word(rng, string.ascii_lowercase + "XYZ ,9", 20)],
    ),
    _Family(
        "nth_largest",
        "numbers: list[int]) -> int | None",
        "Order the distinct numbers from the largest on, and return the one in place {a}, counted from 1, or None if "
        "there are fewer.",
        "ordered = sorted(set(numbers), reverse=True)\nreturn ordered[{a} - 1] if len(ordered) >= {a} else None",
        ((2, 5), (0, 0)),
        lambda rng, a, b: [_numbers(rng, 0, 12)],
    ),
    _Family(
        "run_lengths",
        "text: str) -> list[list]",
        "Return the runs of equal characters in order, each as a list of the character and its length, but only runs "
        "of at least {a} characters.",
        "runs = []\nfor c in text:\n    if runs and runs[-1][0] == c:\n        runs[-1][1] += 1\n    else:\n"
        "        runs.append([c, 1])\nreturn [run for run in runs if run[1] >= {a}]",
        ((1, 3), (0, 0)),
        lambda rng, a, b: [_word(rng, "abc", 16)],
    ),
    _Family(
        "chunks",
        "items: list[int]) -> list[list[int]]",
        "Cut the list into lists of {a} items each, in order. Leave out what remains at the end if it is shorter.",
        "return [items[i:i + {a}] for i in range(0, len(items) - {a} + 1, {a})]",
        ((2, 4), (0, 0)),
        lambda rng, a, b: [_numbers(rng)],
    ),
    _Family(
        "pairs_with_sum",
        "numbers: list[int]) -> int",
        "Return how many pairs of positions i < j there are whose numbers add up to {a}.",
        "return sum(1 for i in range(len(numbers)) for j in range(i) if numbers[i] + numbers[j] == {a})",
        ((3, 12), (0, 0)),
        lambda rng, a, b: [_numbers(rng, 0, 10)],
    ),
    _Family(
        "digit_sum_until",
        "number: int) -> int",
        "Replace the number by the sum of its decimal digits until it is below {a}, and return it. It is not negative.",
        "while number >= {a}:\n    number = sum(map(int, str(number)))\nreturn number",
        ((10, 40), (0, 0)),
        lambda rng, a, b: [rng.randint(0, 10 ** rng.randint(1, 12))],
    ),
    _Family(
        "merge_intervals",
        "intervals: list[list[int]]) -> list[list[int]]",
        "Merge intervals [start, end] that overlap, touch, or lie at most {a} apart, and return the merged ones "
        "ordered by start.",
        "merged = []\nfor start, end in sorted(intervals):\n    if merged and start - merged[-1][1] <= {a}:\n"
        "        merged[-1][1] = max(merged[-1][1], end)\n    else:\n        merged.append([start, end])\n"
        "return merged",
        ((0, 3), (0, 0)),
        lambda rng, a, b: [
            [[s, s + rng.randint(0, 5)] for s in (rng.randint(0, 40) for _ in range(rng.randint(0, 7)))]
        ],
    ),
    _Family(
        "balanced",
        "text: str) -> bool",
        "Return whether the round and square brackets in the text are balanced and nested at most {a} deep. Other "
        "characters do not matter.",
        'stack = []\nfor c in text:\n    if c in "([":\n        stack.append(c)\n        if len(stack) > {a}:\n'
        '            return False\n    elif c in ")]":\n        if not stack or stack.pop() + c not in ("()", "[]"):\n'
        "            return False\nreturn not stack",
        ((1, 4), (0, 0)),
        lambda rng, a, b: [_brackets(rng)],
    ),
    _Family(
        "longest_word",
        "text: str) -> str",
        "Return the longest word of the text that has at most {a} letters, the first one of several, or an empty text. "
        "Words are separated by blanks.",
        'best = ""\nfor word in text.split():\n    if len(best) < len(word) <= {a}:\n        best = word\nreturn best',
        ((3, 8), (0, 0)),
        lambda rng, a, b: [" ".join(_word(rng, "abcdefg", 10) for _ in range(rng.randint(0, 7)))],
    ),
    _Family(
        "count_and_say",
        "limit: int) -> list",
        "Return a list for the numbers from 1 to the limit: 'tick' for multiples of {a}, 'tock' for multiples of {b}, "
        "'tick tock' for multiples of both, else the number itself.",
        "told = []\nfor n in range(1, limit + 1):\n    words = ['tick'] * (n % {a} == 0) + ['tock'] * (n % {b} == 0)\n"
        "    told.append(' '.join(words) or n)\nreturn told",
        ((2, 4), (5, 7)),
        lambda rng, a, b: [rng.randint(0, 40)],
    ),
    _Family(
        "window_maxima",
        "numbers: list[int]) -> list[int]",
        "Return the largest number of every window of {a} neighbours, from left to right. A list that is shorter than "
        "a window has none.",
        "return [max(numbers[i:i + {a}]) for i in range(len(numbers) - {a} + 1)]",
        ((2, 5), (0, 0)),
        lambda rng, a, b: [_numbers(rng)],
    ),
)


def _brackets(rng: random.Random) -> str:
    text = ""
    for _ in range(rng.randint(0, 5)):
        pair = rng.choice(("()", "[]", "(x)"))
        text = rng.choice((f"{pair[0]}{text}{pair[-1]}", text + pair, text + pair))
    return text if rng.random() < 0.6 else text.replace(rng.choice("()[]"), "", 1)


def draw_task(rng: random.Random, tests: int) -> CodingTask:
    """Draw a task with different arguments for `tests` tests. At most three quarters of them have equal results."""
    family = rng.choice(_FAMILIES)
    a, b = (rng.randint(*bounds) for bounds in family.ranges)

    def fill(text: str) -> str:
        return text.replace("{a}", str(a)).replace("{b}", str(b))

    signature = f"def {family.function}({family.signature}:"
    program = f"{signature}\n{textwrap.indent(fill(family.body), '    ')}\n"
    while True:
        arguments: list[Any] = []
        while len(arguments) < tests:
            if (candidate := family.draw(rng, a, b)) not in arguments:
                arguments.append(candidate)
        task = CodingTask(family.function, signature, fill(family.text), program, tuple(arguments))
        results = [repr(result) for result in expected(task)]
        if max(map(results.count, results)) <= max(1, tests * 3 // 4):
            return task


@functools.lru_cache(maxsize=256)
def _function(program: str, name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(program, namespace)  # only programs of this module
    function: Callable[..., Any] = namespace[name]
    return function


def expected(task: CodingTask) -> list[Any]:
    """Return the right results of a task's tests."""
    return [_function(task.program, task.function)(*arguments) for arguments in task.arguments]
