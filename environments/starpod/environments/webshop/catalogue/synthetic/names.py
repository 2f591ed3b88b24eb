"""Random draws, and made-up names and numbers of brands, lines, people, towns and parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .vocabulary import COMMON, split

Random = Callable[[], float]
"""A function that returns a uniform number in [0, 1), such as `random.Random.random`. Other functions of `random` can
give different numbers in different versions of Python."""

_STARTS, _MIDDLES, _ENDS = (split(COMMON["syllables"][place]) for place in ("starts", "middles", "ends"))
_LETTERS = "ABCDEFGHJKLMNPRSTVWXYZ"
_ASIN_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MASK = (1 << 36) - 1


def pick(random: Random, choices: Sequence[str]) -> str:
    return choices[int(random() * len(choices))]


def two(random: Random, choices: Sequence[str]) -> tuple[str, str]:
    """Draw two entries with different indices."""
    first = int(random() * len(choices))
    second = (first + 1 + int(random() * (len(choices) - 1))) % len(choices)
    return choices[first], choices[second]


def small(random: Random) -> float:
    """Draw a number in [0, 1) that tends to be small: a product of draws, as powers may differ between machines."""
    return random() * random()


def name(random: Random) -> str:
    """Draw one of several million names of three or four syllables."""
    start, middle = pick(random, _STARTS), pick(random, _MIDDLES)
    if random() < 0.4:
        middle += pick(random, _MIDDLES)
    return start + middle + pick(random, _ENDS)


def common_name(random: Random) -> str:
    """Draw one of tens of thousands of names of two or three syllables, for people, towns and product lines."""
    middle = int(random() * 16)
    return pick(random, _STARTS) + (_MIDDLES[middle] if middle < 8 else "") + pick(random, _ENDS)


def code(random: Random) -> str:
    """Draw a model or part number, such as KV-4821 or T730B."""
    draw = random()
    letters = pick(random, _LETTERS) + (_LETTERS[int(draw * 22)] if draw < 0.7 else "")
    number = int(small(random) * 9900) + 100
    if draw < 0.3:
        return f"{letters}-{number}"
    return f"{letters}{number}" if draw < 0.8 else f"{letters}{number}{pick(random, _LETTERS)}"


def asin(number: int, seed: int) -> str:
    """Return an asin of ten characters. Different numbers below 2**36 have different asins under one seed."""
    # Multiplying by an odd factor and xor with a shifted value are invertible in 36 bits, so there are no collisions.
    mixed = (number + (seed + 1) * 0x9E3779B97) & _MASK
    mixed = (mixed ^ (mixed >> 18)) * 0x5BD1E9955 & _MASK
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6DD & _MASK
    mixed ^= mixed >> 18
    digits = ""
    for _ in range(7):
        mixed, digit = divmod(mixed, 36)
        digits = _ASIN_DIGITS[digit] + digits
    return f"B0{'789'[number % 3]}{digits}"
