"""What is watched, what stops a run, and where metrics go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from starpod.trainer.section import Section, read_off


class EchoTrapConfig(Section):
    """When the four collapse signals warn. All are compared with their own start."""

    start_steps: int = Field(
        default=10, ge=1, description="Steps whose mean is the start that signals are compared with."
    )
    window: int = Field(default=5, ge=1, description="Steps whose median is compared: single steps never warn.")
    reward_std: float = Field(
        default=0.33, gt=0, lt=1, description="Warn when in-group reward deviation falls below this share."
    )
    entropy: float = Field(
        default=0.2, gt=0, lt=1, description="Warn when the policy's entropy falls below this share."
    )
    diversity: float = Field(
        default=0.5, gt=0, lt=1, description="Warn when response diversity falls below this share."
    )
    grad_norm: float = Field(default=4.0, gt=1, description="Warn when the gradient norm rises above this multiple.")
    release: float = Field(
        default=1.25,
        ge=1,
        description="A warning may come again after the signal recovered past its bound by this factor.",
    )
    verdict: int = Field(default=2, ge=2, le=4, description="Signals that together are called an Echo Trap.")
    solved: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="From this success on, by the median of the window, deviation, entropy and diversity may fall "
        "without a warning, until success is below it by the factor `release`.",
    )


class InformationConfig(Section):
    """Mutual information between prompts and reasoning (RAGEN-2). Costs samples x distinct prompts scored sequences."""

    every: int = Field(default=0, ge=0, description="Measure every so many steps, and at the first. 0: never.")
    samples: int = Field(default=64, ge=2, description="Turns per measurement.")
    first_turns: bool = Field(default=True, description="Measure on the first turns of episodes.")
    random_turns: bool = Field(
        default=False, description="Measure on random turns: each is a prompt of its own, so costlier."
    )
    decay: float = Field(
        default=0.9, ge=0, lt=1, description="Of the moving average of the deviation below the z-score."
    )
    low_information: float = Field(
        default=0.5, gt=0, lt=1, description="Below this share of the bound, information is low."
    )
    low_entropy: float = Field(
        default=0.5, gt=0, lt=1, description="Below this share of its start, conditional entropy is low."
    )


class GradientConfig(Section):
    """Gradient norms by reward deviation of the groups, without an optimiser step."""

    every: int = Field(default=0, ge=0, description="Report every so many steps. 0: never.")
    buckets: int = Field(
        default=6, ge=1, description="Buckets of groups by reward deviation, beside that of zero deviation."
    )


class EarlyStopConfig(Section):
    """Rules that end a run which learns nothing any more."""

    reward_std: bool = Field(default=True, description="Stop when in-group reward deviation stays near zero.")
    reward_std_share: float = Field(default=0.1, gt=0, lt=1, description="Near zero: below this share of its start.")
    reward_std_steps: int = Field(
        default=10, ge=1, description="Steps of the start, and steps in a row that stop the run."
    )
    low_success: bool = Field(
        default=True, description="Stop when evaluations stay near zero success, and their return does not rise."
    )
    low_success_below: float = Field(default=0.01, gt=0, lt=1, description="Near zero: below this success.")
    low_success_times: int = Field(default=5, ge=1, description="Evaluations in a row that stop the run.")
    empty_filter: bool = Field(default=True, description="Stop when the filter keeps no group.")
    empty_filter_times: int = Field(default=5, ge=1, description="Steps in a row that stop the run.")


class SinkConfig(Section):
    """Where metrics go beside metrics.jsonl, which is always written."""

    tensorboard: bool = Field(default=True, description="Write TensorBoard files, if tensorboard is installed.")
    wandb: bool = Field(default=False, description="Log to Weights & Biases.")
    mlflow: bool = Field(default=False, description="Log to MLflow.")
    project: str = Field(default="starpod", description="Project in Weights & Biases, experiment in MLflow.")


class MonitorConfig(Section):
    """Diagnostics, early stops, sinks and the screen."""

    screen: Annotated[Literal["auto", "live", "plain", "off"], BeforeValidator(read_off)] = Field(
        default="auto", description="Live screen or plain log; auto: live where there is a terminal."
    )
    echo_trap: EchoTrapConfig = Field(default=EchoTrapConfig(), description="Collapse signals.")
    information: InformationConfig = Field(default=InformationConfig(), description="Mutual information.")
    gradients: GradientConfig = Field(default=GradientConfig(), description="Gradients by reward deviation.")
    early_stop: EarlyStopConfig = Field(default=EarlyStopConfig(), description="Rules that end a run.")
    sinks: SinkConfig = Field(default=SinkConfig(), description="Where metrics go.")
