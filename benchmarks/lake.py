"""The task that all ways of the benchmark play: one fixed lake without slips, and one walk of 50 turns on it.

The walk goes to and fro and then to the goal, so that every episode ends with reward 1 after exactly 50 turns and the
next one starts with a reset. Resets take their time in every way; only steps are counted.
"""

from __future__ import annotations

from typing import Any

from starpod.env_server.environment import Limits
from starpod.env_server.environments.frozen_lake import FrozenLake
from starpod.env_server.episode import Episode

ENVIRONMENT = "frozen_lake-v1"
OPTIONS: dict[str, Any] = {"map": ["SFFF", "FHFH", "FFFH", "HFFG"], "success_rate": 1.0}
WALK = ("Right", "Left") * 22 + ("Down", "Down", "Right", "Right", "Down", "Right")
NO_LIMITS = Limits()


def new_episode() -> Episode:
    """The task in this process, at its start."""
    environment = FrozenLake()
    environment.options = FrozenLake.Options(**OPTIONS)
    episode = Episode(environment, NO_LIMITS)
    episode.reset(0, 0)
    return episode
