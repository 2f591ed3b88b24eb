"""Costs of the original WebShop. They were measured once, because it needs Java, which is not available everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.webshop.episodes import BUY, RESET, SEARCH

HOW = """\
The original (princeton-nlp/WebShop) was measured once: text mode, human goals, one process on two hardware threads of
an AMD EPYC, made-up catalogues of the same sizes, medians of two runs of 1,700 steps. It had a blank tokenizer
instead of its part-of-speech model and no image features; both would cost more. Its steps are in process, ours over
the wire. Memory is private (USS), the original's resident; used: after about 5,700 steps (the original: 220
episodes)."""
CLICKS = "all clicks"
STEPS_PER_SECOND = 70.0
"""Steps per second of one process on one core."""


@dataclass(frozen=True, slots=True)
class Original:
    """Costs of the original WebShop with one catalogue.

    start: range in seconds. resident: MB after the start and after 220 episodes. waits: p50 and p99 in milliseconds.
    """

    start: tuple[float, float]
    resident: tuple[int, int]
    waits: dict[str, tuple[float, float]]


ORIGINAL = {
    1_000: Original(
        start=(4.2, 5.2),
        resident=(545, 822),
        waits={
            SEARCH: (14.4, 20),
            CLICKS: (12.0, 23.5),
            BUY: (6.5, 9),
            RESET: (2.4, 4.2),
        },
    ),
    10_000: Original(
        start=(4.7, 5.0),
        resident=(606, 904),
        waits={
            SEARCH: (15.0, 20),
            CLICKS: (12.4, 23.0),
            BUY: (6.4, 28),
            RESET: (2.4, 4.3),
        },
    ),
    100_000: Original(
        start=(10.3, 12.2),
        resident=(1217, 1648),
        waits={
            SEARCH: (16.0, 25),
            CLICKS: (13.2, 26.4),
            BUY: (6.7, 10),
            RESET: (2.5, 5.5),
        },
    ),
}
"""Measurements by number of products."""
