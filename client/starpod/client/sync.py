"""Blocking versions of Fleet and Session, for programs without an event loop. Any thread may call them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, overload
from weakref import WeakSet, finalize

from starpod.client.errors import StarpodError
from starpod.client.fleet import Fleet
from starpod.client.observation import Transition
from starpod.client.pool.replica import Replica
from starpod.client.session import Session, SessionProperties, forwarded
from starpod.client.transport import FORKED
from starpod.v1.values import Action, Image

T = TypeVar("T")
P = ParamSpec("P")


def _blocking(
    method: Callable[Concatenate[Session, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncSession, P], T]:
    """Return the blocking form of a method of Session."""

    @functools.wraps(method)
    def call(session: SyncSession, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return session.fleet.run(method(session.session, *arguments, **keywords))

    return call


def _waiting(
    method: Callable[Concatenate[Fleet, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncFleet, P], T]:
    """Return the blocking form of a method of Fleet."""

    @functools.wraps(method)
    def call(fleet: SyncFleet, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return fleet.run(method(fleet.fleet, *arguments, **keywords))

    return call


def _opening(
    method: Callable[Concatenate[Fleet, P], Coroutine[Any, Any, list[Session]]],
) -> Callable[Concatenate[SyncFleet, P], list[SyncSession]]:
    """Return the blocking form of a method of Fleet that opens sessions."""

    @functools.wraps(method)
    def call(fleet: SyncFleet, /, *arguments: P.args, **keywords: P.kwargs) -> list[SyncSession]:
        return [SyncSession(fleet, session) for session in fleet.run(method(fleet.fleet, *arguments, **keywords))]

    return call


def _opening_one(
    method: Callable[Concatenate[Fleet, P], Coroutine[Any, Any, Session]],
) -> Callable[Concatenate[SyncFleet, P], SyncSession]:
    """Return the blocking form of a method of Fleet that opens one session."""

    @functools.wraps(method)
    def call(fleet: SyncFleet, /, *arguments: P.args, **keywords: P.kwargs) -> SyncSession:
        return SyncSession(fleet, fleet.run(method(fleet.fleet, *arguments, **keywords)))

    return call


class SyncFleet:
    """A `Fleet` whose calls block. It takes the same arguments and runs an event loop in its own thread.

    A fleet that is still open when the program ends is closed then, with all its sessions. One that the program no
    longer refers to, not even by a session, is closed in the background.

    Example:
        with SyncFleet("127.0.0.1:50051") as fleet:
            (session,) = fleet.open("bandit-v1", seed=1)
            transition = session.step("Phoenix")
    """

    def __init__(self, addresses: str | Sequence[str], **options: Any) -> None:
        self.fleet = Fleet(addresses, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="starpod-fleet", daemon=True)
        self._closed = False
        self._process = os.getpid()
        self._closing = threading.Lock()
        self._thread.start()
        try:
            self.run(self.fleet.start())
        except BaseException:
            self._stop()
            raise
        _open_fleets.add(self)
        self._closing_when_dropped = finalize(self, _close_dropped, self.fleet, self._loop, self._process)
        self._closing_when_dropped.atexit = False  # `_close_open_fleets` does it, and waits

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all sessions and connections. Further calls do nothing."""
        with self._closing:
            if not self._closed and os.getpid() == self._process:  # a forked copy has no loop and nothing to close
                self.run(self.fleet.close())
                self._stop()
                self._closing_when_dropped.detach()

    replicas = forwarded("fleet.replicas", list[Replica])
    """The servers, with addresses, sessions, load and environments; see Fleet.replicas."""

    @property
    def sessions(self) -> list[SyncSession]:
        """The open sessions."""
        return [SyncSession(self, session) for session in self.fleet.sessions]

    recoveries = forwarded("fleet.recoveries", int)
    """Number of sessions that were recovered so far."""

    describe = _waiting(Fleet.describe)
    """Return the spec of every hosted environment version; see Fleet.describe."""
    open = _opening(Fleet.open)
    """Open sessions; see Fleet.open."""

    restore = _opening_one(Fleet.restore)
    """Open a session that continues from a snapshot; see Fleet.restore."""
    reach = _opening_one(Fleet.reach)
    """Open a session in an earlier state of an episode; see Fleet.reach. `visit` runs on the fleet's event loop."""

    @overload
    def step_many(
        self, sessions: Sequence[SyncSession], actions: Sequence[Action | Iterable[Action]]
    ) -> list[Transition]: ...

    @overload
    def step_many(
        self,
        sessions: Sequence[SyncSession],
        actions: Sequence[Action | Iterable[Action]],
        *,
        return_exceptions: Literal[True],
    ) -> list[Transition | BaseException]: ...

    def step_many(
        self,
        sessions: Sequence[SyncSession],
        actions: Sequence[Action | Iterable[Action]],
        *,
        return_exceptions: bool = False,
    ) -> Any:
        """Play one turn in each session, concurrently, and wait for all.

        Args:
            actions: For each session one action, or several to execute in order.
            return_exceptions: Return the exception of a session that failed in its place. By default the first one is
                raised after all sessions are done.

        Returns:
            The transitions, in the order of `sessions`.
        """
        if return_exceptions:
            return self.run(self.fleet.step_many(sessions, actions, return_exceptions=True))
        return self.run(self.fleet.step_many(sessions, actions))

    reset_many = _waiting(Fleet.reset_many)
    """Start a new episode in each session; see Fleet.reset_many."""
    close_sessions = _waiting(Fleet.close_sessions)
    """End sessions, with one call per server; see Fleet.close_sessions."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the fleet's event loop and return its result, for calls without a blocking form here."""
        if os.getpid() != self._process:
            coroutine.close()
            raise RuntimeError(FORKED)
        if self._closed:
            coroutine.close()
            raise RuntimeError("The fleet is closed: make another one.")
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("A blocking call in the fleet's own event loop would wait for itself: use Fleet there.")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the caller's thread must not leave the call running.
            future.cancel()
            raise

    def _stop(self) -> None:
        self.run(_settle())
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _settle() -> None:
    """Cancel the loop's other tasks.

    Some of gRPC's tasks outlive their call by a moment, and asyncio warns about tasks that are pending when the loop
    closes.
    """
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _close_dropped(fleet: Fleet, loop: asyncio.AbstractEventLoop, process_id: int) -> None:
    """Close a fleet on its loop, and end the loop. Do not wait, because the garbage collector calls this anywhere."""

    async def close() -> None:
        try:
            await fleet.close()
            await _settle()
        finally:
            loop.stop()

    if os.getpid() == process_id and not loop.is_closed():
        loop.call_soon_threadsafe(lambda: loop.create_task(close()))


