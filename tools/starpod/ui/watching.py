"""Access to other clients' sessions by their id (watch, act, copy), and round-trip times of servers.

The contract has no list of sessions. A session's id is the permission to use it, so anyone who knows it may watch.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from starpod.client import BadArgument, Fleet, Session, Snapshot, StarpodError, UnknownSession, Unsupported, Want
from starpod.client.connection import RENDER, RENEW, SNAPSHOT
from starpod.client.connection.calls import STEP
from starpod.client.pool.replica import Replica
from starpod.remote.game import Impossible
from starpod.ui.games import LEASE_SECONDS
from starpod.v1 import environment_pb2 as pb

SECONDS = 10.0
"""Deadline of a call."""
PROBES = 5
"""Number of calls per server. Pages show the median of their durations."""


@dataclass(frozen=True, slots=True)
class Look:
    """The current state of a session."""

    id: str
    address: str
    text: str
    picture: bytes | None
    spec: pb.EnvironmentSpec | None
    place: tuple[int, int] | None
    """Epoch and step index of the next turn, read from a snapshot; None if the environment has no snapshots."""


async def round_trips(fleet: Fleet) -> dict[str, float]:
    """Return each server's median round-trip time in seconds, by address. The measured calls do nothing."""

    async def probe(replica: Replica) -> float:
        seconds = []
        for _ in range(PROBES):
            start = perf_counter()
            await replica.call(RENEW, pb.RenewRequest(), _until(fleet))
            seconds.append(perf_counter() - start)
        return median(seconds)

    ready = [replica for replica in fleet.replicas if replica.ready]
    results = await asyncio.gather(*map(probe, ready), return_exceptions=True)
    return {
        replica.address: seconds for replica, seconds in zip(ready, results, strict=True) if isinstance(seconds, float)
    }


async def look(fleet: Fleet, session: str) -> Look:
    """Return the state of a session. This renews its lease, but changes nothing. Raises Impossible, StarpodError."""
    replica = await _find(fleet, session)
    spec, position = None, None
    with suppress(Unsupported, BadArgument):
        reply = await replica.call(SNAPSHOT, pb.SnapshotRequest(session_id=session), _until(fleet))
        position = (reply.epoch, reply.step_index)
        identity = (reply.snapshot.environment_id, reply.snapshot.environment_version)
        spec = next((spec for spec in replica.specs if (spec.id, spec.version) == identity), None)
    picture = await _render(fleet, replica, session, "png") if spec is None or "png" in spec.render_modes else None
    text = await _render(fleet, replica, session, "text") or b""
    return Look(session, replica.address, text.decode("utf-8", "replace"), picture, spec, position)


async def act(fleet: Fleet, session: str, place: tuple[int, int], actions: list[str]) -> None:
    """Play a turn in a session. The owner's next turn is then refused as out of order.

    Args:
        place: epoch and step index of the turn.

    Raises:
        Impossible: no server has the session.
        StarpodError: the call failed.
    """
    replica = await _find(fleet, session)
    request = pb.StepRequest(session_id=session, epoch=place[0], step_index=place[1])
    request.actions.extend(pb.Action(text=action) for action in actions)
    await replica.call(STEP, request, _until(fleet))


async def copy(fleet: Fleet, session: str) -> Session:
    """Open a copy of a session, unnoticed by its owner. Raises Impossible, StarpodError."""
    replica = await _find(fleet, session)
    try:
        reply = await replica.call(SNAPSHOT, pb.SnapshotRequest(session_id=session), _until(fleet))
    except Unsupported:
        raise Impossible("The environment has no snapshots, so its sessions cannot be copied.") from None
    return await fleet.restore(Snapshot.from_proto(reply.snapshot), want=Want(), lease_seconds=LEASE_SECONDS)


async def _find(fleet: Fleet, session: str) -> Replica:
    await fleet.describe()
    for replica in fleet.replicas:
        if replica.ready:
            answer = await replica.call(RENEW, pb.RenewRequest(session_ids=[session]), _until(fleet))
            if not answer.missing:
                return replica
    raise Impossible("None of the servers has this session: it was closed, its lease ran out, or the id is wrong.")


async def _render(fleet: Fleet, replica: Replica, session: str, mode: str) -> bytes | None:
    try:
        request = pb.RenderRequest(session_id=session, mode=mode)
        return (await replica.call(RENDER, request, _until(fleet))).data
    except UnknownSession:
        raise Impossible("The session has ended.") from None
    except StarpodError:
        return None


def _until(fleet: Fleet) -> float:
    return fleet.loop.time() + SECONDS
