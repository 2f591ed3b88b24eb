"""Importance weights of replies that a search chose.

A weight is the reply's probability under the policy, divided by its probability under the search.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from starpod.trainer.data.episode import Turn


def chance(mass: float, lower_mass: float, tries: int) -> float:
    """Return the probability that the best of several independent samples has a given score.

    Args:
        mass: Probability that one sample has the score.
        lower_mass: Probability that one sample has a lower score.
        tries: Number of samples.
    """
    return (lower_mass + mass) ** tries - lower_mass**tries


def weight(mass: float, lower_mass: float, tries: int) -> float:
    """Return the importance weight of a score: its probability under the policy divided by that under the search.

    All replies with this score have the same weight, because the search does not choose among them.

    Args:
        mass: Probability that one sample has the score, above 0.
        lower_mass: Probability that one sample has a lower score.
        tries: Number of samples among which the search takes the best.
    """
    return mass / chance(mass, lower_mass, tries)


def weigh(candidates: Sequence[tuple[float, Turn]]) -> None:
    """Set the weight of the best replies among `candidates`, a value between 1 / len(tried) and 1.

    The probability of the best score is the policy's total probability of the tried replies with that score. Untried
    replies are assumed to have this score as often as the tried ones, so that share of their probability is added.
    """
    count = len(candidates)
    probabilities = {tuple(reply.reply): math.exp(math.fsum(reply.logprobs)) for _, reply in candidates if reply.reply}
    best_score = max(score for score, _ in candidates)
    best_replies = [reply for score, reply in candidates if score == best_score]
    remainder = max(0.0, 1.0 - math.fsum(probabilities.values()))
    mass = math.fsum(probabilities[key] for key in {tuple(reply.reply) for reply in best_replies if reply.reply})
    mass = min(1.0, mass + remainder * len(best_replies) / count)
    for reply in best_replies:
        reply.weight = weight(mass, 1.0 - mass, count)
