"""Leases, Renew, Close, lost connections, deadlines, and many sessions at once."""

from __future__ import annotations

import asyncio
import math
import time

import grpc

from starpod.client.check.probe import SEED, Handle, Probe, expect_played, expect_same
from starpod.client.check.refusal import from_error
from starpod.client.check.requirement import NotShown, Unmet, expect, must
from starpod.v1 import environment_pb2 as pb

LEASE = 0.5
PATIENCE = (1.0, 2.0, 5.0)
"""Seconds to wait for the reaping of a session whose lease of LEASE ran out, one session for each look."""


@must("C-71", "Open tells the lease in force: as asked, the server's default for 0, and never more than its maximum.")
async def lease_in_force(probe: Probe) -> None:
    limits = probe.server.limits
    asked = (await probe.open(lease_seconds=LEASE)).lease_seconds
    expect(
        asked == LEASE, f"lease_seconds {LEASE}", asked, "grant a shorter lease than the default when it is asked for"
    )
    default = (await probe.open(lease_seconds=0)).lease_seconds
    if limits.default_lease_seconds:
        expect(default == limits.default_lease_seconds, f"the default lease {limits.default_lease_seconds:g}", default)
    if most := limits.max_lease_seconds:
        longest = (await probe.open(lease_seconds=most * 10)).lease_seconds
        expect(longest == most, f"the longest lease, {most:g}, for one of {most * 10:g}", longest)


@must("C-72", "A lease that is negative or not a number is refused or replaced, never put in force.")
async def strange_lease(probe: Probe) -> None:
    for lease in (-1.0, math.nan, -math.inf):
        request = probe.open_request(lease_seconds=lease)
        try:
            reply: pb.OpenResponse = await probe.create("Open", request)
        except grpc.aio.AioRpcError as error:
            fine = error.code() == grpc.StatusCode.INVALID_ARGUMENT
            expect(fine, f"INVALID_ARGUMENT or a sound lease for {lease}", from_error(error))
        else:
            sound = math.isfinite(reply.lease_seconds) and reply.lease_seconds > 0
            expect(sound, f"a positive, finite lease where {lease} was asked for", reply.lease_seconds)


@must("C-73", "A session that is not called for longer than its lease is reaped: then its calls are NOT_FOUND.")
async def expiry(probe: Probe) -> None:
    handles = [Handle(probe.link, session) for session in (await probe.open(lease_seconds=LEASE, count=3)).sessions]
    for handle, seconds in zip(handles, PATIENCE, strict=True):
        await asyncio.sleep(seconds)
        refusal = await probe.link.refusal("Step", handle.request())
        if refusal is not None:
            expect(refusal.code == "NOT_FOUND", "NOT_FOUND of a session whose lease ran out", refusal)
            return
    waited = f"{sum(PATIENCE):g} s after a lease of {LEASE:g} s"
    raise Unmet("the session to be gone", f"an answer from it {waited}", "reap sessions whose lease ran out")


@must("C-74", "Renew and every other call keep a session alive for another lease.")
async def renewal(probe: Probe) -> None:
    for lease in (1.0, 4.0):
        sessions = (await probe.open(lease_seconds=lease, count=2)).sessions
        renewed, rendered = (Handle(probe.link, session) for session in sessions)
        calls = (
            ("Renew", pb.RenewRequest(session_ids=[renewed.id])),
            ("Render", pb.RenderRequest(session_id=rendered.id)),
            ("Step", renewed.request()),
            ("Step", rendered.request()),
        )
        refusal, slowest = None, 0.0
        for method, request in (*calls[:2] * 3, *calls):
            start = time.monotonic()
            await asyncio.sleep(0.2 * lease if method != "Step" else 0.0)
            refusal = refusal or await probe.link.refusal(method, request)
            slowest = max(slowest, time.monotonic() - start)
        if slowest < 0.4 * lease:
            expect(refusal is None, "sessions kept alive by Renew and by Render", refusal, "count from the last call")
            return
    raise NotShown("this machine is too busy to call in time")


@must("C-75", "Renew names exactly those sessions that do not exist as missing, and may be repeated.")
async def missing(probe: Probe) -> None:
    handle = await probe.seeded()
    for _ in range(2):
        request = pb.RenewRequest(session_ids=[handle.id, "no-such-session"])
        reply: pb.RenewResponse = await probe.link.call("Renew", request)
        expect(list(reply.missing) == ["no-such-session"], "missing: no-such-session", list(reply.missing))


