"""Driver of sessions that counts steps and measures how long each takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from benchmarks.serving.lake import TASK, WALK, actions_of_episode


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of a run: number of steps in `seconds` of wall clock, and resources used. Random tasks count resets.

    p50, p99: seconds from the call of a step to its result. client_cpu, server_cpu: CPU seconds, 0 if not measured.
    wire: bytes over the loopback.
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
"""Function that steps all sessions for a number of seconds."""


def summarise(steps: int, seconds: float, waits: Sequence[float]) -> Measurement:
    """Return a measurement with the median and the 99th percentile of the latencies.

    Args:
        steps: number of steps of all sessions.
        seconds: duration of the measurement.
        waits: latencies in seconds; at least one.
    """
    p50, p99 = np.percentile(np.asarray(waits), (50, 99))
    return Measurement(steps, seconds, float(p50), float(p99))


class Player(Protocol):
    """Interface of a session."""

    async def step(self, action: str) -> tuple[float, bool]:
        """Play one action. Returns its reward and whether the episode has ended."""

    async def reset(self) -> None:
        """Start the next episode."""


async def drive(players: Sequence[Player], seconds: float) -> Measurement:
    """Step each session in its own coroutine, as fast as replies arrive. The first resets are not timed."""
    await asyncio.gather(*(player.reset() for player in players))
    waits: list[float] = []
    resets = 0
    start = perf_counter()
    end = start + seconds

    async def play(player: Player) -> None:
        nonlocal resets
        while True:
            for number, action in enumerate(actions_of_episode(), 1):
                before = perf_counter()
                reward, over = await player.step(action)
                after = perf_counter()
                waits.append(after - before)
                check(number, reward, over)
                if after >= end:
                    return
                if over:
                    break
            await player.reset()
            resets += TASK.random

    await asyncio.gather(*map(play, players))
    return summarise(len(waits) + resets, perf_counter() - start, waits)


def check(place: int, reward: float, over: bool) -> None:
    """Raise RuntimeError if a step of the walk has a wrong result, because speed counts only with correct results.

    Args:
        place: number of the step in the walk, from 1.
        reward: reward of the step; only the last step has 1.
        over: whether the episode ended.
    """
    if TASK.random:
        return
    is_last = TASK.ends and place == len(WALK)
    if over != is_last or reward != float(is_last):
        raise RuntimeError(f"step {place} of {len(WALK)} gave reward {reward}, over {over}")
