"""Reward for a checklist: pays for criteria when they begin to hold (CM2, arXiv 2602.12268)."""

from __future__ import annotations

from pydantic import Field

from starpod.trainer.rewards.view import TurnView
from starpod.trainer.section import Section


class CriteriaConfig(Section):
    """Pays for the criteria that an environment reports (sudoku, countdown, webshop). Off with weight 0."""

    weight: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Paid for a criterion that is met.")
    weights: dict[str, float] = Field(default={}, description="Factors of criteria by name; by default 1.")


def score_criteria(config: CriteriaConfig, view: TurnView) -> float:
    """The weighted number of criteria that hold after the turn, less that before it in its attempt.

    One that is broken is taken back, so standing still earns nothing and an attempt is paid for its end. What a turn
    does not report stays as it was.
    """
    before: dict[str, bool] = {}
    for earlier in view.turns[:-1]:
        before |= earlier.criteria
    changes = {name: met - before.get(name, False) for name, met in view.turn.criteria.items()}
    return sum(config.weights.get(name, 1.0) * change for name, change in changes.items())
