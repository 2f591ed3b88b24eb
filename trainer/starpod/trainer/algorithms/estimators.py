"""Estimators of advantages: the keys, defaults and requirements of each one, and its computation.

The keys of an estimator belong to the configuration's `algorithm`, and are refused with another estimator. Torch is
imported only when advantages are computed, so that a wrong configuration is refused quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from starpod.trainer.algorithms.sections import GiGPOConfig
from starpod.trainer.algorithms.terms import TERMS, CreditTerm
from starpod.trainer.configuration.section import Section
from starpod.trainer.prompts.grammar import Block

if TYPE_CHECKING:
    from torch import Tensor

    from starpod.trainer.data.batch import Advantages, RolloutBatch


@dataclass(frozen=True, slots=True)
class EstimatorSettings:
    """Keys of the section `algorithm` that estimators share."""

    source: str
    """`algorithm.advantage`: the estimator's name or FILE.py:NAME."""
    terms: tuple[CreditTerm, ...]
    """The credit terms of the estimator."""
    whiten: bool
    """`algorithm.whiten`."""


class Estimator(Section):
    """Base class of estimators. By default, an estimator has no critic and adds up its credit terms in `TERMS`."""

    heads: ClassVar[int] = 0
    """Number of values that the critic returns per token; 0: there is no critic."""
    whitening: ClassVar[tuple[bool, ...]] = (False,)
    """Allowed values of `algorithm.whiten`, the default first."""
    whitens_itself: ClassVar[bool] = False
    """Whether `estimate` itself applies `algorithm.whiten`, instead of its caller."""
    first_blocks: ClassVar[tuple[Block, ...]] = ()
    """Blocks that `prompt.blocks` must begin with. They get separate credit."""

    def terms_of(self, table: tuple[CreditTerm, ...]) -> tuple[CreditTerm, ...]:
        """Return the credit terms, by default `table`; none for an estimator with a critic or from a user's file.

        table: terms that `TERMS` lists for this estimator.
        """
        return table

    def estimate(self, settings: EstimatorSettings, rollout: RolloutBatch, rewards_BT: Tensor) -> Advantages:
        """Return advantages, not whitened unless `whitens_itself`.

        Args:
            settings: Keys of the section `algorithm` that do not belong to one estimator.
            rollout: Episodes of one environment.
            rewards_BT: Their rewards, minus the KL penalty if there is one.
        """
        from starpod.trainer.algorithms.credit import credit
        from starpod.trainer.data.batch import Advantages

        return Advantages(credit(settings.terms, rollout, rewards_BT), None, rollout.mask_BT)


class ReinforcePlusPlus(Estimator):
    """The `reinforce_plus_plus` estimator: an advantage is the sum of rewards at this and later tokens."""

    whitening: ClassVar[tuple[bool, ...]] = (True,)

    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")

    def terms_of(self, table: tuple[CreditTerm, ...]) -> tuple[CreditTerm, ...]:
        return tuple(term.model_copy(update={"gamma": self.gamma}) for term in table)


class ReinforcePlusPlusBaseline(Estimator):
    """The `reinforce_plus_plus_baseline` estimator: the return minus the group's mean."""

    whitening: ClassVar[tuple[bool, ...]] = (True,)


class GiGPO(Estimator):
    """The `gigpo` estimator: episodes are compared within their group, and turns with other turns in the same state."""

    gigpo: GiGPOConfig = GiGPOConfig()

    def terms_of(self, table: tuple[CreditTerm, ...]) -> tuple[CreditTerm, ...]:
        config = self.gigpo
        episode, step = (term.model_copy(update={"scale": "std" if config.normalise else "none"}) for term in table)
        step = step.model_copy(update={"weight": config.weight, "gamma": config.gamma})
        return (episode, step) if config.weight else (episode,)


class Terms(Estimator):
    """The `terms` estimator: the sum of the credit terms in the configuration."""

    whitening: ClassVar[tuple[bool, ...]] = (False, True)

    terms: tuple[CreditTerm, ...] = Field(default=(), description="Terms to add up.")

    @model_validator(mode="after")
    def _has_terms(self) -> Terms:
        if not self.terms:
            raise ValueError(
                "algorithm.advantage terms adds up algorithm.terms, which is empty: give some, e.g. [{unit: turn, "
                "score: to_go, key: [state]}]"
            )
        return self

    def terms_of(self, table: tuple[CreditTerm, ...]) -> tuple[CreditTerm, ...]:
        return self.terms


class UserEstimator(Estimator):
    """An estimator from a user's file. user_methods.py describes its arguments and result."""

    whitening: ClassVar[tuple[bool, ...]] = (False, True)

    advantage_parameters: dict[str, Any] = Field(default={}, description="Keyword arguments of FILE.py:NAME.")

    def terms_of(self, table: tuple[CreditTerm, ...]) -> tuple[CreditTerm, ...]:
        return ()

    def estimate(self, settings: EstimatorSettings, rollout: RolloutBatch, rewards_BT: Tensor) -> Advantages:
        from starpod.trainer.algorithms.method_calls import estimate_advantages
        from starpod.trainer.data.batch import Advantages

        advantages_BT = estimate_advantages(settings.source, self.advantage_parameters, rollout, rewards_BT)
        return Advantages(advantages_BT, None, rollout.mask_BT)


