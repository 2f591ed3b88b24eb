"""Tells which servers a run plays on, and which sessions are in play while somebody looks, for pages to watch them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starpod.client import Fleet
from starpod.trainer.output.files import to_json_line, write_atomic
from starpod.trainer.output.run_folder import RunFolder

SECONDS = 1.0
"""Between two looks at whether somebody asks: all that it costs while nobody does."""
WATCHED_SECONDS = 15.0
"""For which somebody who asked counts as looking."""
MOST_SESSIONS = 200
"""That are told."""


@contextlib.asynccontextmanager
async def telling(folder: RunFolder, fleets: Sequence[Fleet]) -> AsyncIterator[None]:
    """Keeps `folder.live` up to date while the context lasts; it is removed at the end."""
    task = asyncio.create_task(_tell(folder, fleets))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with contextlib.suppress(OSError):
            folder.live.unlink()


async def _tell(folder: RunFolder, fleets: Sequence[Fleet]) -> None:
    told: list[str] = []
    while True:
        servers = sorted({replica.address for fleet in fleets for replica in fleet.replicas})
        asked = _is_watched(folder.watched)
        if asked or servers != told:
            values = {"time": time.time(), "servers": servers, "sessions": in_play(fleets) if asked else None}
            with contextlib.suppress(OSError):  # a run does not end because nobody can watch it
                await asyncio.to_thread(write_atomic, folder.live, to_json_line(values))
                told = servers
        await asyncio.sleep(SECONDS)


def in_play(fleets: Sequence[Fleet]) -> list[dict[str, Any]]:
    """The sessions that are held open, as JSON values, at most `MOST_SESSIONS`."""
    sessions = [session for fleet in fleets for session in fleet.sessions]
    sessions.sort(key=lambda session: (session.environment_id, session.seed, session.member))
    return [
        {
            "id": session.id,
            "environment": session.environment_id,
            "seed": session.seed,
            "member": session.member,
            "turn": session.step_index,
            "done": session.done,
        }
        for session in sessions[:MOST_SESSIONS]
    ]


def _is_watched(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < WATCHED_SECONDS
    except OSError:
        return False
