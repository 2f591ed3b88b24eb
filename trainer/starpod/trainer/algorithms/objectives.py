"""Losses of the policy: the keys and defaults of each one, and its computation by functions of losses.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from starpod.trainer.algorithms.sections import Correction, NoWeights, TruncatedWeights
from starpod.trainer.configuration.kinds import KindBy
from starpod.trainer.configuration.section import Section
from starpod.trainer.configuration.user_file import located

if TYPE_CHECKING:
    from torch import Tensor

    from starpod.trainer.algorithms.losses import PolicyLoss


class LossInputs(NamedTuple):
    """Arguments of a loss: tensors that contain whole episodes."""

    logprobs_BT: Tensor
    """Log-probabilities under the policy that learns, with gradients."""
    old_logprobs_BT: Tensor
    """Log-probabilities under the policy that ratios refer to, detached."""
    advantages_BT: Tensor
    """Advantages of tokens, detached."""
    mask_BT: Tensor
    """Mask of the sampled tokens (bool)."""
    turns_BT: Tensor
    """Turn of each token; see RolloutBatch."""


Average = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
_AVERAGES = (
    "Mean of the loss. token-mean: over all tokens; seq-mean-token-mean: over each episode, then over episodes; "
    "seq-mean-token-sum: of the episodes' sums; seq-mean-token-sum-norm: of these sums, divided by a constant length."
)

Low = Annotated[float, Field(ge=0, lt=1)]
High = Annotated[float, Field(ge=0)]


class Objective(Section):
    """Keys of all losses of the policy."""

    couples_turns: ClassVar[bool] = True
    """Whether a token's loss depends on the current log-probabilities of other turns of its episode."""
    usual_correction: ClassVar[Correction] = TruncatedWeights()
    """Default of `algorithm.correction` with this loss."""

    kind: str
    average: Average = Field(default="token-mean", description=_AVERAGES)

    def per_token(self, inputs: LossInputs) -> PolicyLoss:
        """Return the loss of each token.

        Raises:
            ConfigError: A loss from a user's file cannot be loaded.
            UserCodeError: It failed, or returned something wrong.
        """
        raise NotImplementedError


class PPO(Objective):
    """The `ppo` loss (arXiv 1707.06347, equation 7): one ratio per token.

    The bounds are those of DAPO (arXiv 2503.14476, section 4.1).
    """

    couples_turns: ClassVar[bool] = False

    kind: Literal["ppo"] = "ppo"
    clip_low: Low | Annotated[tuple[Low, ...], Field(min_length=1)] = Field(
        default=0.2, description="Lower bound of ratios: 1 - clip_low. A list: by turn; later turns use the last one."
    )
    clip_high: High | Annotated[tuple[High, ...], Field(min_length=1)] = Field(
        default=0.28, description="Upper bound of ratios: 1 + clip_high. A list: by turn; later turns use the last one."
    )
    clip_decay: float | None = Field(
        default=None, gt=0, description="Factor of both bounds per turn, such as 0.9; null: the same for all turns."
    )
    dual_clip: float | None = Field(
        default=None, gt=1, description="Upper bound of ratios if the advantage is negative; null: none."
    )

    @property
    def bounds_by_turn(self) -> bool:
        """Whether bounds differ between turns."""
        return self.clip_decay is not None or not all(isinstance(b, float) for b in (self.clip_low, self.clip_high))

    @model_validator(mode="after")
    def _bounds_change_in_one_way(self) -> PPO:
        if self.clip_decay is not None and not all(isinstance(b, float) for b in (self.clip_low, self.clip_high)):
            raise ValueError(
                "algorithm.loss.clip_decay changes one bound from turn to turn, but clip_low or clip_high is a list of "
                "bounds: drop one of them"
            )
        return self

    def per_token(self, inputs: LossInputs) -> PolicyLoss:
        from starpod.trainer.algorithms.losses import bound_by_turn, clipped_loss, masked_log_ratio

        low, high = (
            bound_by_turn(bound, self.clip_decay, inputs.turns_BT, inputs.logprobs_BT.dtype)
            for bound in (self.clip_low, self.clip_high)
        )
        log_ratio_BT = masked_log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
        return clipped_loss(
            log_ratio_BT, inputs.advantages_BT, inputs.mask_BT, low=low, high=high, dual_clip=self.dual_clip
        )


