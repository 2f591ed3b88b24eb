"""Comparison of options and attributes with those of the goal: by colour, then by words as in thefuzz 0.19."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from functools import lru_cache
from typing import Literal

COLOURS = tuple(
    """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
    dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
    ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
    sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
    wheat white wine yellow
    """.split()
)
"""Colour names, in the order in which they are searched for."""

Ratio = Literal["difflib", "levenshtein"]
"""Similarity of two texts: difflib's ratio, as in the original WebShop, or thefuzz's with the package Levenshtein."""

THRESHOLD = 85
"""Texts match when their token-set ratio is above this."""

_LATIN_1 = dict.fromkeys(range(0x80, 0x100))
_NOT_A_WORD = re.compile(r"\W")


@lru_cache(maxsize=1 << 14)
def normalise(value: str) -> str:
    """Return the first colour in COLOURS that the value contains ('stand' -> 'tan'), or else the value itself."""
    return next((colour for colour in COLOURS if colour in value), value)


def normalise_pair(name: str, value: str) -> str:
    """Normalise an option of a synthetic goal, which the original WebShop compares as a pair.

    If the name or the value equals a colour, return that colour. Otherwise return the pair's str, as the original does.
    """
    return next((colour for colour in COLOURS if colour in (name, value)), str((name, value)))


def token_set_ratio(purchased: str, goal: str, ratio: Ratio = "difflib") -> int:
    """Return the similarity of two sets of words, from 0 to 100.

    It is 100 if one set contains the other, and 0 if a text has no words. With difflib it is not symmetric. The
    characters U+0080 to U+00FF are removed first.
    """
    similarity = _difflib if ratio == "difflib" else _levenshtein
    return max((_percent(similarity(*pair), *pair) for pair in _pairs(purchased, goal)), default=0)


@lru_cache(maxsize=1 << 16)
def matches(purchased: str, goal: str, ratio: Ratio = "difflib") -> bool:
    """Return whether the token-set ratio is above THRESHOLD. Cheap upper bounds are tried first."""
    similarity = _difflib if ratio == "difflib" else _levenshtein
    return any(
        all(_percent(bound(*pair), *pair) > THRESHOLD for bound in (_length_bound, _letter_bound, similarity))
        for pair in _pairs(purchased, goal)
    )


@lru_cache(maxsize=1 << 14)
def _words(text: str) -> frozenset[str]:
    return frozenset(_NOT_A_WORD.sub(" ", text.translate(_LATIN_1)).lower().split())


def _pairs(purchased: str, goal: str) -> list[tuple[str, str]]:
    """Return the pairs among three texts, without pairs that have an empty text.

    The texts are the common words alone, the common words followed by the purchase's other words, and the common words
    followed by the goal's other words.
    """
    ours, theirs = _words(purchased), _words(goal)
    if not ours or not theirs:
        return []
    common = " ".join(sorted(ours & theirs))
    left, right = (f"{common} {' '.join(sorted(rest))}".strip() for rest in (ours - theirs, theirs - ours))
    return [(first, second) for first, second in ((common, left), (common, right), (left, right)) if first and second]


def _percent(alike: int, first: str, second: str) -> int:
    """Return the percentage of matching characters.

    It grows with `alike`, so an upper bound of `alike` gives an upper bound of the percentage.
    """
    return round(100 * (2.0 * alike / (len(first) + len(second))))


def _length_bound(first: str, second: str) -> int:
    return min(len(first), len(second))


def _letter_bound(first: str, second: str) -> int:
    return (Counter(first) & Counter(second)).total()


def _difflib(first: str, second: str) -> int:
    if first == second:
        return len(first)
    return sum(block.size for block in difflib.SequenceMatcher(None, first, second).get_matching_blocks())


def _levenshtein(first: str, second: str) -> int:
    from rapidfuzz.distance import LCSseq

    return LCSseq.similarity(first, second)
