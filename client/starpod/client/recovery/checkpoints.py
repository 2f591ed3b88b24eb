"""Snapshots after every turn, from which sessions of an environment that is not deterministic are recovered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from starpod.client.connection import SNAPSHOT
from starpod.client.errors import StarpodError
from starpod.client.history import Reply, Restored
from starpod.client.observation import Transition
from starpod.client.recovery.hot_path import fail, finish
from starpod.client.recovery.state import RetryState, SessionState
from starpod.v1 import environment_pb2 as pb

logger = logging.getLogger("starpod.client")


class CheckpointRecovery(Protocol):
    """The part of Recovery that checkpoints use."""

    patience: float

    def refused(self, step: SessionState, error: StarpodError) -> None: ...
    def run(self, work: Coroutine[Any, Any, None], fail: Callable[[BaseException], None]) -> None: ...
    async def bring_back(self, state: SessionState, error: StarpodError, retry: RetryState) -> None: ...


class SessionCheckpoints:
    """Takes a snapshot of a session before its caller gets a reply, so that recovery never undoes a known turn."""

    def __init__(self, recovery: CheckpointRecovery) -> None:
        self._recovery = recovery

    def step(self, state: SessionState, transition: Transition, reply: Reply) -> None:
        """Take a snapshot after a step, then pass the transition to the caller."""

        async def checkpoint() -> None:
            try:
                await self._take(state)
            except StarpodError as error:
                self._recovery.refused(state, error)
            else:
                # Do not log the step: the snapshot was taken after it.
                finish(state, transition, reply, log=False)

        self._recovery.run(checkpoint(), partial(fail, state))

    def first(self, state: SessionState, finish: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        """Take a snapshot of a new episode, then call `finish`, or `fail` with the error."""

        async def checkpoint() -> None:
            await self._take_all([state])
            finish()

        self._recovery.run(checkpoint(), fail)

    async def new(self, states: Sequence[SessionState]) -> None:
        """Take a snapshot of each new session. If that fails, close them, because the caller will not get them."""
        try:
            await self._take_all(states)
        except BaseException:
            for state in states:
                state.replica.sessions.discard(state)
                state.drop()
            raise

    async def _take_all(self, states: Iterable[SessionState]) -> None:
        """Take a snapshot of each session that needs one, recovering sessions that are lost meanwhile."""
        for state in states:
            retry = RetryState(_now() + self._recovery.patience)
            while state.checkpoints:
                try:
                    await self._take(state)
                    break
                except StarpodError as error:
                    await self._recovery.bring_back(state, error, retry)

    async def _take(self, state: SessionState) -> None:
        """Take a snapshot. If the server refuses, the session continues without recovery. Raises StarpodError if the
        session was lost."""
        history = state.history
        assert history is not None
        try:
            response = await state.replica.call(
                SNAPSHOT, pb.SnapshotRequest(session_id=state.session_id), _now() + self._recovery.patience
            )
        except StarpodError as error:
            if error.advice == "reopen":
                raise
            logger.warning("%s cannot be checkpointed and will not be recovered: %s", state, error)
            state.history, state.checkpoints = None, False
            return
        want, lease_seconds = state.default_want.to_proto(), history.origin.lease_seconds
        history.begin(Restored(response.snapshot, state.version, want, lease_seconds), None)


def _now() -> float:
    return asyncio.get_running_loop().time()
