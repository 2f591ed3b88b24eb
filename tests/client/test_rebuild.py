"""A rebuild that fails leaves no session on the server."""

import time
from typing import Any

import pytest

from starpod.client.connection import RESET, RESTORE
from starpod.client.errors import BadArgument
from starpod.client.history import History, Restored
from starpod.client.recovery.rebuild import rebuild
from starpod.v1 import environment_pb2 as pb


class Server:
    """A replica that restores any snapshot and refuses every reset."""

    def __init__(self) -> None:
        self.sessions: set[str] = set()
        self.closer = self

    async def call(self, method: Any, request: Any, until: float) -> Any:
        if method is RESTORE:
            self.sessions.add("base")
            return pb.RestoreResponse(sessions=[pb.Session(session_id="base", epoch=1)])
        assert method is RESET
        raise BadArgument("no such option")

    def close_later(self, session_ids: list[str]) -> None:
        self.sessions -= set(session_ids)


async def test_a_refused_reset_closes_the_restored_session() -> None:
    restored = Restored(pb.SessionSnapshot(), "1.0.0", pb.Want(), 60.0, pb.ResetRequest())
    history, server = History(restored, None), Server()
    with pytest.raises(BadArgument):
        await rebuild(server, history, time.monotonic() + 60)  # type: ignore[arg-type]
    assert not server.sessions
