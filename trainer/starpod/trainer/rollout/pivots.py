"""Choice of the states of a failed episode that are worth branching (DEEP-GRPO, arXiv 2602.14169)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from starpod.trainer.data.group import Group

MOST = 10_000
"""Maximum number of past pivots that are remembered."""
FEWEST = 10
"""Number of past pivots up to which the regression is not used yet."""
ROUNDS = 200


def sigmoid(x: float) -> float:
    """Return the logistic function of `x` without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def fit(depths: Sequence[float], labels: Sequence[bool]) -> tuple[float, float]:
    """Fit a logistic regression on one feature and return its weight and bias.

    Newton's method minimizes the sum of cross-entropies plus weight^2 / 2, which is strictly convex if both labels
    occur.
    """
    weight = bias = 0.0
    for _ in range(ROUNDS):
        slope_w, slope_b, curve_ww, curve_wb, curve_bb = weight, 0.0, 1.0, 0.0, 1e-12
        for depth, label in zip(depths, labels, strict=True):
            chance = sigmoid(weight * depth + bias)
            slope_w += (chance - label) * depth
            slope_b += chance - label
            spread = chance * (1 - chance)
            curve_ww += spread * depth * depth
            curve_wb += spread * depth
            curve_bb += spread
        determinant = curve_ww * curve_bb - curve_wb * curve_wb
        step_w = (slope_w * curve_bb - slope_b * curve_wb) / determinant
        step_b = (slope_b * curve_ww - slope_w * curve_wb) / determinant
        weight, bias = weight - step_w, bias - step_b
        if abs(step_w) + abs(step_b) < 1e-12:
            break
    return weight, bias


class Recoverability:
    """Model of the probability that a branch from some depth of a failed episode succeeds, fitted to past branches.

    A depth is a turn's index divided by the number of turns. The probability is 1 until there is enough data.
    """

    def __init__(self) -> None:
        self._pivots: list[tuple[float, bool]] = []
        self.weight = self.bias = 0.0
        self.fitted = False

    def chances(self, depths: Sequence[float], gamma: float) -> list[float]:
        """Return the probability of branching at each depth, proportional to P(success) * depth^gamma."""
        chances = [sigmoid(self.weight * depth + self.bias) if self.fitted else 1.0 for depth in depths]
        weights = [chance * depth**gamma for chance, depth in zip(chances, depths, strict=True)]
        return [weight / sum(weights) for weight in weights]

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from the branches of a collection.

        A state counts as recoverable if one of its branches succeeded. If success is unknown, the branch must have a
        higher return than its parent.
        """
        for group in groups:
            parents = {episode.member: episode for episode in group.episodes}
            won_by_state: dict[tuple[int, int], bool] = {}
            for branch in group.branches:
                if branch.parent is not None and (parent := parents.get(branch.parent[0])) is not None:
                    won = branch.own_return > parent.own_return if branch.success is None else branch.success
                    won_by_state[branch.parent] = won or won_by_state.get(branch.parent, False)
            self._pivots += [(turn / len(parents[member].turns), won) for (member, turn), won in won_by_state.items()]
        del self._pivots[:-MOST]
        self._fit()

    def _fit(self) -> None:
        labels = [won for _, won in self._pivots]
        self.fitted = len(labels) > FEWEST and any(labels) and not all(labels)
        if self.fitted:
            self.weight, self.bias = fit([depth for depth, _ in self._pivots], labels)

    def state_dict(self) -> dict[str, Any]:
        """Return the past pivots as JSON values."""
        return {"seen": self._pivots}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pivots = [(depth, won) for depth, won in state["seen"]]
        self._fit()
