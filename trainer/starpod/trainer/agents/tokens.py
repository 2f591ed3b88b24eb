"""Policies whose tokens we sample ourselves, played outside training: checkpoints, run folders, Hugging Face models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starpod.client import Fleet
from starpod.trainer.agents.base import AgentRefused, Task
from starpod.trainer.episode import Episode


@dataclass(frozen=True, slots=True)
class Sampling:
    """How replies are sampled. None: as the run that trained the policy did, or the usual where there is none."""

    temperature: float | None = None
    max_tokens: int | None = None
    thinking: bool | None = None


async def play_tokens(
    model: str,
    fleet: Fleet,
    task: Task,
    seeds: Sequence[int],
    samples: int,
    sampling: Sampling,
    watch: Callable[[Episode], None],
) -> list[Episode]:
    """`samples` episodes from each seed, in their order, by the policy in the folder or of the name `model`.

    Raises AgentRefused where there is no such policy, and what opening raises.
    """
    raise AgentRefused(f"{model}: policies of our own cannot be played yet")
