"""Sessions and the table that holds them: ids, leases, order, and what was answered last."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.message import Message

from starpod.env_server.environment import Environment, EnvironmentOptions, Limits
from starpod.env_server.episode import Transition, Want
from starpod.env_server.errors import CallError, bad_argument, overloaded
from starpod.env_server.limits import Tenant
from starpod.env_server.processes.hosts import Host
from starpod.v1 import environment_pb2 as pb

Created = TypeVar("Created", pb.OpenResponse, pb.ForkResponse, pb.RestoreResponse)

_MAX_KEY_BYTES = 128
_SWEEP_SECONDS = 10.0
_REMEMBERED_BYTES = 256 * 2**20
"""Replies that one tenant's keys may keep. Keys outlive their sessions by a lease, so nothing else bounds them."""
_RESERVATION_BYTES = 1024
"""What a key costs beside its reply, roughly."""
_SHORT_BYTES = 64


class Session:
    """One live session.

    epoch, next_index: what the next Step must carry.
    last_request, last_reply: the latest turn, or Reset if no turn followed it, for a caller who lost the reply. Of the
        request a digest, or its actions where they are short texts. The reply is a Transition while that is small, else
        the message's bytes.
    lost: why the session can no longer be used; empty while it can. closed: it is in no table any more.
    touched: monotonic seconds of the latest call. lease: seconds it may rest.
    pending: calls that wait for or work on it; while there are any, it is not reaped and others queue up.
    """

    __slots__ = (
        "_taken",
        "_waiting",
        "closed",
        "dynamics_seed",
        "environment",
        "epoch",
        "host",
        "id",
        "last_reply",
        "last_request",
        "lease",
        "limits",
        "lost",
        "member",
        "next_index",
        "options",
        "over",
        "pending",
        "seed",
        "touched",
        "want",
    )

    def __init__(
        self,
        environment: type[Environment],
        host: Host,
        options: EnvironmentOptions,
        limits: Limits,
        want: Want,
        lease: float,
        member: int,
        seed: int,
        dynamics_seed: int,
    ) -> None:
        self.id = secrets.token_urlsafe(16)
        self.environment = environment
        self.host = host
        self.options = options
        self.limits = limits
        self.want = want
        self.lease = lease
        self.member = member
        self.seed = seed
        self.dynamics_seed = dynamics_seed
        self.epoch = 1
        self.next_index = 0
        self.over = False
        self.last_request: tuple[str, ...] | bytes | None = None
        self.last_reply: Transition | bytes | None = None
        self.lost = ""
        self.closed = False
        self.touched = time.monotonic()
        self.pending = 0
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] | None = None

    def turn_taking(self) -> Session:
        """For `async with`: calls on one session run one at a time, in the order in which they came."""
        return self

    async def __aenter__(self) -> None:
        self.pending += 1
        if not self._taken:
            self._taken = True
            return
        if self._waiting is None:
            self._waiting = deque()
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self.pending -= 1
            if not turn.cancelled():
                # It was this call's turn already: now it is the next one's.
                self._pass_on()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.touched = time.monotonic()
        self.pending -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._waiting = None
        self._taken = False

    def check(self) -> None:
        """Raises SESSION_LOST if the session cannot be used any more, UNKNOWN_SESSION if it was closed meanwhile."""
        if self.closed:
            raise unknown_session(self.id)
        if self.lost:
            raise CallError("SESSION_LOST", f"the session is gone: {self.lost}; open a new one", {"cause": self.lost})

    def lose(self, cause: str) -> None:
        """Gives the session up and frees what it holds; later calls learn why until its lease runs out."""
        self.lost = cause
        self.last_request = self.last_reply = None
        self.host.close()

    def close(self) -> None:
        """Frees what it holds; calls that waited for it find it unknown, as later ones do."""
        self.closed = True
        self.lose("closed")


def unknown_session(session_id: str) -> CallError:
    problem = f"no session {session_id[:64]!r}: closed, expired or never opened here; open a new one"
    return CallError("UNKNOWN_SESSION", problem)


