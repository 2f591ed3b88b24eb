"""One generator process: when its players act, and what it hands over at the end of each interval."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from starpod.load.crew import Crew
from starpod.load.link import Player, clock
from starpod.load.log import Interval, ServerTime
from starpod.load.plan import Plan, Stage
from starpod.load.schedule import arrivals

CONNECT_SECONDS = 10.0
FIRST_SECONDS = 2.0
"""If every server has refused by then, more patience does not help."""
DRAIN_SECONDS = 5.0
"""Calls that were due in time are waited for, so long."""
BEAT_SECONDS = 0.02
NEVER = float("inf")


class Doomed(Exception):
    """The run cannot go on; the text says why."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A generator's own figures of a stage.

    seconds: how long it measured. thread, process: seconds of CPU that its event loop and all its threads used.
    unserved: steps that were due and never sent. unanswered: calls without a reply at the end.
    ended: why it ended early; empty where it did not.
    """

    seconds: float
    thread: float
    process: float
    sessions: int
    unserved: int
    unanswered: int
    server: ServerTime
    ended: str


class Generator:
    """Plays its share of each stage. tell: takes each interval as it ends."""

    def __init__(self, plan: Plan, process: int, tell: Callable[[Interval], None]) -> None:
        self.crew = Crew(plan, process, self._free)
        self._plan = plan
        self._process = process
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(f"{plan.seed}/{process}/think")
        self._stage = Stage("", 0, 0.0, 0.0)
        self._round = 0  # tells timers of an earlier stage from those of this one
        self._active: list[Player] = []
        self._idle: deque[Player] = deque()
        self._waiting: deque[float] = deque()
        self._arrivals: Iterator[float] = iter(())
        self._next_due = NEVER
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Connects to the servers. Raises Doomed if none can be reached."""
        crew, began = self.crew, clock()
        crew.connect()
        while not all(link.ready for link in crew.links):
            waited = clock() - began
            if waited > CONNECT_SECONDS or (waited > FIRST_SECONDS and all(link.error for link in crew.links)):
                break
            await asyncio.sleep(0.01)
        if not any(link.ready for link in crew.links):
            raise Doomed(crew.nobody())

    async def prepare(self, stage: Stage) -> None:
        """Opens the sessions that are still missing for the stage. Raises Doomed if there is none at all."""
        self._stage = stage
        share = range(self._process, stage.sessions, self._plan.processes)
        self._active = await self.crew.fill(share)
        if self.crew.doom or (share and not self._active):
            errors = [failures.example for failures in self.crew.log.errors.values()]
            raise Doomed(self.crew.doom or f"no session could be opened: {(errors or ['no reply'])[0]}")

    async def run(self, start: float, stop: asyncio.Event) -> Summary:
        """Plays the stage from the instant `start`; ends early once `stop` is set or nothing can go on."""
        stage, crew, log = self._stage, self.crew, self.crew.log
        first, last = start + stage.warmup, start + stage.warmup + stage.seconds
        log.due_from, log.due_until, log.server = first, last, ServerTime()
        log.both = stage.rate is not None
        self._idle.clear()
        self._waiting.clear()
        self._round += 1
        crew.running = True
        self._loop.call_at(start, self._begin, start)
        helpers = [self._loop.create_task(self._beat(stop)), self._loop.create_task(crew.renew_leases())]
        place = 0
        try:
            await _until(first, stop)
            self._tell(log.take(-1))
            thread, process, began = time.thread_time(), time.process_time(), clock()
            log.counting = True
            while not stop.is_set():
                end = min(first + (place + 1) * stage.interval, last)
                await _until(end, stop)
                if end >= last or stop.is_set():
                    break
                self._tell(log.take(place))
                place += 1
            log.counting = False
            now = clock()
            thread, process = time.thread_time() - thread, time.process_time() - process
            log.due_until = min(last, now)
            self._tell(log.take(place))
            unserved = await self._drain(0.0 if stop.is_set() else DRAIN_SECONDS)
            self._tell(log.take(place))
        finally:
            crew.running = log.counting = False
            self._next_due = NEVER
            for helper in helpers:
                helper.cancel()
        return Summary(
            max(now - began, 0.0), thread, process, len(self._active), unserved, crew.in_flight, log.server, crew.doom
        )

    async def close(self) -> Interval:
        """Closes sessions and connections; returns what that took."""
        crew = self.crew
        until = clock() + DRAIN_SECONDS
        await self._settle(until)  # a session whose call is under way, as after an interruption, cannot be closed
        for player in crew.players:
            if player.link is not None and player.link.ready and not player.call:
                crew.close(player)
        await self._settle(until)
        await asyncio.gather(*(link.close() for link in crew.links))
        return crew.log.take(-1)

    async def _settle(self, until: float) -> None:
        """Waits for calls in flight, up to an instant, while they can come back."""
        while self.crew.in_flight and clock() < until and any(link.ready for link in self.crew.links):
            await asyncio.sleep(0.005)

    # --- when players act ------------------------------------------------------------------------------------------

    def _begin(self, start: float) -> None:
        stage = self._stage
        ready = [player for player in self._active if player.link is not None and not player.call]
        if stage.rate is None:
            spread = min(0.1, stage.warmup / 2) / max(len(ready), 1)
            for place, player in enumerate(ready):
                # Not all at once: agents have no common beat.
                wait = self._plan.think.draw(self._rng) if self._plan.think else place * spread
                self._loop.call_later(wait, self._act, player, self._round)
            return
        self._idle.extend(ready)
        self._arrivals = arrivals(
            stage.arrivals, stage.rate, start, self._process, self._plan.processes, self._plan.seed
        )
        self._next_due = next(self._arrivals)
        self._arrive()

    def _arrive(self) -> None:
        """Hands out every step that is due, and comes back for the next. Due times are never moved, only late."""
        now = clock()
        while self._next_due <= now:
            if self._idle:
                self._step(self._idle.popleft(), self._next_due)
            else:
                self._waiting.append(self._next_due)
            self._next_due = next(self._arrivals)
        if self._next_due < NEVER and self.crew.running:
            self._timer = self._loop.call_at(self._next_due, self._arrive)

    def _free(self, player: Player) -> None:
        """The player may make its next call."""
        if not self.crew.running:
            return
        if self._stage.rate is not None:
            if self._waiting:
                self._step(player, self._waiting.popleft())
            else:
                self._idle.append(player)
        elif self._plan.think:
            self._loop.call_later(self._plan.think.draw(self._rng), self._act, player, self._round)
        else:
            self.crew.step(player, None)

    def _step(self, player: Player, due: float) -> None:
        """A step of an open loop. It goes back to the queue where the player must first begin another episode."""
        if player.link is None or not self.crew.step(player, due):
            self._waiting.appendleft(due)

    def _act(self, player: Player, round_: int) -> None:
        if round_ == self._round and self.crew.running and player.link is not None and not player.call:
            self.crew.step(player, None)

    async def _drain(self, seconds: float) -> int:
        """Waits for what was due in time; returns how many steps were never sent."""
        crew = self.crew
        self._next_due = NEVER
        if self._timer is not None:
            self._timer.cancel()
        if self._stage.rate is None:
            crew.running = False
        until = clock() + seconds
        while (crew.in_flight or self._waiting) and clock() < until and not crew.doom:
            await asyncio.sleep(0.005)
        crew.running = False
        unserved = len(self._waiting)
        self._waiting.clear()
        return unserved

    async def _beat(self, stop: asyncio.Event) -> None:
        """Notes how late timers fire, because a generator that is late measures itself; looks after the servers."""
        due = clock() + BEAT_SECONDS
        while True:
            await asyncio.sleep(max(due - clock(), 0))
            now = clock()
            if self.crew.log.counting:
                self.crew.log.late.append(max(now - due, 0.0))
            due = max(due + BEAT_SECONDS, now)
            self.crew.watch()
            if self.crew.doom:
                stop.set()


async def _until(instant: float, stop: asyncio.Event) -> None:
    """Waits until the instant, or until `stop` is set."""
    try:
        async with asyncio.timeout(max(instant - clock(), 0)):
            await stop.wait()
    except TimeoutError:
        return
