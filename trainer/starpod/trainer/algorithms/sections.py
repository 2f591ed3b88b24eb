"""Nested sections of the algorithm's configuration.

Each has a field that names a kind (`where`, `kind`, `strategy`, `mode`). Missing values that a kind needs get defaults;
values that a kind does not use are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from starpod.trainer.configuration.section import Section


def fill_defaults(values: Any, kind: str, default: str, defaults: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the values with the defaults of their kind filled in. A single word is the kind."""
    if isinstance(values, str):
        values = {kind: values}
    if not isinstance(values, Mapping):
        return values
    return {**defaults.get(str(values.get(kind, default)), {}), **values}


class KLConfig(Section):
    """KL term relative to a frozen reference: the policy that training began with."""

    where: Literal["off", "reward", "loss"] = Field(
        default="off",
        description="reward: the penalty is subtracted from rewards; loss: added to the loss; off: no reference "
        "policy.",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        default="k1", description="By default k1 in the reward and k3 in the loss."
    )
    coefficient: float = Field(default=0.0, ge=0, description="By default 0.001 if the term is on.")
    agents: dict[str, float] = Field(
        default={}, description="Different coefficients for some agents, by id: {attempt1: 0.1}."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        defaults = {
            "reward": {"estimator": "k1", "coefficient": 0.001},
            "loss": {"estimator": "k3", "coefficient": 0.001},
        }
        return fill_defaults(values, "where", "off", defaults)

    @model_validator(mode="after")
    def _fits_together(self) -> KLConfig:
        if self.where == "off" and self.coefficient:
            raise ValueError(
                f"algorithm.kl.coefficient is {self.coefficient:g} but algorithm.kl.where is off: "
                "set where to reward or loss, or drop the coefficient"
            )
        if wrong := [name for name, coefficient in self.agents.items() if not 0 <= coefficient < math.inf]:
            raise ValueError(f"algorithm.kl.agents.{wrong[0]} is {self.agents[wrong[0]]:g}: give 0 or more")
        if self.where == "off" and self.agents:
            raise ValueError(
                "algorithm.kl.agents is given but algorithm.kl.where is off: set where to reward or loss, or drop it"
            )
        if self.where == "off" and self.estimator != "k1":
            raise ValueError(
                f"algorithm.kl.estimator is {self.estimator} but algorithm.kl.where is off, so nothing is estimated: "
                "set where to reward or loss, or drop the estimator"
            )
        if self.where != "off" and not self.coefficient:
            raise ValueError(f"algorithm.kl.where is {self.where} with a coefficient of 0: set where to off")
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError(
                "algorithm.kl.estimator k1 has no effect in the loss, because its mean gradient is zero: use k2 or "
                "k3, or put it in the reward"
            )
        return self


class TurnClipConfig(Section):
    """Clipping of ratios with bounds that change from turn to turn."""

    kind: Literal["off", "decay"] = Field(default="off", description="decay: bounds depend on the turn.")
    decay: float | None = Field(default=None, gt=0, description="Factor of both bounds per turn; by default 0.9.")
    low: tuple[Annotated[float, Field(ge=0, lt=1)], ...] | None = Field(
        default=None, min_length=1, description="Lower bounds by turn, instead of decay; later turns use the last one."
    )
    high: tuple[Annotated[float, Field(ge=0)], ...] | None = Field(
        default=None, min_length=1, description="Upper bounds by turn, instead of decay; later turns use the last one."
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        listed = isinstance(values, Mapping) and (values.get("low") is not None or values.get("high") is not None)
        return values if listed else fill_defaults(values, "kind", "off", {"decay": {"decay": 0.9}})

    @model_validator(mode="after")
    def _fits_together(self) -> TurnClipConfig:
        names = {name for name in ("decay", "low", "high") if getattr(self, name) is not None}
        if names and self.kind == "off":
            raise ValueError(
                f"algorithm.turn_clip.{min(names)} has no effect if kind is off: drop it, or set kind to decay"
            )
        if self.kind == "decay" and names not in ({"decay"}, {"low", "high"}):
            raise ValueError("algorithm.turn_clip of kind decay takes either decay, or both low and high")
        return self


class FilterConfig(Section):
    """Selection of the groups to train on, by the standard deviation of their returns."""

    strategy: Literal["none", "top_fraction", "top_p"] = Field(
        default="none", description="See docs/algorithms.md#which-groups-are-trained-on."
    )
    value: float | None = Field(
        default=None, gt=0, description="Share to keep; by default 0.25 for top_fraction, 0.9 for top_p."
    )
    drop_identical: bool = Field(
        default=False,
        description="Drops groups whose members all gave the same replies: their rewards differ only by chance.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        return fill_defaults(values, "strategy", "none", {"top_fraction": {"value": 0.25}, "top_p": {"value": 0.9}})

    @model_validator(mode="after")
    def _fits_together(self) -> FilterConfig:
        if self.strategy == "none" and self.value is not None:
            raise ValueError(
                f"algorithm.filter.value is {self.value:g} but algorithm.filter.strategy is none, which keeps "
                "every group: name a strategy, e.g. top_fraction, or set the value to null"
            )
        if self.strategy != "none" and self.value is None:
            raise ValueError(f"algorithm.filter.strategy {self.strategy} needs a value")
        if self.value is not None and self.value > 1:
            raise ValueError(
                f"algorithm.filter.value {self.value:g} with strategy {self.strategy} is a share: give one above 0 "
                "and at most 1"
            )
        return self


class DynamicSamplingConfig(Section):
    """Replacement of groups whose members all did equally well (DAPO, arXiv 2503.14476)."""

    enabled: bool = Field(default=False, description="Turns replacement on.")
    max_rounds: int = Field(default=3, ge=1, description="Maximum rounds in one collection.")

    @model_validator(mode="after")
    def _fits_together(self) -> DynamicSamplingConfig:
        if not self.enabled and self != DynamicSamplingConfig.model_construct():
            raise ValueError(
                f"algorithm.dynamic_sampling.max_rounds is {self.max_rounds} but no group is replaced: set "
                "algorithm.dynamic_sampling.enabled to true, or drop it"
            )
        return self


class GiGPOConfig(Section):
    """Group-in-group advantages (arXiv 2505.10978, equations 3 to 8). The discount is that of the authors' code."""

    weight: float = Field(default=1.0, ge=0, description="Weight of the turn's advantage.")
    gamma: float = Field(default=0.95, gt=0, le=1, description="Discount per turn.")
    normalise: bool = Field(default=False, description="Divides both advantages by a standard deviation.")


class CorrectionConfig(Section):
    """Importance weights for tokens that an older policy sampled. docs/algorithms.md names the sources of bounds."""

    mode: Literal["off", "tis", "mis", "icepop", "geometric", "bypass"] = Field(
        default="tis",
        description="By default bypass in dppo; see docs/algorithms.md#data-of-another-policy.",
    )
    level: Literal["token", "sequence"] = Field(
        default="token",
        description="token: a ratio per token; sequence: their product over the episode, the default of mis.",
    )
    cap: float | None = Field(
        default=None,
        ge=1,
        description="Upper bound of the ratio; by default tis 2, mis 3, icepop 5, geometric 1.01.",
    )
    low: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Lower bound of the ratio; by default mis 0, icepop 0.5, geometric 0.99.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        former = {"truncated": "tis", "masked": "mis with level token, cap 2 and low 0.5"}
        if isinstance(values, Mapping) and (mode := str(values.get("mode"))) in former:
            raise ValueError(f"algorithm.correction.mode {mode} is called {former[mode]} now")
        defaults: dict[str, dict[str, Any]] = {
            "tis": {"cap": 2.0},
            "mis": {"level": "sequence", "cap": 3.0, "low": 0.0},
            "icepop": {"cap": 5.0, "low": 0.5},
            "geometric": {"level": "sequence", "cap": 1.01, "low": 0.99},
        }
        return fill_defaults(values, "mode", "tis", defaults)

    @model_validator(mode="after")
    def _fits_together(self) -> CorrectionConfig:
        masks = self.mode in ("mis", "icepop", "geometric")
        mode = f"algorithm.correction.mode {self.mode}"
        if self.cap is None and (masks or self.mode == "tis"):
            raise ValueError(f"{mode} needs a cap, e.g. 2")
        if self.low is None and masks:
            raise ValueError(f"{mode} needs a lower bound: set low, 0 for none")
        if self.low is not None and self.mode == "tis":
            raise ValueError(f"{mode} has no lower bound: drop low, or set mode to mis or icepop")
        if self.mode in ("off", "bypass") and (self.cap, self.low, self.level) != (None, None, "token"):
            raise ValueError(f"{mode} uses no weights: drop cap, low and level, or set mode to tis")
        if (self.mode, self.level) in (("icepop", "sequence"), ("geometric", "token")):
            raise ValueError(f"{mode} has a fixed level: drop level, or set mode to mis")
        return self
