"""The site's side of the gRPC service: which worker holds a session, where it stands, and what a failure means."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct
from google.rpc import error_details_pb2, status_pb2

from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub

Answer = TypeVar("Answer")

CALL_SECONDS = 20.0
"""Deadline of one call. Repeating a call that missed it is safe."""
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Security:
    """Credentials for the server. token: a file with the bearer token. The rest are PEM files; `ca` turns TLS on."""

    token: Path | None = None
    ca: Path | None = None
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
    """A session's place: the epoch and index that its next Step must carry."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class Page:
    """The page that a session shows, and a place that is not later than it."""

    place: Place
    html: str


@dataclass(eq=False)
class Refused(Exception):
    """A call that failed. reason: of the protocol's table, or the name of the gRPC code where there is none."""

    code: grpc.StatusCode
    reason: str
    message: str
    retry_after: float = 0.0

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class Service:
    """All workers of one server. One worker holds a session; which one is found out once and remembered."""

    def __init__(self, address: str, security: Security | None = None) -> None:
        self.address = address
        self._security = security or Security()
        self._stubs: dict[str, Any] = {}
        self._channels: list[grpc.aio.Channel] = []
        self._homes: OrderedDict[str, str] = OrderedDict()  # session -> the address of its worker
        self._turn = 0

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def environment(self, environment: str) -> pb.EnvironmentSpec | None:
        """The server's description of its newest version of the environment; None if it does not host it."""
        description = await self._call(self.address, "Describe", pb.DescribeRequest())
        host = self.address.rpartition(":")[0]
        for endpoint in description.endpoints:
            own, _, port = endpoint.rpartition(":")
            self._stub(f"{host if own in ('', '0.0.0.0', '[::]') else own}:{port}")
        return next((spec for spec in description.environments if spec.id == environment), None)

    async def open(
        self, environment: str, options: Mapping[str, Any], seed: int | None, key: str, lease_seconds: float
    ) -> str:
        """Opens a session without limits, on each worker in turn. The same key again: the same session."""
        workers = list(self._stubs) or [self.address]
        self._turn += 1
        address = workers[self._turn % len(workers)]
        request = pb.OpenRequest(environment_id=environment, key=key, lease_seconds=lease_seconds)
        request.options.CopyFrom(ParseDict(dict(options), Struct()))
        request.limits.CopyFrom(pb.LimitOverrides(max_turns=0, max_actions=0))  # people take their time
        if seed is not None:
            request.seed = seed
        session: str = (await self._call(address, "Open", request)).sessions[0].session_id
        self._remember(session, address)
        return session

    async def page(self, session: str) -> Page:
        """Fetches the page that the session shows now. Changes nothing but its lease.

        The place is read before the page, so that a click on it can only be refused, never hit a later page.
        """
        place = await self.place(session)
        picture = await self._of(session, "Render", pb.RenderRequest(session_id=session, mode="html"))
        return Page(place, picture.data.decode("utf-8", "replace"))

    async def place(self, session: str) -> Place:
        """The session's place, read from a snapshot, which changes nothing."""
        found = await self._of(session, "Snapshot", pb.SnapshotRequest(session_id=session))
        return Place(found.epoch, found.step_index)

    async def act(self, session: str, place: Place, action: str) -> pb.Transition:
        """Plays one turn at exactly that place; there again with the same action, its reply again."""
        request = pb.StepRequest(
            session_id=session, epoch=place.epoch, step_index=place.index, actions=[pb.Action(text=action)]
        )
        transition: pb.Transition = (await self._of(session, "Step", request)).transition
        return transition

    async def again(self, session: str, epoch: int) -> None:
        """A new episode. The same epoch again, before a step: the same one."""
        await self._of(session, "Reset", pb.ResetRequest(session_id=session, epoch=epoch))

    # --- workers -------------------------------------------------------------------------------------------------

    async def _of(self, session: str, method: str, request: Any) -> Any:
        address = self._homes.get(session) or await self._find(session)
        return await self._call(address, method, request)

    async def _find(self, session: str) -> str:
        """The worker that knows the session; the first one if none does, which will say so."""
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
            raise _refused(error) from error


def _refused(error: grpc.aio.AioRpcError) -> Refused:
    """Reads the details of a failed call."""
    refused = Refused(error.code(), error.code().name, error.details() or "")
    trailers: Sequence[tuple[str, Any]] = tuple(error.trailing_metadata() or ())
    packed = next((value for name, value in trailers if name == "grpc-status-details-bin"), b"")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status_pb2.Status.FromString(packed).details:
        if detail.Unpack(info):
            refused.reason = info.reason
        elif detail.Unpack(retry):
            refused.retry_after = retry.retry_delay.ToMilliseconds() / 1000
    return refused
