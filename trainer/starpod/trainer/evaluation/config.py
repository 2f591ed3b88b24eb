"""Configuration of evaluations."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from starpod.trainer.agents.config import REFERENCE_NAMES
from starpod.trainer.section import Section


class EvaluationConfig(Section):
    """Interval and size of evaluations, and reference policies to compare with."""

    every: int = Field(default=25, ge=0, description="Iterations between evaluations; 0: only before and after.")
    episodes: int = Field(
        default=256, ge=1, description="Start states: of `seeds.selection`, the same each time; of `seeds.final`, once."
    )
    temperature: float = Field(default=1.0, ge=0, description="Temperature of sampling; 0 is greedy.")
    greedy: bool = Field(default=False, description="Plays the final evaluation greedily too.")
    best_of: int = Field(
        default=1,
        ge=1,
        description="Plays the final evaluation with the best of so many replies, by the scorer q, too; 1: off.",
    )
    options: dict[str, Any] = Field(default={}, description="Options of the environment in evaluations alone.")
    reference: tuple[str, ...] = Field(
        default=("random", "expert"),
        description=f"Reference policies, played once at the start: {', '.join(REFERENCE_NAMES)}.",
    )
    keep_episodes: int = Field(default=64, ge=0, description="Episodes of each evaluation that are kept.")

    @field_validator("reference")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in REFERENCE_NAMES]:
            raise ValueError(f"no reference policy {unknown[0]!r}; there are {', '.join(REFERENCE_NAMES)}")
        return names
