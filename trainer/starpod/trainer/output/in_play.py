"""Status file for the live site: a run's phase, its servers and, while somebody watches, its open sessions."""

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
from starpod.trainer.output.screen import Screen

SECONDS = 1.0
"""Seconds between two checks for changes and watchers."""
WATCHED_SECONDS = 15.0
"""Seconds for which a request counts as watching."""
MOST_SESSIONS = 200
"""Maximum number of sessions in the file."""


@contextlib.asynccontextmanager
async def telling(folder: RunFolder, fleets: Sequence[Fleet], screen: Screen) -> AsyncIterator[None]:
    """Keep `folder.live_status` up to date during the context, then remove it."""
    task = asyncio.create_task(_tell(folder, fleets, screen))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with contextlib.suppress(OSError):
            folder.live_status.unlink()


async def _tell(folder: RunFolder, fleets: Sequence[Fleet], screen: Screen) -> None:
    last_status: dict[str, Any] = {}
    while True:
        servers = sorted({replica.address for fleet in fleets for replica in fleet.replicas})
        status = {"servers": servers, "doing": screen.doing}
        is_watched = _is_watched(folder.watch_mark)
        if is_watched or status != last_status:
            values = {"time": time.time(), **status, "sessions": in_play(fleets) if is_watched else None}
            with contextlib.suppress(OSError):  # a failed status file must not end the run
                await asyncio.to_thread(write_atomic, folder.live_status, to_json_line(values))
                last_status = status
        await asyncio.sleep(SECONDS)


def in_play(fleets: Sequence[Fleet]) -> list[dict[str, Any]]:
    """Return the open sessions as JSON values, at most `MOST_SESSIONS`."""
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
