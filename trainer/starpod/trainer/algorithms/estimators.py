"""Estimators of advantages: the keys, defaults and requirements of each one, and its computation.

Torch is imported only when advantages are computed, so that a wrong configuration is refused quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from starpod.trainer.algorithms.terms import TERMS, CreditTerm
from starpod.trainer.configuration.kinds import KindBy
from starpod.trainer.configuration.section import Section
from starpod.trainer.configuration.user_file import located
from starpod.trainer.prompts.grammar import Block

if TYPE_CHECKING:
    from torch import Tensor

    from starpod.trainer.data.batch import Advantages, RolloutBatch


class Estimator(Section):
    """Base class of estimators. By default, an estimator has no critic and adds up credit terms."""

    heads: ClassVar[int] = 0
    """Number of values that the critic returns per token; 0: there is no critic."""
    whitening: ClassVar[tuple[bool, ...]] = (False,)
    """Allowed values of `algorithm.whiten`, the default first."""
    whitens_itself: ClassVar[bool] = False
    """Whether `estimate` itself applies `algorithm.whiten`, instead of its caller."""
    first_blocks: ClassVar[tuple[Block, ...]] = ()
    """Blocks that `prompt.blocks` must begin with. They get separate credit."""

    kind: str

    @property
    def credit_terms(self) -> tuple[CreditTerm, ...]:
        """The credit terms; none for an estimator with a critic or from a user's file."""
        return (*TERMS[self.kind],)

    def estimate(self, rollout: RolloutBatch, rewards_BT: Tensor, *, whiten: bool) -> Advantages:
        """Return advantages, not whitened unless `whitens_itself`.

        Args:
            rollout: Episodes of one environment.
            rewards_BT: Their rewards, minus the KL penalty if there is one.
            whiten: Value of `algorithm.whiten`.
        """
        from starpod.trainer.algorithms.credit import credit
        from starpod.trainer.data.batch import Advantages

        return Advantages(credit(self.credit_terms, rollout, rewards_BT), None, rollout.mask_BT)


class NamedTerms(Estimator):
    """Estimators whose credit terms have a name, and which have no other keys."""

    kind: Literal[
        "grpo",
        "dr_grpo",
        "maxrl",
        "rloo",
        "loop",
        "vineppo",
        "tree_grpo",
        "mt_grpo",
        "dr_mas",
        "attempts",
        "cm2_trajectory",
        "cm2_turn",
        "cm2_step",
        "istar",
        "agent_prm",
        "blockwise",
    ] = "grpo"


class ReinforcePlusPlus(Estimator):
    """The `reinforce_plus_plus` estimator: an advantage is the sum of rewards at this and later tokens."""

    whitening: ClassVar[tuple[bool, ...]] = (True,)

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")

    @property
    def credit_terms(self) -> tuple[CreditTerm, ...]:
        return tuple(term.model_copy(update={"gamma": self.gamma}) for term in super().credit_terms)


class ReinforcePlusPlusBaseline(Estimator):
    """The `reinforce_plus_plus_baseline` estimator: the return minus the group's mean."""

    whitening: ClassVar[tuple[bool, ...]] = (True,)

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class GiGPO(Estimator):
    """The `gigpo` estimator (arXiv 2505.10978, equations 3 to 8): episodes are compared within their group, and turns
    with other turns in the same state. The discount is that of the authors' code."""

    kind: Literal["gigpo"] = "gigpo"
    weight: float = Field(default=1.0, ge=0, description="Weight of the turn's advantage.")
    gamma: float = Field(default=0.95, gt=0, le=1, description="Discount per turn.")
    normalise: bool = Field(
        default=False,
        description="Divides the episode's and the turn's advantage by the standard deviation of their peers.",
    )

    @property
    def credit_terms(self) -> tuple[CreditTerm, ...]:
        scale = "std" if self.normalise else "none"
        episode, step = (term.model_copy(update={"scale": scale}) for term in super().credit_terms)
        step = step.model_copy(update={"weight": self.weight, "gamma": self.gamma})
        return (episode, step) if self.weight else (episode,)


