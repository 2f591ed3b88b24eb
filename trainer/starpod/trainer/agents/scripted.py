"""Policies that need no model, as agents: the reference ladder."""

from __future__ import annotations

import random

from starpod.client import Session
from starpod.trainer.agents.base import Move, Task
from starpod.trainer.episode import Episode
from starpod.trainer.reference import REFERENCES


class Scripted:
    """One of `REFERENCES`, an action a turn. The same seeds give the same episodes."""

    at_once = 512

    def __init__(self, name: str) -> None:
        self.name = name
        self._choose, self.want = REFERENCES[name]

    async def act(self, session: Session, episode: Episode, task: Task) -> Move | None:
        turn = len(episode.turns)
        rng = random.Random(f"{self.name}/{session.seed}/{session.dynamics_seed}/{turn}")
        action = self._choose(session.observation, task.actions, rng)
        return None if action is None else Move(action, [action])
