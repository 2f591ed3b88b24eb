"""Weights of replies that a search chose among several: how much likelier the policy says them than the search does."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starpod.trainer.data.episode import Turn


def chance(mass: float, below: float, tries: int) -> float:
    """How likely the best of so many independent tries has a score that one alone has with probability `mass`, and
    falls short of with probability `below`."""
    return (below + mass) ** tries - below**tries


def weight(mass: float, below: float, tries: int) -> float:
    """p / q of such a score: policy over search. Within a score nothing is chosen, so it is that of each reply too."""
    return mass / chance(mass, below, tries)


def weigh(tried: Sequence[tuple[float, Turn]]) -> None:
    """Notes the weight of the best of these tries with their scores, between 1 / tries and 1.

    The probability of its score is what the policy gives to the replies that were seen with it; what it gives to
    replies that nobody tried is shared out as the tries were. No score is taken to be better than the best one seen.
    """
    count = len(tried)
    seen = {tuple(reply.reply): math.exp(math.fsum(reply.logprobs)) for _, reply in tried if reply.reply}
    top = max(score for score, _ in tried)
    best = [reply for score, reply in tried if score == top]
    unseen = max(0.0, 1.0 - math.fsum(seen.values()))
    mass = math.fsum(seen[key] for key in {tuple(reply.reply) for reply in best if reply.reply})
    mass = min(1.0, mass + unseen * len(best) / count)
    for reply in best:
        reply.weight = weight(mass, 1.0 - mass, count)
