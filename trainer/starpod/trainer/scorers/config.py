"""Configuration of the model that scores turns."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from starpod.trainer.section import Section


class ScorerConfig(Section):
    """A model that is trained to score turns, for the reward part `process`."""

    SHORTHAND: ClassVar[str] = "kind"

    kind: Literal["off", "implicit", "q"] = Field(
        default="off", description="implicit: a second policy that prefers success (iStar); q: a value of turns."
    )
    lr: float | None = Field(default=None, gt=0, description="Learning rate; null: that of the policy.")
    beta: float = Field(default=0.05, gt=0, description="Scale of log-ratios (implicit).")
    normalise: bool = Field(default=True, description="Divides by the largest score of a batch (implicit).")
    gamma: float = Field(default=0.95, gt=0, le=1, description="Discount per turn (q).")

    @model_validator(mode="after")
    def _fits_together(self) -> ScorerConfig:
        of = {"beta": "implicit", "normalise": "implicit", "gamma": "q"}
        for name in sorted(self.model_fields_set & of.keys()):
            changed = getattr(self, name) != type(self).model_fields[name].default
            if changed and self.kind != of[name]:
                raise ValueError(f"scorer.{name} belongs to kind {of[name]}, and scorer.kind is {self.kind}: drop it")
        if self.kind == "off" and self.lr is not None:
            raise ValueError("scorer.lr is given and scorer.kind is off, so nothing learns: name a kind, or drop it")
        return self
