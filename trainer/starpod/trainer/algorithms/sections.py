"""Nested sections of the algorithm's configuration, most of them of several kinds."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from starpod.trainer.configuration.kinds import KindBy
from starpod.trainer.configuration.section import Section

# --- KL term ----------------------------------------------------------------------------------------------------------


class NoKL(Section):
    """No KL term, and no reference policy."""

    where: Literal["off"] = "off"


class RewardKL(Section):
    """A penalty that is subtracted from rewards: the KL to a frozen reference, the policy that training began with."""

    where: Literal["reward"] = "reward"
    estimator: Literal["k1", "k2", "k3"] = Field(default="k1", description="Estimator of the KL.")
    coefficient: float = Field(default=0.001, gt=0, description="Weight of the penalty.")
    agents: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="Different coefficients for some agents, by id: {attempt1: 0.1}."
    )


class LossKL(Section):
    """A term of the loss: the KL to a frozen reference, the policy that training began with."""

    where: Literal["loss"] = "loss"
    estimator: Literal["k2", "k3"] = Field(
        default="k3",
        description="Estimator of the KL. k1 is only for rewards: as a loss, its gradient is zero on average.",
    )
    coefficient: float = Field(default=0.001, gt=0, description="Weight of the term.")
    agents: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="Different coefficients for some agents, by id: {attempt1: 0.1}."
    )


KL = Annotated[NoKL | RewardKL | LossKL, KindBy("where")]

# --- selection of groups ----------------------------------------------------------------------------------------------


class GroupFilter(Section):
    """Keys of all filters of groups."""

    drop_identical: bool = Field(
        default=False,
        description="Drops groups whose members all gave the same replies: their rewards differ only by chance.",
    )


class KeepAll(GroupFilter):
    """No filter: all groups are trained on."""

    value: ClassVar[None] = None

    strategy: Literal["none"] = "none"


class TopFraction(GroupFilter):
    """Trains on the groups with the highest standard deviations of returns."""

    strategy: Literal["top_fraction"] = "top_fraction"
    value: float = Field(default=0.25, gt=0, le=1, description="Share of the groups to train on.")


class TopP(GroupFilter):
    """Trains on the fewest groups whose standard deviations of returns add up to a share of the sum over all groups."""

    strategy: Literal["top_p"] = "top_p"
    value: float = Field(default=0.9, gt=0, le=1, description="Share of the sum of all standard deviations.")


Filter = Annotated[KeepAll | TopFraction | TopP, KindBy("strategy")]


class DynamicSamplingConfig(Section):
    """Replacement of groups whose members all did equally well (DAPO, arXiv 2503.14476)."""

    enabled: bool = Field(default=False, description="Replaces groups whose members all did equally well by new ones.")
    max_rounds: int = Field(default=3, ge=1, description="Maximum rounds in one collection.")

    @model_validator(mode="after")
    def _fits_together(self) -> DynamicSamplingConfig:
        if not self.enabled and self != DynamicSamplingConfig.model_construct():
            raise ValueError(
                f"algorithm.dynamic_sampling.max_rounds is {self.max_rounds} but no group is replaced: set "
                "algorithm.dynamic_sampling.enabled to true, or drop it"
            )
        return self


# --- tokens of another policy -----------------------------------------------------------------------------------------


class TruncatedWeights(Section):
    """Importance weights up to a cap, for tokens that an older policy sampled."""

    mode: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = Field(
        default="token", description="token: a ratio per token; sequence: their product over the episode."
    )
    cap: float = Field(default=2.0, ge=1, description="Upper bound of the weight.")


class NoWeights(Section):
    """No importance weights. bypass: ratios of the loss refer to the sampler's probabilities."""

    level: ClassVar[Literal["token"]] = "token"

    mode: Literal["off", "bypass"] = "off"


class MaskedWeights(Section):
    """Importance weights, or 0 outside bounds (masked importance sampling)."""

    mode: Literal["mis"] = "mis"
    level: Literal["token", "sequence"] = Field(
        default="sequence", description="token: a ratio per token; sequence: their product over the episode."
    )
    cap: float = Field(default=3.0, ge=1, description="Upper bound of the weight.")
    low: float = Field(default=0.0, ge=0, le=1, description="Lower bound of the weight.")


class IcePop(Section):
    """Importance weights of tokens. A token whose weight is out of bounds gets 0 and does not count."""

    level: ClassVar[Literal["token"]] = "token"

    mode: Literal["icepop"] = "icepop"
    cap: float = Field(default=5.0, ge=1, description="Upper bound of the weight.")
    low: float = Field(default=0.5, ge=0, le=1, description="Lower bound of the weight.")


class GeometricMask(Section):
    """Weight 1, or 0 for episodes whose geometric mean of ratios is outside bounds."""

    level: ClassVar[Literal["sequence"]] = "sequence"

    mode: Literal["geometric"] = "geometric"
    cap: float = Field(default=1.01, ge=1, description="Upper bound of the mean.")
    low: float = Field(default=0.99, ge=0, le=1, description="Lower bound of the mean.")


Correction = Annotated[
    TruncatedWeights | NoWeights | MaskedWeights | IcePop | GeometricMask,
    KindBy("mode"),
]
"""Importance weights for tokens that an older policy sampled. docs/algorithms.md names the sources of bounds."""
