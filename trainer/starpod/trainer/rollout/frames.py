"""Frames of finished episodes, rendered by replaying them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

from starpod.client import EpisodePath, Fleet, Session, StarpodError
from starpod.trainer.agents.base import Task
from starpod.trainer.data.episode import Episode

Key = TypeVar("Key")

MOST_BYTES = 4 * 2**20
"""Maximum total size in bytes of a report's distinct frames. A report of this size can be sent by e-mail."""
SECONDS = 20.0
"""Time limit of rendering in seconds. A browser environment takes about a second per frame."""


async def draw_episodes(
    players: Mapping[str, tuple[Fleet, Task]], episodes: Iterable[tuple[Key, Episode]], *, max_bytes: int = MOST_BYTES
) -> dict[Key, list[bytes]]:
    """Return the PNG frames of episodes by key: one before each turn and one after the last.

    Episodes are left out if their environment cannot render, or if their replay fails or differs.

    Args:
        players: Servers and task by the name of the task.
        episodes: Episodes to draw, each with its key, in order of preference.
        max_bytes: Maximum total size of distinct frames, 4 MiB by default. The first episode beyond it ends the list.
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
                    specs = [spec for spec in await fleet.describe() if spec.id == task.environment]
                    can_draw[episode.task] = any("png" in spec.render_modes for spec in specs)
                if not can_draw[episode.task]:
                    continue
                frames: list[bytes] = []
                with suppress(StarpodError):  # its replay differs, or its version is no longer served
                    frames = await draw_path(fleet, task.path(episode))
                bytes_left -= sum(len(frame) for frame in {*frames} - known_frames)
                if bytes_left < 0:
                    break
                known_frames.update(frames)
                if frames:
                    frames_by_key[key] = frames
    return frames_by_key


async def draw_path(fleet: Fleet, path: EpisodePath) -> list[bytes]:
    """Return the PNG frames of a path: one before each turn and one after the last. Raises as `Fleet.reach` does."""
    frames: list[bytes] = []

    async def draw(session: Session, _: int) -> None:
        frame = await session.render("png")
        assert isinstance(frame, bytes)
        frames.append(frame)

    session = await fleet.reach(path, visit=draw)
    await session.close()
    return frames
