"""Replay buffer of recent groups, and the configuration of repeated updates and offline files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from starpod.trainer.configuration.section import FilePath, Section
from starpod.trainer.data.group import Group


class ReplayConfig(Section):
    """Configuration of training on episodes that are not fresh. By default, only fresh episodes are used.

    Stale tokens keep the log-probabilities of the policy that sampled them, so that they can be weighted.
    """

    reuse: int = Field(default=1, ge=1, description="Updates on each batch.")
    capacity: int = Field(default=0, ge=0, description="Groups in the buffer; 0: no buffer.")
    groups: int = Field(default=0, ge=0, description="Groups from the buffer in each update.")
    max_staleness: int = Field(default=8, ge=1, description="Age in policy versions after which a group is dropped.")
    offline: FilePath = Field(default="", description="File or folder of episodes to train on instead of collecting.")

    @model_validator(mode="after")
    def _buffer(self) -> ReplayConfig:
        if bool(self.capacity) != bool(self.groups):
            raise ValueError(
                f"replay.capacity {self.capacity} and replay.groups {self.groups}: set both above 0 for a buffer, or "
                "both to 0"
            )
        if self.offline and self.capacity:
            raise ValueError("replay.offline trains only on files: leave replay.capacity and replay.groups at 0")
        return self


class ReplayBuffer:
    """Buffer of whole groups, each with the oldest policy version that sampled any of its tokens.

    A shallow copy does not change with the buffer.

    Attributes:
        stale: Number of groups dropped so far because of their age.
        evicted: Number of groups dropped so far to make room.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self.config = config
        self.stale = 0
        self.evicted = 0
        self._groups: list[tuple[int, Group]] = []

    @property
    def enabled(self) -> bool:
        return self.config.capacity > 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Add groups, and drop the oldest ones if there is no room. version: version of groups without tokens."""
        items = self._groups + [(oldest_version(group, version), group) for group in groups]
        surplus = max(0, len(items) - self.config.capacity)
        self.evicted += surplus
        self._groups = items[surplus:]

    def sample(self, version: int, rng: np.random.Generator) -> tuple[list[Group], int]:
        """Drop the groups that are stale at policy `version`, then draw up to `config.groups` distinct groups.

        Returns the groups in the order in which they were added, and the number dropped. The same contents and
        generator state give the same groups.
        """
        fresh_items = [item for item in self._groups if version - item[0] <= self.config.max_staleness]
        dropped = len(self._groups) - len(fresh_items)
        self.stale += dropped
        self._groups = fresh_items
        count = min(self.config.groups, len(fresh_items))
        indices = sorted(rng.choice(len(fresh_items), count, replace=False)) if count else []
        return [fresh_items[index][1] for index in indices], dropped

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "stale": self.stale,
            "evicted": self.evicted,
            "groups": [{"version": version, **group.to_json()} for version, group in self._groups],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stale, self.evicted = state["stale"], state["evicted"]
        self._groups = [(item["version"], Group.from_json(item)) for item in state["groups"]]


def oldest_version(group: Group, default: int = 0) -> int:
    """Return the oldest policy version that sampled a token of the group; `default` if no token was sampled."""
    versions = (version for episode in group.episodes for turn in episode.turns for version in turn.versions)
    return min(versions, default=default)
