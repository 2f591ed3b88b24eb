"""Random draws, and the made-up names and numbers of brands, lines, people, towns and parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .vocabulary import COMMON, split

Random = Callable[[], float]
"""Uniform over [0, 1): the one drawing function that is the same in every version of Python."""

_STARTS, _MIDDLES, _ENDS = (split(COMMON["syllables"][place]) for place in ("starts", "middles", "ends"))
_LETTERS = "ABCDEFGHJKLMNPRSTVWXYZ"
_ASIN_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MASK = (1 << 36) - 1


def pick(random: Random, choices: Sequence[str]) -> str:
    return choices[int(random() * len(choices))]


def two(random: Random, choices: Sequence[str]) -> tuple[str, str]:
    """Two entries at different places."""
    first = int(random() * len(choices))
    second = (first + 1 + int(random() * (len(choices) - 1))) % len(choices)
    return choices[first], choices[second]


def small(random: Random) -> float:
    """Over [0, 1) as well, but the smaller the likelier. A product: powers may differ between machines."""
    return random() * random()


def name(random: Random) -> str:
    """A name of three or four syllables, of several millions."""
    start, middle = pick(random, _STARTS), pick(random, _MIDDLES)
    if random() < 0.4:
        middle += pick(random, _MIDDLES)
    return start + middle + pick(random, _ENDS)


def common_name(random: Random) -> str:
    """A name of two or three syllables, of some tens of thousands: people, towns, lines."""
    middle = int(random() * 16)
    return pick(random, _STARTS) + (_MIDDLES[middle] if middle < 8 else "") + pick(random, _ENDS)


def code(random: Random) -> str:
    """A model or part number, such as KV-4821 or T730B."""
    drawn = random()
    letters = pick(random, _LETTERS) + (_LETTERS[int(drawn * 22)] if drawn < 0.7 else "")
    number = int(small(random) * 9900) + 100
    if drawn < 0.3:
        return f"{letters}-{number}"
    return f"{letters}{number}" if drawn < 0.8 else f"{letters}{number}{pick(random, _LETTERS)}"


def asin(number: int, seed: int) -> str:
    """Ten characters that are never the same for two numbers below 2**36 under one seed."""
    # Odd factors and shifted differences can be undone in 36 bits, so that no two numbers meet.
    mixed = (number + (seed + 1) * 0x9E3779B97) & _MASK
    mixed = (mixed ^ (mixed >> 18)) * 0x5BD1E9955 & _MASK
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6DD & _MASK
    mixed ^= mixed >> 18
    digits = ""
    for _ in range(7):
        mixed, digit = divmod(mixed, 36)
        digits = _ASIN_DIGITS[digit] + digits
    return f"B0{'789'[number % 3]}{digits}"
