"""Sessions of others, by their id: looked at, acted in, and copied; and how long the servers take to answer.

The contract lists nobody's sessions: an id is what lets a client into one, so who knows it may look.
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
from starpod.ui.games import LEASE_SECONDS
from starpod.ui.policies import NotPossible
from starpod.v1 import environment_pb2 as pb

SECONDS = 10.0
"""For a call."""
PROBES = 5
"""Calls of which the median is told."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a session shows. place: epoch and index that its next turn must carry; None where it has no snapshots, so
    that nobody else can know."""

    id: str
    address: str
    text: str
    picture: bytes | None
    spec: pb.EnvironmentSpec | None
    place: tuple[int, int] | None


async def round_trips(fleet: Fleet) -> dict[str, float]:
    """The median seconds that each server takes for a call that does nothing, by its address."""

    async def probe(replica: Replica) -> float:
        seconds = []
        for _ in range(PROBES):
            began = perf_counter()
            await replica.call(RENEW, pb.RenewRequest(), _until(fleet))
            seconds.append(perf_counter() - began)
        return median(seconds)

    ready = [replica for replica in fleet.replicas if replica.ready]
    found = await asyncio.gather(*map(probe, ready), return_exceptions=True)
    return {
        replica.address: seconds for replica, seconds in zip(ready, found, strict=True) if isinstance(seconds, float)
    }


async def look(fleet: Fleet, session: str) -> Look:
    """Looks at a session, which renews its lease and changes nothing else. Raises NotPossible, StarpodError."""
    replica = await _find(fleet, session)
    spec, place = None, None
    with suppress(Unsupported, BadArgument):
        kept = await replica.call(SNAPSHOT, pb.SnapshotRequest(session_id=session), _until(fleet))
        place = (kept.epoch, kept.step_index)
        wanted = (kept.snapshot.environment_id, kept.snapshot.environment_version)
        spec = next((each for each in replica.specs if (each.id, each.version) == wanted), None)
    picture = await _render(fleet, replica, session, "png") if spec is None or "png" in spec.render_modes else None
    text = await _render(fleet, replica, session, "text") or b""
    return Look(session, replica.address, text.decode("utf-8", "replace"), picture, spec, place)


async def act(fleet: Fleet, session: str, place: tuple[int, int], actions: list[str]) -> None:
    """Plays a turn in it, as its owner would: their next one is then out of order. Raises as `look`."""
    replica = await _find(fleet, session)
    request = pb.StepRequest(session_id=session, epoch=place[0], step_index=place[1])
    request.actions.extend(pb.Action(text=action) for action in actions)
    await replica.call(STEP, request, _until(fleet))


async def copy(fleet: Fleet, session: str) -> Session:
    """A session of ours in the same state; its owner sees nothing of it. Raises as `look`."""
    replica = await _find(fleet, session)
    try:
        kept = await replica.call(SNAPSHOT, pb.SnapshotRequest(session_id=session), _until(fleet))
    except Unsupported:
        raise NotPossible("The environment has no snapshots: its sessions cannot be copied.") from None
    return await fleet.restore(Snapshot.from_proto(kept.snapshot), want=Want(), lease_seconds=LEASE_SECONDS)


async def _find(fleet: Fleet, session: str) -> Replica:
    await fleet.describe()
    for replica in fleet.replicas:
        if replica.ready:
            answer = await replica.call(RENEW, pb.RenewRequest(session_ids=[session]), _until(fleet))
            if not answer.missing:
                return replica
    raise NotPossible("None of the servers has this session: it was closed, its lease ran out, or the id is another.")


async def _render(fleet: Fleet, replica: Replica, session: str, mode: str) -> bytes | None:
    try:
        request = pb.RenderRequest(session_id=session, mode=mode)
        return (await replica.call(RENDER, request, _until(fleet))).data
    except UnknownSession:
        raise NotPossible("The session has ended.") from None
    except StarpodError:
        return None


def _until(fleet: Fleet) -> float:
    return fleet.loop.time() + SECONDS
