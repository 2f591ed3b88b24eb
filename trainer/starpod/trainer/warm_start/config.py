"""Configuration of the warm start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from starpod.trainer.models.config import TINY, ModelConfig
from starpod.trainer.prompts.grammar import Further
from starpod.trainer.section import Section


class WarmStartConfig(Section):
    """Imitation before reinforcement learning. 0 steps turn it off."""

    steps: int = Field(default=0, ge=0, description="Optimiser steps.")
    episodes: int = Field(
        default=1000, ge=0, description="Demonstrations to play; a fresh tokenizer is trained on them."
    )
    demonstrations: str = Field(
        default="", description="File or folder of episodes to imitate as well, as the live site saves them."
    )
    batch_size: int = Field(default=64, ge=1, description="Episodes of a step.")
    lr: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate; falls to a tenth along a cosine. null: 1e-3 from scratch, 2e-5 for a pretrained "
        "model, 1e-4 for its adapters.",
    )
    actions: Literal["expert", "random"] = Field(
        default="expert",
        description="Imitates the expert, or any valid action, for the format alone.",
    )
    noise: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="Share of moves played at random.",
    )
    imitate_noise: bool = Field(
        default=False,
        description="Imitates these moves too.",
    )
    best: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the played episodes that is imitated: those with the highest returns. Below 1, moves "
        "without effect are left out.",
    )
    actions_per_turn: int = Field(
        default=1, ge=1, description="Moves of a demonstrated turn at most; how many is drawn for each turn."
    )
    thought: str = Field(
        default="{action}",
        description="Thought of a demonstration: a format string with `action`, `words` (of the observation) and "
        "`relations` (in frozen_lake and sokoban, of things to the player; `next_relations`: after the turn; "
        "`intended_relations`: after it, without slips).",
    )
    blocks: dict[Further, str] = Field(
        default={},
        description="What prompt.blocks hold, likewise; switch, if not given: SWITCH where the subgoal is another one.",
    )

    @model_validator(mode="after")
    def _has_demonstrations(self) -> WarmStartConfig:
        if not (self.episodes or self.demonstrations):
            raise ValueError(
                "warm_start.episodes 0 leaves nothing to imitate: name a file in warm_start.demonstrations"
            )
        if self.demonstrations and not self.steps:
            raise ValueError("warm_start.demonstrations are imitated in warm_start.steps, and these are 0: give some")
        return self

    def rate(self, model: ModelConfig) -> float:
        """Return the learning rate for a model. A pretrained model gets a lower one, so that it keeps what it knows."""
        if self.lr is not None:
            return self.lr
        if model.name == TINY:
            return 1e-3
        return 1e-4 if model.lora.rank else 2e-5
