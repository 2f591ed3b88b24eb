"""The table of a tenant's sessions, by id and by the keys under which they were created."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starpod.env_server.episodes.errors import CallError, bad_argument, overloaded
from starpod.env_server.operation.tenants import Tenant
from starpod.env_server.sessions.session import ServedSession, digest_request, unknown_session
from starpod.v1 import environment_pb2 as pb

Request = TypeVar("Request", pb.OpenRequest, pb.ForkRequest, pb.RestoreRequest)
Created = TypeVar("Created", pb.OpenResponse, pb.ForkResponse, pb.RestoreResponse)

_MAX_KEY_BYTES = 128
_SWEEP_SECONDS = 10.0
_REMEMBERED_BYTES = 256 * 2**20
"""Maximum bytes of replies stored for one tenant's keys. Nothing else bounds them, because keys outlive their sessions
by a lease."""
_RESERVATION_BYTES = 1024
"""Approximate memory of a stored key in bytes, without its reply."""


@dataclass(slots=True)
class Reservation:
    """The request of an idempotency key and its reply, which is pending at first."""

    request: bytes
    """Name and digest of the request."""
    reply_type: type[pb.OpenResponse | pb.ForkResponse | pb.RestoreResponse]
    pending: asyncio.Future[Any] | None
    """Future of the creation; None once it is done."""
    reply: bytes = b""
    """Serialized reply. Its observations are dropped when all sessions have ended and the caller closed one of them."""
    session_ids: tuple[str, ...] = ()
    """The reply's sessions; empty once their observations were dropped."""
    lease: float = 0.0
    """Seconds for which the key is kept after its sessions have ended."""
    last_alive: float = field(default_factory=time.monotonic)
    """Monotonic time at which a session of the key was last seen, in seconds."""
    is_received: bool = False
    """Whether the caller is known to have the reply, because it closed one of the sessions."""

    def drop_observations(self) -> int:
        """Drop the observations from the reply, and return the bytes that they took."""
        response, size = self.reply_type.FromString(self.reply), len(self.reply)
        for session in response.sessions:
            session.ClearField("observation")
        self.reply, self.session_ids = response.SerializeToString(), ()
        return size - len(self.reply)


class SessionTable(dict[str, ServedSession]):
    """The sessions of one tenant by id, and the keys under which they were created."""

    def __init__(self, tenant: Tenant | None = None) -> None:
        super().__init__()
        self.tenant = tenant or Tenant("")
        self.reservations: dict[str, Reservation] = {}
        self.closed_ids: set[str] = set()
        """Ids of the sessions that the caller closed since the last sweep of the keys."""
        self._remembered_bytes = 0
        self._sweep_time = time.monotonic()
        self._ended: dict[str, float] = {}

    def find(self, session_id: str) -> ServedSession:
        """Return a session. Raises UNKNOWN_SESSION or SESSION_LOST."""
        session = self.get(session_id)
        if session is None:
            raise unknown_session(session_id)
        session.check()
        return session

    def expired(self, now: float) -> list[ServedSession]:
        """Return the sessions that look expired in this sweep and the previous one.

        One sweep is not enough: after a stall of this process, a renewal may still be unread in the socket.
        """
        ended = [
            session for session in self.values() if now - session.last_call > session.lease and not session.pending
        ]
        last_sweep, self._ended = self._ended, {session.id: session.last_call for session in ended}
        return [session for session in ended if last_sweep.get(session.id) == session.last_call]

    def forget_reservations(self, now: float) -> None:
        """Drop keys whose sessions ended a lease ago, and observations that the caller no longer needs.

        Do so only every 10 seconds, because there can be many keys.
        """
        if now - self._sweep_time < _SWEEP_SECONDS:
            return
        self._sweep_time = now
        closed_ids, self.closed_ids = self.closed_ids, set()
        for key, reservation in list(self.reservations.items()):
            reservation.is_received |= not closed_ids.isdisjoint(reservation.session_ids)
            if reservation.pending or any(id in self for id in reservation.session_ids):
                reservation.last_alive = now
            elif now - reservation.last_alive > reservation.lease + _SWEEP_SECONDS:
                del self.reservations[key]
                self._remembered_bytes -= len(reservation.reply) + _RESERVATION_BYTES
            elif reservation.is_received and reservation.session_ids:
                self._remembered_bytes -= reservation.drop_observations()

    async def once(
        self,
        request: Request,
        response_type: type[Created],
        create: Callable[[SessionTable, Request], Awaitable[Created]],
    ) -> Created:
        """Run `create` once per key of a request. The same request with the same key gets the same reply.

        Args:
            request: the request, which is compared with the key's first one.
            create: creates the sessions in this table and returns the reply.

        Raises:
            CallError: BAD_ARGUMENT if the key is too long, KEY_REUSED if it belongs to another request, OVERLOADED if
                too many keys are stored, or the error of `create`.
        """
        key = request.key
        if not key:
            return await create(self, request)
        if len(key.encode()) > _MAX_KEY_BYTES:
            raise bad_argument("key", f"is longer than {_MAX_KEY_BYTES} bytes")
        fingerprint = request.DESCRIPTOR.name.encode() + digest_request(request)
        old_reservation = self.reservations.get(key)
        if old_reservation is not None:
            if old_reservation.request != fingerprint:
                raise CallError("KEY_REUSED", f"key {key!r} was used for another request; choose a new one per request")
            if old_reservation.pending is not None:
                await asyncio.shield(old_reservation.pending)
            return response_type.FromString(old_reservation.reply)
        if self._remembered_bytes > _REMEMBERED_BYTES:
            raise overloaded("keys", "too many keys are remembered; let leases run out, or ask for shorter ones", 1.0)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reservation = Reservation(fingerprint, response_type, future)
        self.reservations[key] = reservation
        try:
            response = await create(self, request)
        except BaseException as error:
            # Nothing was created: free the key, and pass the error to calls that wait for it.
            del self.reservations[key]
            interruption = CallError("SERVER_BUG", f"the call broke off: {type(error).__name__}")
            failure = error if isinstance(error, CallError) else interruption
            future.set_exception(failure)
            future.exception()  # mark as retrieved: often no call waits
            raise
        reservation.session_ids = tuple(session.session_id for session in response.sessions)
        reservation.lease = max((self[id].lease for id in reservation.session_ids if id in self), default=0.0)
        reservation.reply, reservation.pending = response.SerializeToString(), None
        self._remembered_bytes += len(reservation.reply) + _RESERVATION_BYTES
        future.set_result(None)
        return response