class Terms(Estimator):
    """The `terms` estimator: the sum of the credit terms in the configuration."""

    whitening: ClassVar[tuple[bool, ...]] = (False, True)

    kind: Literal["terms"] = "terms"
    terms: tuple[CreditTerm, ...] = Field(default=(), description="Terms to add up.")

    @model_validator(mode="after")
    def _has_terms(self) -> Terms:
        if not self.terms:
            raise ValueError(
                "algorithm.advantage terms adds up algorithm.advantage.terms, which is empty: give some, e.g. [{unit: "
                "turn, score: to_go, key: [state]}]"
            )
        return self

    @property
    def credit_terms(self) -> tuple[CreditTerm, ...]:
        return self.terms


class UserEstimator(Estimator):
    """An estimator in a file of yours, whose arguments docs/algorithms.md#methods-of-your-own describes."""

    whitening: ClassVar[tuple[bool, ...]] = (False, True)

    kind: Annotated[str, AfterValidator(located)]
    parameters: dict[str, Any] = Field(default={}, description="Keyword arguments of FILE.py:NAME.")

    @property
    def credit_terms(self) -> tuple[CreditTerm, ...]:
        return ()

    def estimate(self, rollout: RolloutBatch, rewards_BT: Tensor, *, whiten: bool) -> Advantages:
        from starpod.trainer.algorithms.method_calls import estimate_advantages
        from starpod.trainer.data.batch import Advantages

        return Advantages(estimate_advantages(self.kind, self.parameters, rollout, rewards_BT), None, rollout.mask_BT)


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

    @property
    def credit_terms(self) -> tuple[CreditTerm, ...]:
        return ()


class TokenEstimator(CriticEstimator):
    """Base class of the `gae` and `bilevel_gae` estimators."""

    gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per token.")
    lam: float = Field(default=1.0, ge=0, le=1, description="Lambda per token.")


class GAE(TokenEstimator):
    """The `gae` estimator: generalised advantage estimation over tokens."""

    kind: Literal["gae"] = "gae"
    baseline: Literal["token", "trajectory"] = Field(
        default="token", description="trajectory: the critic's value at the first token is the baseline of all tokens."
    )

    @model_validator(mode="after")
    def _has_one_baseline(self) -> GAE:
        if self.baseline == "trajectory" and self.lam != 1:
            raise ValueError(
                "algorithm.advantage.baseline trajectory uses one value per episode and no lambda: set lam to 1"
            )
        return self

    def estimate(self, rollout: RolloutBatch, rewards_BT: Tensor, *, whiten: bool) -> Advantages:
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

    kind: Literal["bilevel_gae"] = "bilevel_gae"
    turn_gamma: float = Field(default=0.95, gt=0, le=1, description="Discount per turn.")
    turn_lam: float = Field(default=1.0, ge=0, le=1, description="Lambda per turn.")

    def estimate(self, rollout: RolloutBatch, rewards_BT: Tensor, *, whiten: bool) -> Advantages:
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

    kind: Literal["hae"] = "hae"
    turn_gamma: float = Field(default=1.0, gt=0, le=1, description="Discount per turn.")
    turn_lam: float = Field(default=1.0, ge=0, le=1, description="Lambda per turn.")
    segment_lam: float = Field(default=0.95, ge=0, le=1, description="Lambda per segment.")

    def estimate(self, rollout: RolloutBatch, rewards_BT: Tensor, *, whiten: bool) -> Advantages:
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
                whiten=whiten,
            )
        )


Advantage = Annotated[
    GAE | BilevelGAE | HAE | NamedTerms | ReinforcePlusPlus | ReinforcePlusPlusBaseline | GiGPO | Terms | UserEstimator,
    KindBy("kind"),
]