class CriticEstimator(Estimator):
    """Base class of estimators with a critic."""

    heads: ClassVar[int] = 1
    whitening: ClassVar[tuple[bool, ...]] = (True, False)

    bootstrap_truncated: bool = Field(
        default=False, description="Adds the critic's value at the end of truncated episodes."
    )
    value_coefficient: float = Field(default=0.5, gt=0, description="Weight of the critic's loss.")
    value_clip: float | None = Field(
        default=None, gt=0, description="Maximum change of a value in an update; null: no limit."
    )

    def terms_of(self, table: tuple[CreditTerm, ...]) -> tuple[CreditTerm, ...]:
        return ()


class TokenEstimator(CriticEstimator):
    """Base class of the `gae` and `bilevel_gae` estimators."""

    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(default=1.0, ge=0, le=1, description="Lambda per token.")


class GAE(TokenEstimator):
    """The `gae` estimator: generalised advantage estimation over tokens."""

    baseline: Literal["token", "trajectory"] = Field(
        default="token", description="trajectory: the critic's value at the first token is the baseline of all tokens."
    )

    @model_validator(mode="after")
    def _has_one_baseline(self) -> GAE:
        if self.baseline == "trajectory" and self.lam != 1:
            raise ValueError(
                "algorithm.baseline trajectory uses one value per episode and no lambda: set algorithm.lam to 1"
            )
        return self

    def estimate(self, settings: EstimatorSettings, rollout: RolloutBatch, rewards_BT: Tensor) -> Advantages:
        from starpod.trainer.algorithms.gae import first_token, gae, trajectory_baseline
        from starpod.trainer.data.batch import Advantages

        values_BT, mask_BT, bootstrap_B = rollout.known_values_BT, rollout.mask_BT, rollout.bootstrap_B
        if self.baseline == "trajectory":
            advantages_BT, returns_BT = trajectory_baseline(
                rewards_BT, values_BT, mask_BT, bootstrap_B=bootstrap_B, gamma=self.gamma
            )
            return Advantages(advantages_BT, returns_BT, first_token(mask_BT))
        advantages_BT = gae(rewards_BT, values_BT, mask_BT, bootstrap_B=bootstrap_B, gamma=self.gamma, lam=self.lam)
        return Advantages.over_values(advantages_BT, values_BT, mask_BT)


class BilevelGAE(TokenEstimator):
    """The `bilevel_gae` estimator: generalised advantage estimation over turns, and over tokens within each turn."""

    turn_gamma: float = Field(default=0.95, gt=0, le=1, description="Discount per turn.")
    turn_lam: float = Field(default=1.0, ge=0, le=1, description="Lambda per turn.")

    def estimate(self, settings: EstimatorSettings, rollout: RolloutBatch, rewards_BT: Tensor) -> Advantages:
        from starpod.trainer.algorithms.gae import bilevel_gae
        from starpod.trainer.data.batch import Advantages

        values_BT, mask_BT = rollout.known_values_BT, rollout.mask_BT
        advantages_BT = bilevel_gae(
            rewards_BT,
            values_BT,
            mask_BT,
            rollout.turns_BT,
            bootstrap_B=rollout.bootstrap_B,
            turn_gamma=self.turn_gamma,
            turn_lam=self.turn_lam,
            gamma=self.gamma,
            lam=self.lam,
        )
        return Advantages.over_values(advantages_BT, values_BT, mask_BT)


class HAE(CriticEstimator):
    """The `hae` estimator: hierarchical advantage estimation over segments with one subgoal, and over their turns."""

    heads: ClassVar[int] = 3
    whitens_itself: ClassVar[bool] = True
    first_blocks: ClassVar[tuple[Block, ...]] = ("switch", "subgoal")

    turn_gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per turn.")
    turn_lam: float = Field(default=1.0, ge=0, le=1, description="Lambda per turn.")
    segment_lam: float = Field(default=0.95, ge=0, le=1, description="Lambda per segment.")

    def estimate(self, settings: EstimatorSettings, rollout: RolloutBatch, rewards_BT: Tensor) -> Advantages:
        from starpod.trainer.algorithms.hae import hae, subgoal_begins
        from starpod.trainer.data.batch import Advantages

        return Advantages(
            *hae(
                rewards_BT,
                rollout.known_values_BT,
                rollout.mask_BT,
                rollout.turns_BT,
                blocks_BT=rollout.known_blocks_BT,
                switches_BT=subgoal_begins(rollout.episodes, rollout.mask_BT, rollout.turns_BT),
                bootstrap_B=rollout.bootstrap_B,
                turn_gamma=self.turn_gamma,
                turn_lam=self.turn_lam,
                segment_lam=self.segment_lam,
                whiten=settings.whiten,
            )
        )


ESTIMATORS: dict[str, type[Estimator]] = {
    "gae": GAE,
    "bilevel_gae": BilevelGAE,
    "hae": HAE,
    **dict.fromkeys(TERMS, Estimator),
    "gigpo": GiGPO,
    "reinforce_plus_plus": ReinforcePlusPlus,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaseline,
    "terms": Terms,
}
"""Estimators by name."""
