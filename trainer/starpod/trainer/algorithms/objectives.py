"""Losses of the policy: keys and defaults of each one; losses.py computes them.

A key that a loss declares here stands in the configuration's `algorithm`, and is refused beside another loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from starpod.trainer.algorithms.sections import TurnClipConfig
from starpod.trainer.section import Section
from starpod.trainer.user_file import load

if TYPE_CHECKING:
    from torch import Tensor

    from starpod.trainer.algorithms.config import AlgorithmConfig
    from starpod.trainer.algorithms.losses import PolicyLoss


class Objective(Section):
    """A loss of the policy."""

    loss_average: ClassVar[str] = "token-mean"
    """Default of `algorithm.loss_average`."""

    couples_turns: ClassVar[bool] = True
    """Whether a token's loss depends on the present log-probabilities of its episode's other turns."""

    def per_token(self, config: AlgorithmConfig, *tensors: Tensor, mask_BT: Tensor, turns_BT: Tensor) -> PolicyLoss:
        """Return the loss of each token; arguments as for `losses.policy_loss`."""
        raise NotImplementedError


class ClippedObjective(Objective):
    """Losses with clipped ratios."""

    clip_low: float = Field(default=0.2, ge=0, lt=1, description="Lower bound of ratios: 1 - clip_low.")
    clip_high: float = Field(default=0.28, ge=0, description="Upper bound of ratios: 1 + clip_high.")
    dual_clip: float | None = Field(
        default=None, gt=1, description="Bound of ratios where the advantage is negative; null: none."
    )


class PPO(ClippedObjective):
    """Loss ppo: a ratio for each token."""

    couples_turns: ClassVar[bool] = False

    turn_clip: TurnClipConfig = TurnClipConfig()

    def per_token(self, config: AlgorithmConfig, *tensors: Tensor, mask_BT: Tensor, turns_BT: Tensor) -> PolicyLoss:
        from starpod.trainer.algorithms.losses import ppo

        return ppo(self, *tensors, mask_BT=mask_BT, turns_BT=turns_BT)


class GSPO(ClippedObjective):
    """Loss gspo: a ratio for each episode, which moves far less than a token's (arXiv 2507.18071, section 5.1)."""

    loss_average: ClassVar[str] = "seq-mean-token-mean"

    clip_low: float = Field(default=3e-4, ge=0, lt=1, description="Lower bound of ratios: 1 - clip_low.")
    clip_high: float = Field(default=4e-4, ge=0, description="Upper bound of ratios: 1 + clip_high.")

    def per_token(self, config: AlgorithmConfig, *tensors: Tensor, mask_BT: Tensor, turns_BT: Tensor) -> PolicyLoss:
        from starpod.trainer.algorithms.losses import gspo

        return gspo(self, *tensors, mask_BT=mask_BT)


class UserObjective(Objective):
    """A loss of a user's file. user_methods.py says what it is given and returns."""

    loss_parameters: dict[str, Any] = Field(default={}, description="Keyword arguments of FILE.py:NAME.")

    def per_token(self, config: AlgorithmConfig, *tensors: Tensor, mask_BT: Tensor, turns_BT: Tensor) -> PolicyLoss:
        function = load("algorithm.loss", config.loss)
        loss: PolicyLoss = function(*tensors, mask_BT=mask_BT, turns_BT=turns_BT, **self.loss_parameters)
        return loss


OBJECTIVES: dict[str, type[Objective]] = {"ppo": PPO, "gspo": GSPO}
"""Losses by name."""
