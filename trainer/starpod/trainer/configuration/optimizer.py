"""Configuration of the optimiser and of its learning rate schedule."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from starpod.trainer.configuration.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW with its schedule, and bounds on the difference between engine and trainer."""

    lr: float = Field(default=1e-6, gt=0, description="Learning rate of the policy.")
    critic_lr: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate of the critic; null: 1e-3 for a value head on the policy, 1e-5 for a second model.",
    )
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Decay rates of AdamW's moving averages.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon, added to the denominator.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Maximum gradient norm, separately for policy and critic."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Learning rates after the warm-up; all except constant end at 0."
    )
    warmup_iterations: int = Field(default=0, ge=0, description="Iterations over which the rates rise from 0.")
    schedule_iterations: int | None = Field(
        default=None, ge=1, description="Iterations until the learning rates are 0; null: stop.iterations."
    )
    micro_batch_tokens: int = Field(
        default=8192,
        ge=1,
        description="Maximum tokens of a forward pass, with padding; affects memory, not gradients.",
    )
    max_logprob_gap_mean: float = Field(
        default=0.1,
        gt=0,
        description="Maximum mean log-probability gap of engine and trainer, in nats; above it, the run fails.",
    )
    max_logprob_gap_q99: float = Field(
        default=0.5, gt=0, description="Maximum 0.99 quantile of the log-probability gap over fresh tokens, in nats."
    )

    @model_validator(mode="after")
    def _has_an_end(self) -> OptimizerConfig:
        if self.schedule == "constant" and self.schedule_iterations is not None:
            raise ValueError(
                "optimizer.schedule_iterations sets when the rates reach 0, but with optimizer.schedule constant "
                "they never do: choose linear or cosine, or drop it"
            )
        return self

    def rate_factor(self, iteration: int, iterations: int) -> float:
        """Return the factor of the learning rates in an iteration.

        It depends only on the iteration, counted from 1, and on the number of iterations of the run, so there is no
        state to resume.
        """
        index, warmup = iteration - 1, self.warmup_iterations
        if index < warmup:
            return iteration / (warmup + 1)
        if self.schedule == "constant":
            return 1.0
        total = self.schedule_iterations or iterations
        share = min(1.0, (index - warmup) / max(1, total - warmup))
        return 1 - share if self.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
