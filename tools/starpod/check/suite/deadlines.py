"""Calls past their deadline, and callers who leave."""

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
from starpod.check.probe import Probe
from starpod.check.refusal import from_error
from starpod.check.requirement import must

AT_ONCE = 0.0
"""The deadline of a caller who sends a call and leaves."""
LEAVERS = 4
"""Callers who leave before their Step is done, some early and some late, before the server is believed."""
SENT = 3
"""Turns of the event loop until a call is sent."""


@must(
    "C-81",
    "A Step past its deadline, or whose caller leaves, is finished and cached: asking again returns its reply.",
)
async def past_deadline(probe: Probe) -> None:
    script = probe.script()
    handle = await probe.seeded()
    usual = statistics.median([await _seconds(handle.step(turn)) for turn in script.turns])
    deadlines = itertools.cycle((0.5 * usual, 0.02, AT_ONCE, 0.3, 0.8 * usual))
    fix = "finish the work when the caller has gone, and cache the reply"
    left = 0
    for _ in range(3):
        handle = await probe.seeded()
        got = []
        for turn in script.turns:
            left += await _hurried(probe, handle.request(turn), next(deadlines)) is None
            got.append(await handle.step(turn))
        expect_played(script.transitions, got, "the episode with Steps past their deadline", fix)
        if left >= LEAVERS:
            return
    needs(left > 0, "no Step ran past its deadline")


@must(
    "C-82",
    "An Open with a key past its deadline, or whose caller leaves, is finished: asking again returns its sessions.",
)
async def open_past_deadline(probe: Probe) -> None:
    usual = statistics.median([await _seconds(probe.open()) for _ in range(3)])
    left = 0
    for deadline in (0.8 * usual, 0.5 * usual, AT_ONCE):
        request = probe.open_request(key=probe.key())
        hurried = [await _hurried(probe, request, deadline) for _ in range(2)]
        left += hurried.count(None)
        replies = [*filter(None, hurried), *[await probe.create(request) for _ in range(2)]]
        ids = {reply.sessions[0].session_id for reply in replies}
        expect(len(ids) == 1, "one session under one key, whatever the deadlines", len(ids))
    needs(left > 0, "no Open ran past its deadline")


async def _seconds(call: Awaitable[object]) -> float:
    start = time.monotonic()
    await call
    return time.monotonic() - start


async def _hurried(probe: Probe, request: Message, seconds: float) -> Any:
    """The reply; None where it did not come in time, so the caller left. gRPC's deadlines are whole milliseconds."""
    call = asyncio.ensure_future(probe.connection.call(request, seconds=seconds or None))
    for _ in range(0 if seconds else SENT):
        await asyncio.sleep(0)
    try:
        return await asyncio.wait_for(call, seconds)
    except TimeoutError:
        return None
    except grpc.aio.AioRpcError as error:
        fine = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        expect(fine, f"DEADLINE_EXCEEDED of {method_of(request)} past its deadline", from_error(error))
        return None
