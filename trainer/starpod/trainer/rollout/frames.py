"""Frames of finished episodes, rendered by replaying them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from starpod.client import Fleet, Observation, Session, StarpodError, Want
from starpod.trainer.agents.base import Agent, AgentError, Move, Stop, Task
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rollout.play import play

Key = TypeVar("Key")

MOST_BYTES = 4 * 2**20
"""Maximum total size in bytes of a report's distinct frames. A report of this size can be sent by e-mail."""
SECONDS = 20.0
"""Time limit of rendering in seconds. A browser environment takes about a second per frame."""


async def draw_episodes(
    players: Mapping[str, tuple[Fleet, Task]], episodes: Iterable[tuple[Key, Episode]], *, max_bytes: int = MOST_BYTES
) -> dict[Key, list[bytes]]:
    """Return the PNG frames of episodes by key: one before each turn and one after the last.

    Episodes are left out if their environment cannot render, or if their replay fails or differs. Rendering stops at
    the first episode whose frames would make the total exceed `max_bytes`. `players` maps the name of each task to its
    servers and task.
    """
    frames_by_key: dict[Key, list[bytes]] = {}
    can_draw: dict[str, bool] = {}
    bytes_left, known_frames = max_bytes, set[bytes]()
    with suppress(TimeoutError, StarpodError):
        async with asyncio.timeout(SECONDS):
            for key, episode in episodes:
                if episode.task not in players or episode.failed or not episode.turns:
                    continue
                fleet, task = players[episode.task]
                if episode.task not in can_draw:
                    modes = {spec.id: spec.render_modes for spec in await fleet.describe()}
                    can_draw[episode.task] = "png" in modes.get(task.environment, ())
                if not can_draw[episode.task]:
                    continue
                frames: list[bytes] = []
                with suppress(StarpodError):  # such as a version that is no longer served
                    frames = await _draw(fleet, task, episode)
                bytes_left -= sum(len(frame) for frame in {*frames} - known_frames)
                if bytes_left < 0:
                    break
                known_frames.update(frames)
                if frames:
                    frames_by_key[key] = frames
    return frames_by_key


async def _draw(fleet: Fleet, task: Task, episode: Episode) -> list[bytes]:
    """Return the frames of an episode; empty if the replay differs from it."""
    (session,) = await fleet.open(
        task.environment,
        seed=episode.seed,
        dynamics_seed=episode.dynamics_seed,
        options=task.options or None,
        want=Want(),
        limits=task.limits,
        version=f"=={episode.version}" if episode.version else task.version,
    )
    artist = _Artist(session, episode.turns)
    try:
        replay = await play(artist, session)
        if replay.failed or session.observation.text != episode.final_observation:
            return []
        await artist.draw()
        return artist.frames
    finally:
        await session.close()


class _Artist(Agent):
    """Replays turns and renders a frame before each. Raises AgentError if an observation differs."""

    def __init__(self, session: Session, turns: Sequence[Turn]) -> None:
        self.frames: list[bytes] = []
        self._session = session
        self._turns = turns

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        index = len(episode.turns)
        if index == len(self._turns):
            return Stop()
        if observation.text != self._turns[index].observation:
            raise AgentError("the environment shows another observation than before")
        await self.draw()
        return Move("", self._turns[index].actions or None)

    async def draw(self) -> None:
        frame = await self._session.render("png")
        if isinstance(frame, bytes):
            self.frames.append(frame)
