"""Drives sessions for a while and counts steps and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from benchmarks.serving.lake import TASK, WALK


@dataclass(frozen=True, slots=True)
class Measurement:
    """steps: how many in `seconds` of wall clock. p50, p99: seconds from the call of a step to its result.

    client_cpu, server_cpu: seconds of CPU time, where a server there is. wire: bytes over the loopback.
    """

    steps: int
    seconds: float
    p50: float
    p99: float
    client_cpu: float = 0.0
    server_cpu: float = 0.0
    wire: int = 0

    @property
    def rate(self) -> float:
        return self.steps / self.seconds


Run = Callable[[float], Awaitable[Measurement]]
"""Steps all sessions for that many seconds."""


def summarise(steps: int, seconds: float, waits: Sequence[float]) -> Measurement:
    p50, p99 = np.percentile(np.asarray(waits), (50, 99))
    return Measurement(steps, seconds, float(p50), float(p99))


class Player(Protocol):
    """One session."""

    async def step(self, action: str) -> tuple[float, bool]:
        """Plays one action. Returns its reward and whether the episode is over."""

    async def reset(self) -> None:
        """Starts the next episode."""


async def drive(players: Sequence[Player], seconds: float) -> Measurement:
    """One coroutine per session, each stepping as fast as it gets answers. The first resets are not timed."""
    await asyncio.gather(*(player.reset() for player in players))
    waits: list[float] = []
    start = perf_counter()
    end = start + seconds

    async def play(player: Player) -> None:
        while True:
            for place, action in enumerate(WALK, 1):
                before = perf_counter()
                reward, over = await player.step(action)
                after = perf_counter()
                waits.append(after - before)
                check(place, reward, over)
                if after >= end:
                    return
            await player.reset()

    await asyncio.gather(*map(play, players))
    return summarise(len(waits), perf_counter() - start, waits)


def check(place: int, reward: float, over: bool) -> None:
    """Raises RuntimeError if the walk did not go as it must: a fast wrong answer is worth nothing."""
    last = TASK.ends and place == len(WALK)
    if over != last or reward != float(last):
        raise RuntimeError(f"step {place} of {len(WALK)} gave reward {reward}, over {over}")
