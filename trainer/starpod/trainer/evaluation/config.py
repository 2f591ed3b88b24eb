"""Configuration of evaluations."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from starpod.trainer.configuration.section import Section


class EvaluationConfig(Section):
    """Interval and size of evaluations, and reference policies to compare with."""

    every: int = Field(
        default=25, ge=0, description="Iterations between evaluations; 0: evaluates only before and after training."
    )
    episodes: int = Field(
        default=256,
        ge=1,
        description="Number of start states. Each evaluation during training plays the same ones of "
        "seeds.selection, and the final one those of seeds.final.",
    )
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature; 0 is greedy.")
    greedy: bool = Field(default=False, description="Also plays the final evaluation with temperature 0.")
    best_of: int = Field(
        default=1,
        ge=1,
        description="Plays the final evaluation once more with the best of this many replies by the scorer q; 1: off.",
    )
    options: dict[str, Any] = Field(default={}, description="Options of the environment that differ in evaluations.")
    reference: tuple[str, ...] = Field(
        default=("random", "expert"),
        description="Reference policies, played once at the start: random, expert, or those that packages register "
        "(walk and careful for frozen_lake, rule for webshop).",
    )
    keep_episodes: int = Field(default=64, ge=0, description="Episodes of each evaluation to keep.")
