"""Determinism: concurrent sessions, and the same episode over other connections and in other processes."""

from __future__ import annotations

import asyncio

from starpod.check.expectations import expect_played, expect_same
from starpod.check.probe import SAME, SEED, Probe
from starpod.check.requirement import must


@must("C-78", "Sessions that run at the same time do not affect each other.")
async def check_isolation(probe: Probe) -> None:
    script = probe.target.script()
    connections = [probe.connection, probe.second_connection()]
    same_handles = [await probe.seeded(connections[number % 2]) for number in range(4)]
    other_handles = [await probe.seeded(connections[number % 2], seed=SEED + 1 + number) for number in range(4)]
    plays = await asyncio.gather(*(handle.play(script.turns) for handle in (*same_handles, *other_handles)))
    for play in plays[:4]:
        expect_played(script.transitions, play, "the episode beside others", "share nothing between sessions")


@must(
    "C-79",
    "Equal version, seeds, options and actions give equal observations and rewards over another connection.",
)
async def check_two_connections(probe: Probe) -> None:
    if probe.target.difference is not None:
        raise probe.target.difference
    script, second_connection = probe.target.script(), probe.second_connection()
    for connection in (second_connection, probe.connection):
        handle = await probe.seeded(connection)
        expect_same(script.start.observation, handle.session.observation, "the same start", SAME)
        await probe.expect_script(handle, "the same episode again", SAME)


@must("C-80", "Equal version, seeds, options and actions give equal observations and rewards in another process.")
async def check_two_processes(probe: Probe) -> None:
    script = probe.target.script()
    handle = await probe.seeded(await probe.other_process())
    expect_same(script.start.observation, handle.session.observation, "the same start in another process", SAME)
    await probe.expect_script(handle, "the same episode in another process", SAME)