class GSPO(Objective):
    """The `gspo` loss (arXiv 2507.18071): one ratio per episode, which changes far less than a token's.

    The gradient is that of equation 13, the average that of equation 5, and the bounds are those of section 5.1.
    """

    kind: Literal["gspo"] = "gspo"
    average: Average = Field(default="seq-mean-token-mean", description=_AVERAGES)
    clip_low: Low = Field(default=3e-4, description="Lower bound of ratios: 1 - clip_low.")
    clip_high: High = Field(default=4e-4, description="Upper bound of ratios: 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Upper bound of ratios if the advantage is negative; null: none."
    )

    def per_token(self, inputs: LossInputs) -> PolicyLoss:
        from starpod.trainer.algorithms.losses import clipped_loss, episode_log_ratio

        log_ratio_BT = episode_log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
        low, high = self.clip_low, self.clip_high
        return clipped_loss(
            log_ratio_BT, inputs.advantages_BT, inputs.mask_BT, low=low, high=high, dual_clip=self.dual_clip
        )


class CISPO(Objective):
    """The `cispo` loss (arXiv 2506.13585, equations 4 and 5): the ratio is a bounded weight of a token's gradient."""

    couples_turns: ClassVar[bool] = False

    kind: Literal["cispo"] = "cispo"
    # The paper has no lower bound and does not name the upper one. ScaleRL (arXiv 2510.13786, appendix A.17.2) found no
    # difference between weights of at most 4, 5 and 8.
    clip_high: float = Field(default=4.0, ge=0, description="Upper bound of ratios: 1 + clip_high.")

    def per_token(self, inputs: LossInputs) -> PolicyLoss:
        from starpod.trainer.algorithms.losses import masked_log_ratio, weighted_loss

        log_ratio_BT = masked_log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
        return weighted_loss(
            inputs.logprobs_BT, log_ratio_BT, inputs.advantages_BT, inputs.mask_BT, high=self.clip_high
        )


_DIVERGENCE_BOUNDS = {"tv": 0.15, "kl": 0.05}


class DPPO(Objective):
    """The `dppo` loss (arXiv 2602.04879, equations 12 to 14): bounds apply to the divergence at each token.

    Training collapsed if ratio and divergence referred to recomputed probabilities instead of the sampler's (section
    5.2), so `correction` is `bypass` by default. The sum over an episode's tokens is divided by a constant, as in the
    authors' scripts.
    """

    couples_turns: ClassVar[bool] = False
    usual_correction: ClassVar[Correction] = NoWeights(mode="bypass")

    kind: Literal["dppo"] = "dppo"
    average: Average = Field(default="seq-mean-token-sum-norm", description=_AVERAGES)
    divergence: Literal["tv", "kl"] = Field(
        default="tv", description="Total variation or KL divergence, with two outcomes: this token or any other."
    )
    # Both bounds are those of appendix C.1. Most runs of appendix E have 0.2 for tv.
    divergence_low: float = Field(
        default_factory=lambda data: _DIVERGENCE_BOUNDS[data["divergence"]],
        ge=0,
        description="Bound if the advantage is negative; by default 0.15 for tv, 0.05 for kl.",
    )
    divergence_high: float = Field(
        default_factory=lambda data: _DIVERGENCE_BOUNDS[data["divergence"]],
        ge=0,
        description="Bound if the advantage is positive; by default 0.15 for tv, 0.05 for kl.",
    )

    def per_token(self, inputs: LossInputs) -> PolicyLoss:
        from starpod.trainer.algorithms.losses import binary_divergence, divergence_loss, masked_log_ratio

        log_ratio_BT = masked_log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
        return divergence_loss(
            log_ratio_BT,
            inputs.advantages_BT,
            inputs.mask_BT,
            binary_divergence(self.divergence, inputs.logprobs_BT.detach(), inputs.old_logprobs_BT),
            low=self.divergence_low,
            high=self.divergence_high,
        )


class UserObjective(Objective):
    """A loss in a file of yours, whose arguments docs/algorithms.md#methods-of-your-own describes."""

    kind: Annotated[str, AfterValidator(located)]
    parameters: dict[str, Any] = Field(default={}, description="Keyword arguments of FILE.py:NAME.")

    def per_token(self, inputs: LossInputs) -> PolicyLoss:
        from starpod.trainer.algorithms.method_calls import compute_loss

        return compute_loss(self.kind, self.parameters, inputs._asdict())


Loss = Annotated[PPO | GSPO | CISPO | DPPO | UserObjective, KindBy("kind")]
