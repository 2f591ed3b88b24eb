"""Configuration of diagnostics, early stops and sinks of metrics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from starpod.trainer.configuration.section import Section
from starpod.trainer.output.config import SinkConfig


class EchoTrapConfig(Section):
    """Warnings of the Echo Trap. Its signals are four metrics, which are compared with their initial values."""

    start_steps: int = Field(default=10, ge=1, description="Steps whose mean is a signal's initial value.")
    window: int = Field(default=5, ge=1, description="Steps whose median is compared with the initial value.")
    reward_std: float = Field(
        default=0.33, gt=0, lt=1, description="Signal: reward deviation in groups is below this share of its start."
    )
    entropy: float = Field(
        default=0.2, gt=0, lt=1, description="Signal: the policy's entropy is below this share of its start."
    )
    diversity: float = Field(
        default=0.5, gt=0, lt=1, description="Signal: the diversity of replies is below this share of its start."
    )
    identical: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Warns when, in more than this share of the groups whose rewards differ, all replies are "
        "identical. This is not one of the signals.",
    )
    grad_norm: float = Field(default=4.0, gt=1, description="Signal: gradient norm above this multiple of its start.")
    release: float = Field(
        default=1.25,
        ge=1,
        description="Factor by which a signal must recover beyond its bound before it can warn again.",
    )
    verdict: int = Field(default=2, ge=2, le=4, description="Number of warning signals that count as an Echo Trap.")
    solved: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="At this success, only the gradient norm warns, and only if success falls.",
    )


class InformationConfig(Section):
    """Mutual information between prompts and reasoning (RAGEN-2). It scores (samples x distinct prompts) sequences."""

    every: int = Field(default=0, ge=0, description="Steps between measurements; 0: never.")
    samples: int = Field(default=64, ge=2, description="Turns per measurement.")
    random_turns: bool = Field(
        default=False, description="Measures random turns of episodes, and not only first turns. This takes longer."
    )
    decay: float = Field(
        default=0.9,
        ge=0,
        lt=1,
        description="Decay per measurement of the moving average of the standard deviation by which the z-score "
        "divides.",
    )


class GradientConfig(Section):
    """Measurement of gradient norms by the groups' reward deviation and by agent, and of the noise in gradients."""

    every: int = Field(default=0, ge=0, description="Steps between reports; 0: never.")
    buckets: int = Field(
        default=6, ge=1, description="Buckets of groups by reward deviation, besides the one of zero deviation."
    )


class EarlyStopConfig(Section):
    """Rules that end a run that no longer learns."""

    reward_std: bool = Field(
        default=True, description="Stops when in-group reward deviation is below 10 % of its start for 10 steps."
    )
    low_success: bool = Field(default=True, description="Stops when success stays below 1 % and returns do not rise.")
    low_success_times: int = Field(
        default=5, ge=1, description="Number of consecutive evaluations with low success that end the run."
    )
    empty_filter: bool = Field(default=True, description="Stops when the filter keeps no group for 5 steps.")
    plateau: int = Field(
        default=0,
        ge=0,
        description="Stops when success has reached `monitor.echo_trap.solved` and has not risen significantly in this "
        "many consecutive evaluations, compared seed by seed; 0: never. 3 ends a small job soon after it is solved.",
    )


class MonitorConfig(Section):
    """Diagnostics, early stops, sinks and the screen."""

    screen: Literal["auto", "live", "plain", "off"] = Field(
        default="auto",
        description="plain: a log. live: a log above a progress bar. auto: live on a terminal, else plain.",
    )
    echo_trap: EchoTrapConfig = EchoTrapConfig()
    information: InformationConfig = InformationConfig()
    gradients: GradientConfig = GradientConfig()
    early_stop: EarlyStopConfig = EarlyStopConfig()
    sinks: SinkConfig = SinkConfig()
