"""Calls on sessions that outlive what befalls their servers: waiting, bringing back, asking again, checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from starpod.client.errors import SessionLost, StarpodError, UnknownSession, Unreachable
from starpod.client.log import Restored
from starpod.client.observation import Transition
from starpod.client.recovery import rebuild
from starpod.client.roster import Roster
from starpod.client.session import Session, Trouble
from starpod.client.snapshot import Snapshot
from starpod.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    from starpod.client.restart import Restart

# A session that is lost this often over one and the same call was probably killed by that call: alone, or with all that
# its server held. Servers go for other reasons too, hence the patience with those.
MAX_LOSSES = 3
MAX_CRASHES = 10

logger = logging.getLogger("starpod.client")

T = TypeVar("T")


class Mender:
    """Stands between sessions and servers when a call does not go well. Arguments as in Fleet."""

    def __init__(self, roster: Roster, *, recovery: bool, patience: float) -> None:
        self.recoveries = 0
        self._roster = roster
        self._recovery = recovery
        self._patience = patience
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Gives up what is under way: those who wait get Unreachable."""
        self._closed = True
        # Those that were just begun get to where they can be told.
        await asyncio.sleep(0)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def refused(self, session: Session, error: StarpodError) -> None:
        """The session's turn was not taken: waits, or brings the session back, and sends the turn again."""
        trouble = session._trouble
        if trouble is None or trouble.turn is not session._turn or trouble.step_index != session._step_index:
            trouble = session._trouble = Trouble(session._turn, session._step_index, _now() + self._patience)

        def again() -> None:
            trouble.step_index = session._step_index
            session._replica.submit(session)

        self._try_again(session, error, trouble, again, session._fail)

    def reset_refused(self, session: Session, restart: Restart, error: StarpodError) -> None:
        """The same for a reset: where the session was lost, its episode begins anew without a replay."""
        trouble = restart.trouble = restart.trouble or Trouble((), 0, _now() + self._patience)
        self._try_again(session, error, trouble, restart.submit, restart._fail, replay=False)

    def _try_again(
        self,
        session: Session,
        error: StarpodError,
        trouble: Trouble,
        again: Callable[[], None],
        fail: Callable[[BaseException], None],
        *,
        replay: bool = True,
    ) -> None:
        async def mend() -> None:
            try:
                if error.advice == "retry":
                    wait = trouble.backoff.wait(error.retry_after)
                    if _now() + wait > trouble.until:
                        raise error
                    await asyncio.sleep(wait)
                else:
                    await self._bring_back(session, error, trouble, replay=replay)
                again()
            except StarpodError as final:
                fail(final)
            except asyncio.CancelledError:
                fail(Unreachable("The fleet was closed."))
                raise
            except Exception as bug:
                fail(bug)
                raise

        if self._closed:
            fail(error)
        else:
            self._spawn(mend())

    async def ask(self, session: Session, kind: str, build: Callable[[], Message]) -> Any:
        """A call on a session other than a turn or a reset, with recovery."""
        trouble = Trouble((), 0, _now() + self._patience)
        while True:
            if session.closed:
                raise RuntimeError("The session is closed: open another one.")
            try:
                return await session._replica.call(kind, build(), trouble.until)
            except StarpodError as error:
                await self._bring_back(session, error, trouble)

    async def _bring_back(
        self, session: Session, error: StarpodError, trouble: Trouble, *, replay: bool = True
    ) -> None:
        """Makes a lost session stand where it stood, on whatever server can. Raises what cannot be mended."""
        if error.advice != "reopen":
            raise error
        history = session._history
        if history is None:
            raise SessionLost(
                f"The session was lost and cannot be brought back ({self._why_not(session)}): {error}",
                metadata=error.metadata,
            ) from error
        trouble.losses += 1
        if isinstance(error, SessionLost) and trouble.losses >= MAX_LOSSES:
            raise error
        if trouble.losses >= MAX_CRASHES:
            raise SessionLost(
                f"The session was lost {trouble.losses} times over one and the same call, which seems to take its"
                f" server down each time: {error}",
                metadata={"advice": "give_up"},
            ) from error
        environment_id, version = history.environment
        while True:
            if _now() > trouble.until:
                raise error
            if session._checkpoints and isinstance(history.origin, Restored):
                # A snapshot, and nothing to replay: any version that restores it will do.
                snapshot = Snapshot.from_proto(history.origin.snapshot)
                replica, spec = await self._roster.choose_for(snapshot, trouble.until)
            else:
                replica, spec = await self._roster.choose(environment_id, f"=={version}", trouble.until)
            replica.placing += 1
            try:
                message = await rebuild(replica, history, trouble.until, member=session.member, replay=replay)
            except StarpodError as failure:
                if failure.advice == "give_up":
                    raise
                error = failure
                await asyncio.sleep(trouble.backoff.wait())
                continue
            finally:
                replica.placing -= 1
            if not isinstance(error, UnknownSession | SessionLost):
                session._replica.orphans.append(session._session_id)
            session._place(replica, message)
            session.version = spec.version
            session.recoveries += 1
            self.recoveries += 1
            if session._checkpoints and not session.done:
                session._show(message.observation)
            return

    def _why_not(self, session: Session) -> str:
        if not self._recovery:
            return "recovery is off"
        return f"{session.environment_id} is not deterministic, and there is no snapshot to go on from"

    async def alone(self, session: Session, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs a call once those that were made before it on the session are over. If the caller is cancelled then, it
        still runs to its end: the session has to know what the server did."""
        await session._acquire()
        task = self._spawn(work())
        task.add_done_callback(lambda _: session._release())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise Unreachable("The fleet was closed.") from None
            raise

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def checkpoint(self, session: Session, transition: Transition, key: bytes, digest: int) -> None:
        """Takes a snapshot before the turn's reply is handed on: what the caller has seen can be gone back to."""

        async def checkpoint() -> None:
            try:
                await self._take_checkpoint(session)
            except StarpodError as error:
                self.refused(session, error)
                return
            except asyncio.CancelledError:
                session._fail(Unreachable("The fleet was closed."))
                raise
            # The snapshot stands for the turn: nothing is left to replay.
            history, session._history = session._history, None
            session._finish(transition, key, digest)
            session._history = history

        self._spawn(checkpoint())

    async def _take_checkpoint(self, session: Session) -> None:
        """Where the server refuses it, the session goes on without recovery. Raises what advises to reopen."""
        history = session._history
        assert history is not None
        try:
            response: pb.SnapshotResponse = await session._replica.call(
                "snapshot",
                pb.SnapshotRequest(session_id=session._session_id),
                _now() + self._patience,
            )
        except StarpodError as error:
            if error.advice == "reopen":
                raise
            logger.warning("%s cannot be checkpointed and will not be recovered: %s", session, error)
            session._history, session._checkpoints = None, False
            return
        want, lease_seconds = session.want.to_proto(), history.root.lease_seconds
        history.begin(Restored(response.snapshot, session.version, want, lease_seconds), b"", None)

    def checkpoint_first(self, session: Session, restart: Restart) -> None:
        """Takes a snapshot of the new episode before its first observation is handed on."""

        async def checkpoint() -> None:
            try:
                await self.checkpoint_all([session])
            except asyncio.CancelledError:
                restart._fail(Unreachable("The fleet was closed."))
                raise
            except Exception as error:
                restart._fail(error)
            else:
                restart.finish()

        self._spawn(checkpoint())

    async def checkpoint_all(self, sessions: Iterable[Session]) -> None:
        """Takes a snapshot of each, bringing back what is lost before that."""
        for session in sessions:
            trouble = Trouble((), 0, _now() + self._patience)
            while session._checkpoints:
                try:
                    await self._take_checkpoint(session)
                    break
                except StarpodError as error:
                    await self._bring_back(session, error, trouble)


def _now() -> float:
    return asyncio.get_running_loop().time()
