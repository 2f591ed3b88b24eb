"""Losses of the policy, with the keys and defaults of each one. losses.py computes them.

The keys of a loss belong to the configuration's `algorithm`, and are refused with another loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from starpod.trainer.algorithms.sections import TurnClipConfig, fill_defaults
from starpod.trainer.configuration.section import Section

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


class Objective(Section):
    """A loss of the policy."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """This loss's defaults of the keys that all losses share. A preset's values override them."""

    couples_turns: ClassVar[bool] = True
    """Whether a token's loss depends on the current log-probabilities of other turns of its episode."""

    def per_token(self, source: str, inputs: LossInputs) -> PolicyLoss:
        """Return the loss of each token. `source` is `algorithm.loss`: the loss's name or FILE.py:NAME.

        Raises:
            ConfigError: A loss from a user's file cannot be loaded.
            UserCodeError: It failed, or returned something wrong.
        """
        raise NotImplementedError


class ClippedObjective(Objective):
    """Losses with clipped ratios."""

    clip_low: float = Field(default=0.2, ge=0, lt=1, description="Lower bound of ratios: 1 - clip_low.")
    clip_high: float = Field(default=0.28, ge=0, description="Upper bound of ratios: 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Upper bound of ratios if the advantage is negative; null: none."
    )


class PPO(ClippedObjective):
    """The `ppo` loss (arXiv 1707.06347, equation 7): one ratio per token.

    The bounds are those of DAPO (arXiv 2503.14476, section 4.1).
    """

    couples_turns: ClassVar[bool] = False

    turn_clip: TurnClipConfig = TurnClipConfig()

    def per_token(self, source: str, inputs: LossInputs) -> PolicyLoss:
        from starpod.trainer.algorithms.losses import clipped_loss, masked_log_ratio, turn_bounds

        low: Tensor | float = self.clip_low
        high: Tensor | float = self.clip_high
        if self.turn_clip.kind == "decay":
            low, high = turn_bounds(
                self.turn_clip, self.clip_low, self.clip_high, inputs.turns_BT, inputs.logprobs_BT.dtype
            )
        log_ratio_BT = masked_log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
        return clipped_loss(
            log_ratio_BT, inputs.advantages_BT, inputs.mask_BT, low=low, high=high, dual_clip=self.dual_clip
        )


class GSPO(ClippedObjective):
    """The `gspo` loss (arXiv 2507.18071): one ratio per episode, which changes far less than a token's.

    The gradient is that of equation 13, the average that of equation 5, and the bounds are those of section 5.1.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"loss_average": "seq-mean-token-mean"}

    clip_low: float = Field(default=3e-4, ge=0, lt=1, description="Lower bound of ratios: 1 - clip_low.")
    clip_high: float = Field(default=4e-4, ge=0, description="Upper bound of ratios: 1 + clip_high.")

    def per_token(self, source: str, inputs: LossInputs) -> PolicyLoss:
        from starpod.trainer.algorithms.losses import clipped_loss, episode_log_ratio

        log_ratio_BT = episode_log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
        low, high = self.clip_low, self.clip_high
        return clipped_loss(
            log_ratio_BT, inputs.advantages_BT, inputs.mask_BT, low=low, high=high, dual_clip=self.dual_clip
        )


class CISPO(Objective):
    """The `cispo` loss (arXiv 2506.13585, equations 4 and 5): the ratio is a bounded weight of a token's gradient."""

    couples_turns: ClassVar[bool] = False

    # The paper has no lower bound and does not name the upper one. ScaleRL (arXiv 2510.13786, appendix A.17.2) found no
    # difference between weights of at most 4, 5 and 8.
    clip_high: float = Field(default=4.0, ge=0, description="Upper bound of ratios: 1 + clip_high.")

    def per_token(self, source: str, inputs: LossInputs) -> PolicyLoss:
        from starpod.trainer.algorithms.losses import masked_log_ratio, weighted_loss

        log_ratio_BT = masked_log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
        return weighted_loss(
            inputs.logprobs_BT, log_ratio_BT, inputs.advantages_BT, inputs.mask_BT, high=self.clip_high
        )


class DPPO(Objective):
    """The `dppo` loss (arXiv 2602.04879, equations 12 to 14): bounds apply to the divergence at each token.

    Training collapsed if ratio and divergence referred to recomputed probabilities instead of the sampler's (section
    5.2), so `correction` is `bypass` by default. The sum over an episode's tokens is divided by a constant, as in the
    authors' scripts.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "loss_average": "seq-mean-token-sum-norm",
        "correction": {"mode": "bypass"},
    }
    couples_turns: ClassVar[bool] = False

    divergence: Literal["tv", "kl"] = Field(
        default="tv", description="Total variation or KL divergence, with two outcomes: this token or any other."
    )
    divergence_low: float = Field(
        default=0.15, ge=0, description="Bound if the advantage is negative; by default 0.05 for kl."
    )
    divergence_high: float = Field(
        default=0.15, ge=0, description="Bound if the advantage is positive; by default 0.05 for kl."
    )

    @model_validator(mode="before")
    @classmethod
    def _bounds(cls, values: Any) -> Any:
        # Both bounds are those of appendix C.1. Most runs of appendix E have 0.2 for tv.
        bounds = {"kl": {"divergence_low": 0.05, "divergence_high": 0.05}}
        return fill_defaults(values, "divergence", "tv", bounds)

    def per_token(self, source: str, inputs: LossInputs) -> PolicyLoss:
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
    """A loss from a user's file. user_methods.py describes its arguments and result."""

    loss_parameters: dict[str, Any] = Field(default={}, description="Keyword arguments of FILE.py:NAME.")

    def per_token(self, source: str, inputs: LossInputs) -> PolicyLoss:
        from starpod.trainer.algorithms.method_calls import compute_loss

        return compute_loss(source, self.loss_parameters, inputs._asdict())


OBJECTIVES: dict[str, type[Objective]] = {"ppo": PPO, "gspo": GSPO, "cispo": CISPO, "dppo": DPPO}
"""Losses by name."""
