"""Calls past their deadline, and callers who leave before the reply."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable
from typing import Any

import grpc
from google.protobuf.message import Message

from starpod.check.connection import method_of
from starpod.check.expectations import expect, expect_played, needs
from starpod.check.probe import Probe, new_key
from starpod.check.refusal import from_error
from starpod.check.requirement import must

IMMEDIATELY = 0.0
"""Deadline in seconds of a caller who leaves as soon as the call is sent."""
MIN_ABANDONED = 4
"""Number of Steps that must be abandoned before their reply, some early and some late, for the test to count."""
LOOP_TURNS = 3
"""Number of event-loop iterations after which a call has certainly been sent."""


@must(
    "C-81",
    "A Step past its deadline, or whose caller leaves, is finished and cached: asking again returns its reply.",
)
async def check_past_deadline(probe: Probe) -> None:
    script = probe.target.script()
    handle = await probe.seeded()
    median = statistics.median([await _seconds(handle.step(turn)) for turn in script.turns])
    deadlines = itertools.cycle((0.5 * median, 0.02, IMMEDIATELY, 0.3, 0.8 * median))
    fix = "finish the work when the caller has gone, and cache the reply"
    abandoned_count = 0
    for _ in range(3):
        handle = await probe.seeded()
        transitions = []
        for turn in script.turns:
            abandoned_count += await _call_with_deadline(probe, handle.request(turn), next(deadlines)) is None
            transitions.append(await handle.step(turn))
        expect_played(script.transitions, transitions, "the episode with Steps past their deadline", fix)
        if abandoned_count >= MIN_ABANDONED:
            return
    needs(abandoned_count > 0, "no Step ran past its deadline")


@must(
    "C-82",
    "An Open with a key past its deadline, or whose caller leaves, is finished: asking again returns its sessions.",
)
async def check_open_past_deadline(probe: Probe) -> None:
    median = statistics.median([await _seconds(probe.open()) for _ in range(3)])
    abandoned_count = 0
    for deadline in (0.8 * median, 0.5 * median, IMMEDIATELY):
        request = probe.open_request(key=new_key())
        first_replies = [await _call_with_deadline(probe, request, deadline) for _ in range(2)]
        abandoned_count += first_replies.count(None)
        replies = [*filter(None, first_replies), *[await probe.create(request) for _ in range(2)]]
        ids = {reply.sessions[0].session_id for reply in replies}
        expect(len(ids) == 1, "one session under one key, whatever the deadlines", len(ids))
    needs(abandoned_count > 0, "no Open ran past its deadline")


async def _seconds(call: Awaitable[object]) -> float:
    start = time.monotonic()
    await call
    return time.monotonic() - start


async def _call_with_deadline(probe: Probe, request: Message, seconds: float) -> Any:
    """Return the reply, or None if it is late and the caller leaves. gRPC's deadlines are whole milliseconds."""
    call = asyncio.ensure_future(probe.connection.call(request, seconds=seconds or None))
    for _ in range(0 if seconds else LOOP_TURNS):
        await asyncio.sleep(0)
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError:
        return None
    except grpc.aio.AioRpcError as error:
        timed_out = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        expect(timed_out, f"DEADLINE_EXCEEDED of {method_of(request)} past its deadline", from_error(error))
        return None
