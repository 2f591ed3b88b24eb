"""Configuration of a run's output."""

from __future__ import annotations

from pydantic import Field

from starpod.trainer.configuration.section import Section


class SinkConfig(Section):
    """Sinks of metrics in addition to metrics.jsonl."""

    tensorboard: bool = Field(default=True, description="Writes TensorBoard files if TensorBoard is installed.")
    wandb: bool = Field(default=False, description="Logs to Weights & Biases.")
    mlflow: bool = Field(default=False, description="Logs to MLflow.")
    project: str = Field(default="starpod", description="Project in Weights & Biases; experiment in MLflow.")
