"""Leases, Renew, Close, and sessions whose connection is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import grpc

from starpod.check.expectations import TooBusy, Unmet, expect, expect_same
from starpod.check.grpc_connection import CheckStream, columns_of, open_stream
from starpod.check.handle import Handle
from starpod.check.probe import Probe
from starpod.check.refusal import Refusal, from_error, from_status
from starpod.check.requirement import must
from starpod.v1 import environment_pb2 as pb

LEASE = 0.5
PATIENCE = (1.0, 2.0, 5.0)
"""Pauses in seconds before each of three calls. One of the calls must find its session (with lease LEASE) gone.

Each call goes to another session, because calls renew leases."""


@must("C-71", "Open returns the lease in force: as asked, the server's default for 0, and never more than its maximum.")
async def check_lease_in_force(probe: Probe) -> None:
    limits = probe.server.limits
    lease = (await probe.open(lease_seconds=LEASE)).lease_seconds
    fix = "grant a shorter lease than the default when it is asked for"
    expect(lease == LEASE, f"lease_seconds {LEASE}", lease, fix)
    default = (await probe.open(lease_seconds=0)).lease_seconds
    if limits.default_lease_seconds:
        expect(default == limits.default_lease_seconds, f"the default lease {limits.default_lease_seconds:g}", default)
    if max_lease := limits.max_lease_seconds:
        longest = (await probe.open(lease_seconds=max_lease * 10)).lease_seconds
        expect(longest == max_lease, f"the longest lease, {max_lease:g}, for one of {max_lease * 10:g}", longest)


@must("C-72", "A lease that is negative or not a number is refused or replaced, never put in force.")
async def check_strange_lease(probe: Probe) -> None:
    for lease in (-1.0, math.nan, -math.inf):
        request = probe.open_request(lease_seconds=lease)
        try:
            reply: pb.OpenResponse = await probe.create(request)
        except grpc.aio.AioRpcError as error:
            is_refused = error.code() == grpc.StatusCode.INVALID_ARGUMENT
            expect(is_refused, f"INVALID_ARGUMENT or a sound lease for {lease}", from_error(error))
        else:
            sound = math.isfinite(reply.lease_seconds) and reply.lease_seconds > 0
            expect(sound, f"a positive, finite lease although {lease} was requested", reply.lease_seconds)


@must("C-73", "A session without a call for longer than its lease is reaped: then its calls are NOT_FOUND.")
async def check_expiry(probe: Probe) -> None:
    handles = await probe.open_many(len(PATIENCE), lease_seconds=LEASE)
    await expect_reaped(probe, handles, PATIENCE, "session", "the session", "reap sessions whose lease ran out")


async def expect_reaped(
    probe: Probe, handles: Sequence[Handle], waits: Sequence[float], kind: str, which: str, fix: str
) -> None:
    """Call one session after another, with a pause before each call, until one is gone. Raise Unmet if none is.

    Args:
        handles: sessions with a lease of LEASE seconds.
        waits: pause in seconds before the call to each session; as many as `handles`.
        kind: noun for a session in the error, such as "copy".
        which: name of the session that must be gone in the error, such as "a copy with the original's lease".
    """
    for handle, seconds in zip(handles, waits, strict=True):
        await asyncio.sleep(seconds)
        refusal = await probe.connection.refusal(handle.request())
        if refusal is not None:
            expect(refusal.code == "NOT_FOUND", f"NOT_FOUND of a {kind} whose lease ran out", refusal)
            return
    delay = f"{sum(waits):g} s after a lease of {LEASE:g} s"
    raise Unmet(f"{which} to be gone", f"an answer from it {delay}", fix)


@must("C-74", "Renew and every other call keep a session alive for another lease.")
async def check_renewal(probe: Probe) -> None:
    for lease in (1.0, 3.0, 8.0):
        if await _outlives_lease(probe, lease):
            return
        await probe.clean_up()
    raise TooBusy


async def _outlives_lease(probe: Probe, lease: float) -> bool:
    """Return whether sessions that are called repeatedly outlive their lease. Raise Unmet if one does not.

    The result is False if this machine was late, so that a correct server may have closed the sessions. The server
    counts a lease from an unknown instant during a call, so the idle time is known only within bounds.
    """
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        if probe.server.capabilities.stream:
            streams = [await stack.enter_async_context(open_stream(probe.connection)) for _ in range(2)]
        calls = _calls(probe, streams, itertools.count())
        last_call = time.monotonic()
        handles = await probe.open_many(len(calls), lease_seconds=lease)
        for _ in range(3):
            await asyncio.sleep(0.4 * lease)
            previous_call, last_call = last_call, time.monotonic()
            outcomes = await asyncio.gather(
                *(call(handle) for call, handle in zip(calls.values(), handles, strict=True)), return_exceptions=True
            )
            if time.monotonic() - previous_call > 0.8 * lease:
                return False
            for name, outcome in zip(calls, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    raise outcome
                what = f"a session that is called by {name} every {0.4 * lease:g} s to outlive a lease of {lease:g} s"
                expect(outcome is None, what, outcome, "count the lease from the last call")
    return True


def _calls(
    probe: Probe, streams: Sequence[CheckStream], call_ids: Iterator[int]
) -> dict[str, Callable[[Handle], Awaitable[Refusal | None]]]:
    """Return ways to call a session, by name. Each makes the call and returns its error, if any.

    streams: empty, or two Streams, one for single Steps and one for columns.
    """

    async def renew(handle: Handle) -> Refusal | None:
        reply: pb.RenewResponse = await probe.connection.call(pb.RenewRequest(session_ids=[handle.id]))
        return Refusal("NOT_FOUND", "Renew names it as missing") if reply.missing else None

    async def reset(handle: Handle) -> Refusal | None:
        refusal = await probe.connection.refusal(handle.reset_request())
        handle.epoch += 1
        return refusal

    async def step(handle: Handle) -> Refusal | None:
        refusal = await probe.connection.refusal(handle.request())
        handle.index += 1
        return refusal

    async def step_on_stream(handle: Handle) -> Refusal | None:
        call = pb.Call(call_id=next(call_ids), step=handle.request())
        return _refusal_of_step(handle, (await streams[0].ask(call))[0])

    async def step_in_columns(handle: Handle) -> Refusal | None:
        steps = columns_of({next(call_ids): handle.request()})
        return _refusal_of_step(handle, (await streams[1].ask(steps=steps))[0])

    calls: dict[str, Callable[[Handle], Awaitable[Refusal | None]]]
    calls = {"Renew": renew, "Reset": reset, "Step": step}
    calls["Render"] = lambda handle: probe.connection.refusal(pb.RenderRequest(session_id=handle.id))
    if probe.spec.capabilities.snapshot:
        calls["Snapshot"] = lambda handle: probe.connection.refusal(pb.SnapshotRequest(session_id=handle.id))
    if streams:
        calls["Step on a Stream"] = step_on_stream
    if streams and probe.server.capabilities.step_columns:
        calls["StepColumns"] = step_in_columns
    return calls


def _refusal_of_step(handle: Handle, reply: pb.Reply) -> Refusal | None:
    handle.index += 1
    return from_status(reply.error) if reply.HasField("error") else None


@must("C-75", "Renew lists exactly the sessions that do not exist as missing, and may be repeated.")
async def check_missing_sessions(probe: Probe) -> None:
    handle = await probe.seeded()
    for _ in range(2):
        request = pb.RenewRequest(session_ids=[handle.id, "no-such-session"])
        reply: pb.RenewResponse = await probe.connection.call(request)
        expect(list(reply.missing) == ["no-such-session"], "missing: no-such-session", list(reply.missing))


@must("C-76", "Close ends a session: its calls are NOT_FOUND; closing again, or an unknown one, is not an error.")
async def check_close(probe: Probe) -> None:
    handle, other_handle = await probe.seeded(), await probe.seeded()
    for _ in range(2):
        await probe.connection.call(pb.CloseRequest(session_ids=[handle.id, "no-such-session"]))
    await probe.expect_refusal("a Step in a closed session", handle.request(), "NOT_FOUND")
    await other_handle.step()


@must("C-77", "A session outlives its connection: it continues over another one, with the same replies.")
async def check_lost_connection(probe: Probe) -> None:
    script = probe.target.script()
    connection = probe.second_connection()
    handle = await probe.seeded(connection)
    transitions = await handle.play(script.turns[:1])
    request = handle.request(script.turns[0], ahead=-1)
    await connection.close()
    reply: pb.StepResponse = await probe.connection.call(request)
    expect_same(transitions[0], reply.transition, "the last reply over another connection")
    handle.connection = probe.connection
    await probe.expect_script(handle, "the episode over another connection", "tie sessions to no connection")
