"""Reward for a checklist: a turn is paid for the criteria that it newly meets (CM2, arXiv 2602.12268)."""

from __future__ import annotations

from pydantic import Field

from starpod.trainer.configuration.section import Section
from starpod.trainer.rewards.view import TurnView


class CriteriaConfig(Section):
    """Payment for the criteria that an environment reports (sudoku, countdown, webshop). Weight 0 turns it off."""

    weight: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Reward of a met criterion.")
    weights: dict[str, float] = Field(default={}, description="Factors of criteria by name; by default 1.")


def score_criteria(config: CriteriaConfig, view: TurnView) -> float:
    """Return by how much the turn changes the weighted number of met criteria.

    A criterion that is broken again is deducted, so an attempt earns the criteria that are met at its end. A criterion
    that a turn does not report is unchanged.
    """
    criteria: dict[str, bool] = {}
    for turn in view.turns[:-1]:
        criteria |= turn.criteria
    changes = {name: met - criteria.get(name, False) for name, met in view.turn.criteria.items()}
    return sum(config.weights.get(name, 1.0) * change for name, change in changes.items())
