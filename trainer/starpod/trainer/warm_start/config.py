"""Configuration of the warm start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import Field, model_validator

from starpod.trainer.configuration.section import FilePath, Section
from starpod.trainer.configuration.yaml12 import YamlError, load_yaml
from starpod.trainer.models.config import TINY, ModelConfig
from starpod.trainer.prompts.grammar import Further

PASSES = 3
"""Default number of passes over a file, as is usual in supervised fine-tuning."""


def imitation_words(file: str, words: Sequence[str]) -> list[str]:
    """Return the `key=value` words of `--imitate FILE`, without the keys that a user's own words set."""
    defaults = {"demonstrations": file, "episodes": "0", "steps": "null"}
    chosen = {word.partition("=")[0] for word in words}
    for section in (word.partition("=")[2] for word in words if word.startswith("warm_start=")):
        with suppress(YamlError):  # the reader of all words reports it
            values = load_yaml(section)
            chosen |= {f"warm_start.{key}" for key in values} if isinstance(values, dict) else set()
    return [f"warm_start.{key}={value}" for key, value in defaults.items() if f"warm_start.{key}" not in chosen]


class WarmStartConfig(Section):
    """Imitation before reinforcement learning. 0 steps turn it off."""

    steps: int | None = Field(
        default=0,
        ge=0,
        description="Number of optimiser steps; 0: no warm start; null: as many as three passes over what is imitated.",
    )
    episodes: int = Field(
        default=1000, ge=0, description="Demonstrations to play; a fresh tokenizer is trained on them."
    )
    demonstrations: FilePath = Field(
        default="",
        description="File or folder to imitate, too: episodes of a run or the live site, conversations in OpenAI's "
        "chat format (.jsonl), or trajectories of ATIF.",
    )
    min_reward: float | None = Field(
        default=None, description="Lowest return of an episode of `demonstrations` that is imitated; null: any."
    )
    # `from` is a keyword of Python, so the field exists by its annotation alone; `scout` reads it.
    __annotations__["from"] = Annotated[
        FilePath, Field(default="", description="Run or checkpoint of a policy that plays instead of the expert.")
    ]
    failures: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of episodes without success that are imitated; null: all, but none of those played by "
        "`from`.",
    )
    batch_size: int = Field(default=64, ge=1, description="Episodes per optimiser step.")
    lr: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate, which falls to a tenth along a cosine; null: 1e-3 from scratch, 2e-5 for a "
        "pretrained model, 1e-4 for its adapters.",
    )
    actions: Literal["expert", "random"] = Field(
        default="expert",
        description="expert: imitates the expert; random: any valid action, only for the format.",
    )
    noise: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="Share of the moves of a demonstration that are replaced by random ones.",
    )
    imitate_noise: bool = Field(
        default=False,
        description="Whether the random moves of a demonstration are imitated, too.",
    )
    best: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of played episodes to imitate, those with the highest returns. Below 1, moves without "
        "effect are skipped.",
    )
    actions_per_turn: int = Field(
        default=1, ge=1, description="Maximum moves of a demonstrated turn. The number is drawn for each turn."
    )
    thought: str = Field(
        default="{action}",
        description="Thought of a demonstration: a format string with `action`, `words` (of the observation) and, "
        "in frozen_lake and sokoban, `relations` (of things to the player), `next_relations` (after the turn) and "
        "`intended_relations` (after it, without slips).",
    )
    blocks: dict[Further, str] = Field(
        default={},
        description="Format strings of prompt.blocks, with the same names. Default of switch: SWITCH if the "
        "subgoal changes.",
    )

    @model_validator(mode="after")
    def _has_demonstrations(self) -> WarmStartConfig:
        if not (self.episodes or self.demonstrations):
            raise ValueError(
                "warm_start.episodes 0 leaves nothing to imitate: name a file in warm_start.demonstrations"
            )
        for key in ("demonstrations", "from"):
            if getattr(self, key) and self.steps == 0:
                raise ValueError(f"warm_start.{key} needs warm_start.steps, which is 0: raise it, or set it to null")
        return self

    @property
    def imitates(self) -> bool:
        """Whether there is a warm start."""
        return self.steps != 0

    def steps_over(self, count: int) -> int:
        """Return the number of optimiser steps for a number of episodes to imitate."""
        return math.ceil(PASSES * count / self.batch_size) if self.steps is None else self.steps

    @property
    def scout(self) -> str:
        """Path of the trained policy that plays the demonstrations; "" if there is none."""
        return str(getattr(self, "from"))

    def rate(self, model: ModelConfig) -> float:
        """Return the learning rate for a model. A pretrained model gets a lower one, so that it keeps what it knows."""
        if self.lr is not None:
            return self.lr
        if model.name == TINY:
            return 1e-3
        return 1e-4 if model.lora.rank else 2e-5