@must("C-76", "Close ends a session: its calls are NOT_FOUND; closing again, or an unknown session, is not an error.")
async def closing(probe: Probe) -> None:
    handle, other = await probe.seeded(), await probe.seeded()
    for _ in range(2):
        await probe.link.call("Close", pb.CloseRequest(session_ids=[handle.id, "no-such-session"]))
    await probe.refused("a Step in a closed session", "Step", handle.request(), "NOT_FOUND")
    await other.step()


@must("C-77", "A session outlives its connection: any other connection goes on with it, and has the same replies.")
async def lost_connection(probe: Probe) -> None:
    script = await probe.script()
    link = probe.second_link()
    handle = await probe.seeded(link)
    first = await handle.play(script.turns[:1])
    last = handle.request(script.turns[0], ahead=-1)
    await link.close()
    handle = handle.on(probe.link)
    again: pb.StepResponse = await probe.link.call("Step", last)
    expect_same(first[0], again.transition, "the last reply over another connection")
    rest = await handle.play(script.turns[1:])
    expect_played(script.transitions[1:], rest, "the episode over another connection", "tie sessions to no connection")


@must("C-78", "Sessions that run at the same time do not touch each other.")
async def isolation(probe: Probe) -> None:
    script = await probe.script()
    links = [probe.link, probe.second_link()]
    same = [await probe.seeded(links[number % 2]) for number in range(4)]
    other = [await probe.seeded(links[number % 2], seed=SEED + 1 + number) for number in range(4)]
    plays = await asyncio.gather(*(handle.play(script.turns) for handle in (*same, *other)))
    for play in plays[:4]:
        expect_played(script.transitions, play, "the episode beside others", "share nothing between sessions")


@must(
    "C-79",
    "The same version, seeds, options and actions give the same observations and rewards over another connection.",
)
async def two_connections(probe: Probe) -> None:
    if not probe.spec.capabilities.deterministic:
        await probe.script()
    plays, link = [], probe.second_link()
    for handle in (await probe.seeded(), await probe.seeded(link), await probe.seeded(link)):
        observations = [handle.session.observation]
        turns: list[tuple[pb.Action, ...]] = [(), tuple(probe.choices(observations[0])[:1]), ()]
        plays.append((observations[0], await handle.play(turns)))
    for start, play in plays[1:]:
        mend = "draw only from streams that the seeds start; never from time, addresses or hash order"
        expect_same(plays[0][0], start, "the same start", mend)
        expect_played(plays[0][1], play, "the same episode again", mend)


@must("C-80", "The same version, seeds, options and actions give the same observations and rewards in another process.")
async def two_processes(probe: Probe) -> None:
    script = await probe.script()
    handle = await probe.seeded(await probe.other_process())
    mend = "draw only from streams that the seeds start; never from time, addresses or hash order"
    expect_same(script.start.observation, handle.session.observation, "the same start in another process", mend)
    expect_played(script.transitions, await handle.play(script.turns), "the same episode in another process", mend)


@must("C-81", "A Step that runs past its deadline is finished and cached: asking again returns its reply.")
async def past_deadline(probe: Probe) -> None:
    script = await probe.script()
    handle = await probe.seeded()
    got = []
    for number, turn in enumerate(script.turns):
        request = handle.request(turn)
        try:
            await probe.link.call("Step", request, seconds=(0.002, 0.02, 0.3)[number % 3])
        except grpc.aio.AioRpcError as error:
            fine = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            expect(fine, "DEADLINE_EXCEEDED of a Step past its deadline", from_error(error))
        got.append(await handle.step(turn))
        if got[-1].end_reason:
            break
    mend = "finish the work when the caller has gone, and cache the reply"
    expect_played(script.transitions, got, "the episode with Steps past their deadline", mend)


@must("C-82", "An Open with a key that runs past its deadline is finished: asking again returns its sessions.")
async def open_past_deadline(probe: Probe) -> None:
    request = probe.open_request(key=probe.key())
    ids = set()
    for seconds in (0.0005, 0.002, 0.02, None, None):
        try:
            reply: pb.OpenResponse = await probe.link.call("Open", request, seconds=seconds)
        except grpc.aio.AioRpcError as error:
            fine = seconds and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            expect(bool(fine), "DEADLINE_EXCEEDED or the sessions", from_error(error))
        else:
            probe.adopt(reply.sessions)
            ids.add(reply.sessions[0].session_id)
    expect(len(ids) == 1, "one session under one key, whatever the deadlines", len(ids))
