"""Policies that need no model, as agents: the reference ladder."""

from __future__ import annotations

import random
from weakref import WeakKeyDictionary

from starpod.client import Session
from starpod.trainer.agents.base import Move, Task
from starpod.trainer.agents.reference import REFERENCES
from starpod.trainer.data.episode import Episode


class Scripted:
    """One of `REFERENCES`, an action a turn. The same seeds give the same episodes, those of `play_reference`."""

    at_once = 512

    def __init__(self, name: str) -> None:
        self.name = name
        self._choose, self.want = REFERENCES[name]
        self._streams: WeakKeyDictionary[Session, random.Random] = WeakKeyDictionary()

    async def act(self, session: Session, episode: Episode, task: Task) -> Move | None:
        if not episode.turns:
            member = f"/{session.member}" if session.member else ""
            self._streams[session] = random.Random(f"{self.name}/{session.seed}{member}")
        action = self._choose(session.observation, task.actions, self._streams[session])
        return None if action is None else Move(action, [action])
