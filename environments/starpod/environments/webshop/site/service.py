"""The site's client of the gRPC service. It finds the worker of each session."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from starpod.v1.statuses import details_of, status_in

Answer = TypeVar("Answer")

CALL_SECONDS = 20.0
"""Deadline of one call. A call that missed it can safely be repeated."""
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials for the server. Certificates and key are PEM files."""

    token: Path | None = None
    """File with the bearer token."""
    ca: Path | None = None
    """File with the certificate of the authority that signed the server's; it enables TLS."""
    certificate: Path | None = None
    key: Path | None = None

    def channel(self, address: str) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        if not self.ca:
            return grpc.aio.insecure_channel(address, options)
        files = [path.read_bytes() if path else None for path in (self.ca, self.key, self.certificate)]
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*files), options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        if self.token is None:
            return ()
        return (("authorization", f"Bearer {self.token.read_text(encoding='utf-8-sig').strip()}"),)


@dataclass(frozen=True, slots=True)
class Place:
    """The current step of a session: epoch and index for its next Step."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class Page:
    """A session's page, and the step that was read before it: the page's step or an earlier one."""

    place: Place
    html: str


@dataclass(eq=False)
class Refused(Exception):
    """A call failed."""

    code: grpc.StatusCode
    reason: str
    """Reason in the protocol's table, or the name of the gRPC code if there is none."""
    message: str
    retry_after: float = 0.0

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class Service:
    """The workers of one server. The worker of each session is looked up once and cached."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        self.address = address
        self._security = security or Security()
        self._stubs: dict[str, Any] = {}
        self._channels: list[grpc.aio.Channel] = []
        self._homes: OrderedDict[str, str] = OrderedDict()  # session -> the address of its worker

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def environment(self, environment: str) -> pb.EnvironmentSpec | None:
        """Return the spec of the newest version of an environment, or None if the server does not host it."""
        description = await self._call(self.address, "Describe", pb.DescribeRequest())
        host = self.address.rpartition(":")[0]
        for endpoint in description.endpoints:
            listed_host, _, port = endpoint.rpartition(":")
            self._stub(f"{host if listed_host in ('', '0.0.0.0', '[::]') else listed_host}:{port}")
        return next((spec for spec in description.environments if spec.id == environment), None)

    async def open(
        self, environment: str, options: Mapping[str, Any], seed: int | None, key: str, lease_seconds: float
    ) -> str:
        """Open a session without limits and return its id. An equal key gives the same session.

        The key also selects the worker, because each worker knows only its own keys.
        """
        workers = list(self._stubs) or [self.address]
        address = workers[crc32(key.encode()) % len(workers)]
        request = pb.OpenRequest(environment_id=environment, key=key, lease_seconds=lease_seconds)
        request.options.CopyFrom(ParseDict(dict(options), Struct()))
        request.limits.CopyFrom(pb.LimitOverrides(max_turns=0, max_actions=0))  # people browse more than agents
        if seed is not None:
            request.seed = seed
        session: str = (await self._call(address, "Open", request)).sessions[0].session_id
        self._remember(session, address)
        return session

    async def page(self, session: str) -> Page:
        """Fetch the session's current page. This only renews the lease.

        The step is read before the page. If the session moves on in between, a click on the page is refused; it can
        never apply to a later page.
        """
        place = await self.current_place(session)
        picture = await self._call_worker(session, "Render", pb.RenderRequest(session_id=session, mode="html"))
        return Page(place, picture.data.decode("utf-8", "replace"))

    async def current_place(self, session: str) -> Place:
        """Return the session's current step, read from a snapshot, which does not change the session."""
        snapshot = await self._call_worker(session, "Snapshot", pb.SnapshotRequest(session_id=session))
        return Place(snapshot.epoch, snapshot.step_index)

    async def act(self, session: str, place: Place, action: str) -> pb.Transition:
        """Play one turn at exactly that step. Repeating the call returns the same reply."""
        request = pb.StepRequest(
            session_id=session, epoch=place.epoch, step_index=place.index, actions=[pb.Action(text=action)]
        )
        transition: pb.Transition = (await self._call_worker(session, "Step", request)).transition
        return transition

    async def again(self, session: str, epoch: int) -> None:
        """Start a new episode. Repeating the call with the same epoch, before any step, gives the same episode."""
        await self._call_worker(session, "Reset", pb.ResetRequest(session_id=session, epoch=epoch))

    # --- workers -------------------------------------------------------------------------------------------------

    async def _call_worker(self, session: str, method: str, request: Any) -> Any:
        address = self._homes.get(session) or await self._find(session)
        return await self._call(address, method, request)

    async def _find(self, session: str) -> str:
        """Return the address of the session's worker, or of the first worker if none of them knows the session."""
        if not self._stubs:
            with contextlib.suppress(Refused):
                await self.environment("")
        request = pb.RenewRequest(session_ids=[session])
        for address in list(self._stubs):
            with contextlib.suppress(Refused):
                if not (await self._call(address, "Renew", request)).missing:
                    self._remember(session, address)
                    return address
        return self.address

    def _remember(self, session: str, address: str) -> None:
        self._homes[session] = address
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)

    def _stub(self, address: str) -> Any:
        if address not in self._stubs:
            channel = self._security.channel(address)
            self._channels.append(channel)
            self._stubs[address] = EnvironmentServiceStub(channel)
        return self._stubs[address]

    async def _call(self, address: str, method: str, request: Any) -> Any:
        call: Callable[..., Awaitable[Any]] = getattr(self._stub(address), method)
        try:
            return await call(request, timeout=CALL_SECONDS, metadata=self._security.metadata())
        except grpc.aio.AioRpcError as error:
            raise _refusal_of(error) from error


def _refusal_of(error: grpc.aio.AioRpcError) -> Refused:
    refusal = Refused(error.code(), error.code().name, error.details() or "")
    if (status := status_in(error.trailing_metadata())) is not None:
        info, _, retry_after = details_of(status)
        refusal.reason = info.reason if info else refusal.reason
        refusal.retry_after = refusal.retry_after if retry_after is None else retry_after
    return refusal
