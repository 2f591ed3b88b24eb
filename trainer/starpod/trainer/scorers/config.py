"""Configuration of the model that scores turns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from starpod.trainer.configuration.kinds import KindBy
from starpod.trainer.configuration.section import Section


class NoScorer(Section):
    """No model scores turns."""

    kind: Literal["off"] = "off"


class ImplicitConfig(Section):
    """The `implicit` scorer: a second policy that learns to prefer success, turn by turn."""

    kind: Literal["implicit"] = "implicit"
    lr: float | None = Field(default=None, gt=0, description="Learning rate; null: that of the policy.")
    beta: float = Field(default=0.05, gt=0, description="Factor of the log-ratios from which scores are made.")
    normalise: bool = Field(default=True, description="Divides the scores of a batch by their largest absolute value.")


class QConfig(Section):
    """The `q` scorer: a model of the discounted outcome after each turn."""

    kind: Literal["q"] = "q"
    lr: float | None = Field(default=None, gt=0, description="Learning rate; null: that of the policy.")
    gamma: float = Field(default=0.95, gt=0, le=1, description="Discount per turn.")


ScorerConfig = Annotated[NoScorer | ImplicitConfig | QConfig, KindBy("kind")]
"""A model that is trained to score turns, for the reward part `process`."""
