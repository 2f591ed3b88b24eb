"""Configuration of checkpoints."""

from __future__ import annotations

from pydantic import Field

from starpod.trainer.configuration.section import Section


class CheckpointConfig(Section):
    """Interval of checkpoints, and which of them are kept."""

    every: int = Field(default=25, ge=1, description="Iterations between checkpoints; the last one is always saved.")
    keep: int = Field(default=2, ge=1, description="Number of newest checkpoints to keep.")
    keep_best: bool = Field(default=True, description="Also keeps the checkpoint with the best evaluation.")