_open_fleets: WeakSet[SyncFleet] = WeakSet()


@atexit.register
def _close_open_fleets() -> None:
    """Close the fleets of a program that ends, or their sessions would live on until their leases expire."""
    for fleet in list(_open_fleets):
        fleet.close()


class SyncSession(SessionProperties):
    """A `Session` whose calls block."""

    __slots__ = ("fleet", "session", "state")

    def __init__(self, fleet: SyncFleet, session: Session) -> None:
        self.fleet = fleet
        self.session = session
        self.state = session.state

    def __repr__(self) -> str:
        return f"Sync{self.session!r}"

    def _repr_html_(self) -> str:
        """Return an image of the state, if the environment renders one, followed by the HTML of Session."""
        picture = ""
        if not self.closed:
            with contextlib.suppress(StarpodError):
                data = self.render("png")
                picture = Image(data)._repr_html_() if isinstance(data, bytes) else ""
        return picture + super()._repr_html_()

    step = _blocking(Session.step)
    """Play one turn; see Session.step."""
    reset = _blocking(Session.reset)
    """Start a new episode; see Session.reset."""
    render = _blocking(Session.render)
    """Draw the state; see Session.render."""
    snapshot = _blocking(Session.snapshot)
    """Serialise the state; see Session.snapshot."""
    close = _blocking(Session.close)
    """End the session; see Session.close."""

    def fork(self, count: int = 1, *, reseed: bool = False, dynamics_seeds: Iterable[int] = ()) -> list[SyncSession]:
        """Copy the current state into new sessions.

        Args:
            count: Number of copies.
            reseed: Give each copy a new random state. By default the same actions lead to the same transitions as in
                the original.
            dynamics_seeds: With `reseed`, one seed per copy; see Session.fork.

        Returns:
            The new sessions, on the same server.
        """
        copies = self.fleet.run(self.session.fork(count, reseed=reseed, dynamics_seeds=dynamics_seeds))
        return [SyncSession(self.fleet, copy) for copy in copies]
