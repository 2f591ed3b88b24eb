"""The site's calls to the gRPC service, in sessions that anybody may have opened. It finds the worker of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct

from starpod.client import StarpodError
from starpod.client.transport import Transport, join_endpoint, split_address
from starpod.client.wire import GrpcWire
from starpod.v1 import environment_pb2 as pb

CALL_SECONDS = 20.0
"""Deadline of one call. A call that missed it can safely be repeated."""
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """The current turn of a session: epoch and index for its next Step."""

    epoch: int
    index: int


@dataclass(frozen=True, slots=True)
class SessionPage:
    """A session's page, and the step that was read before it: the page's step or an earlier one."""

    place: SessionTurn
    html: str


class Service:
    """The workers of one server. The worker of each session is looked up once and cached.

    A `Fleet` would not do: it knows its own sessions only, and it moves them.

    Args:
        address: `host:port`.

    Raises:
        OSError, ValueError: a certificate cannot be read.
    """

    def __init__(self, address: str, transport: Transport | None = None) -> None:
        self._address = address
        self._transport = transport or Transport()
        self._wires: dict[str, GrpcWire] = {address: self._transport.connect(address)}
        self._homes: OrderedDict[str, str] = OrderedDict()  # session -> the address of its worker

    async def close(self) -> None:
        await asyncio.gather(*(wire.close() for wire in self._wires.values()))

    async def environment(self, environment: str) -> pb.EnvironmentSpec | None:
        """Return the spec of the newest version of an environment, or None if the server does not host it."""
        description = await self._call(self._address, "Describe", pb.DescribeRequest())
        host, _ = split_address(self._address)
        for endpoint in description.endpoints:
            worker = join_endpoint(endpoint, host)
            if worker not in self._wires:
                self._wires[worker] = self._transport.connect(worker)
        return next((spec for spec in description.environments if spec.id == environment), None)

    async def open(
        self, environment: str, options: Mapping[str, Any], seed: int | None, key: str, lease_seconds: float
    ) -> str:
        """Open a session without limits and return its id.

        Args:
            seed: seed of the start; None lets the server draw one.
            key: equal keys give the same session. The key selects the worker, because workers know only their own keys.
        """
        workers = list(self._wires)
        address = workers[crc32(key.encode()) % len(workers)]
        request = pb.OpenRequest(environment_id=environment, key=key, lease_seconds=lease_seconds, seed=seed)
        request.options.CopyFrom(ParseDict(dict(options), Struct()))
        request.limits.CopyFrom(pb.LimitOverrides(max_turns=0, max_actions=0))  # people browse more than agents
        session: str = (await self._call(address, "Open", request)).sessions[0].session_id
        self._remember(session, address)
        return session

    async def page(self, session: str) -> SessionPage:
        """Fetch the session's current page. This only renews the lease.

        The step is read before the page. If the session moves on in between, a click on the page is refused; it can
        never apply to a later page.
        """
        place = await self.current_place(session)
        picture = await self._call_worker(session, "Render", pb.RenderRequest(session_id=session, mode="html"))
        return SessionPage(place, picture.data.decode("utf-8", "replace"))

    async def current_place(self, session: str) -> SessionTurn:
        """Return the session's current step, read from a snapshot, which does not change the session."""
        snapshot = await self._call_worker(session, "Snapshot", pb.SnapshotRequest(session_id=session))
        return SessionTurn(snapshot.epoch, snapshot.step_index)

    async def act(self, session: str, place: SessionTurn, action: str) -> pb.Transition:
        """Play one turn at exactly that step. Repeating the call returns the same reply.

        Args:
            place: epoch and index of the step. A step that is not the session's next or last one is refused.
        """
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
        request = pb.RenewRequest(session_ids=[session])
        with contextlib.suppress(StarpodError):
            await self.environment("")
        for address in list(self._wires):
            with contextlib.suppress(StarpodError):
                if not (await self._call(address, "Renew", request)).missing:
                    self._remember(session, address)
                    return address
        return self._address

    def _remember(self, session: str, address: str) -> None:
        self._homes[session] = address
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)

    async def _call(self, address: str, method: str, request: Any) -> Any:
        response, _ = await self._wires[address].unary(method, request, CALL_SECONDS)
        return response