def digest_request(request: Message) -> bytes:
    """Identifies a request that is sent again: its bytes where they are few, which is faster, else their digest."""
    data = request.SerializeToString(deterministic=True)
    return data if len(data) <= _SHORT_BYTES else hashlib.sha256(data).digest()


@dataclass(slots=True)
class Reservation:
    """What a key stands for: a digest of the request it came with, and the reply: awaited at first, then serialised."""

    request: bytes
    pending: asyncio.Future[Any] | None
    reply: bytes = b""
    session_ids: tuple[str, ...] = ()
    lease: float = 0.0
    last_alive: float = field(default_factory=time.monotonic)


class SessionTable(dict[str, Session]):
    """The sessions of one tenant by id, and the keys under which they were created."""

    def __init__(self, tenant: Tenant | None = None) -> None:
        super().__init__()
        self.tenant = tenant or Tenant("")
        self.reservations: dict[str, Reservation] = {}
        self._remembered = 0
        self._swept = time.monotonic()
        self._ended: dict[str, float] = {}

    def find(self, session_id: str) -> Session:
        """Raises UNKNOWN_SESSION or SESSION_LOST."""
        session = self.get(session_id)
        if session is None:
            raise unknown_session(session_id)
        session.check()
        return session

    def expired(self, now: float) -> list[Session]:
        """Sessions whose lease ran out before the last look, and that nobody has called since.

        At the first look the call that keeps one may lie in a socket, unread, because this process was held up.
        """
        ended = [session for session in self.values() if now - session.touched > session.lease and not session.pending]
        seen, self._ended = self._ended, {session.id: session.touched for session in ended}
        return [session for session in ended if seen.get(session.id) == session.touched]

    def forget_reservations(self, now: float) -> None:
        """Drops keys whose sessions have been gone for a lease. Looks only now and then: there can be many."""
        if now - self._swept < _SWEEP_SECONDS:
            return
        self._swept = now
        for key, reservation in list(self.reservations.items()):
            if reservation.pending or any(id in self for id in reservation.session_ids):
                reservation.last_alive = now
            elif now - reservation.last_alive > reservation.lease + _SWEEP_SECONDS:
                del self.reservations[key]
                self._remembered -= len(reservation.reply) + _RESERVATION_BYTES

    async def once(
        self, key: str, request: Message, response_type: type[Created], create: Callable[[], Awaitable[Created]]
    ) -> Created:
        """Runs `create` once per key; the same request under the same key gets the same reply."""
        if not key:
            return await create()
        if len(key.encode()) > _MAX_KEY_BYTES:
            raise bad_argument("key", f"is longer than {_MAX_KEY_BYTES} bytes")
        fingerprint = request.DESCRIPTOR.name.encode() + digest_request(request)
        known = self.reservations.get(key)
        if known is not None:
            if known.request != fingerprint:
                raise CallError("KEY_REUSED", f"key {key!r} was used for another request; choose a new one per request")
            if known.pending is not None:
                await asyncio.shield(known.pending)
            return response_type.FromString(known.reply)
        if self._remembered > _REMEMBERED_BYTES:
            raise overloaded("keys", "too many keys are remembered; let leases run out, or ask for shorter ones", 1.0)
        pending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reservation = Reservation(fingerprint, pending)
        self.reservations[key] = reservation
        try:
            response = await create()
        except BaseException as error:
            # Nothing was created: the key is free again, and whoever waits for it learns the same.
            del self.reservations[key]
            broke_off = CallError("SERVER_BUG", f"the call broke off: {type(error).__name__}")
            failure = error if isinstance(error, CallError) else broke_off
            pending.set_exception(failure)
            pending.exception()  # it may well be that nobody waits
            raise
        reservation.session_ids = tuple(session.session_id for session in response.sessions)
        reservation.lease = max((self[id].lease for id in reservation.session_ids if id in self), default=0.0)
        reservation.reply, reservation.pending = response.SerializeToString(), None
        self._remembered += len(reservation.reply) + _RESERVATION_BYTES
        pending.set_result(None)
        return response
