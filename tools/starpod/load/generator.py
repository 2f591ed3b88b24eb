"""A generator: one process's share of the stages of a run, and when each of its sessions steps."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable

from starpod.load.measurements import Interval, ServerTime, Summary
from starpod.load.plan import LoadPlan, Stage, arrivals
from starpod.load.players import Player, Players, cancel_all
from starpod.load.servers import clock

CONNECT_SECONDS = 10.0
REFUSED_SECONDS = 2.0
"""Seconds after which to give up connecting if every server has refused."""
DRAIN_SECONDS = 5.0
"""Seconds after the end of a stage in which calls that were due before its end may still be answered."""
TICK_SECONDS = 0.02
SETTLE_SECONDS = 0.005


class RunEnded(Exception):
    """The run cannot continue; the text says why."""


class StepSchedule:
    """The instants at which the sessions of one generator step in a stage.

    Attributes:
        waiting: instants at which steps were due that no session has begun yet.
    """

    def __init__(self, plan: LoadPlan, stage: Stage, process: int, start: float) -> None:
        self.waiting: deque[float] = deque()
        self._running = True
        self._stage = stage
        self._think = plan.think
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(f"{plan.seed}/{process}/think")
        self._idle: deque[asyncio.Future[float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        if stage.rate is not None:
            self._arrivals = arrivals(stage.arrivals, stage.rate, start, process, plan.processes, plan.seed)
            self._next_due = next(self._arrivals)
            self._timer = self._loop.call_at(self._next_due, self._arrive)

    async def begin(self, index: int, sessions: int) -> None:
        """Wait until the stage begins for one of its sessions."""
        gap = 0.0
        if self._stage.rate is None and not self._think:
            # Start the sessions one by one: real agents are not synchronised.
            gap = min(0.1, self._stage.warmup / 2) / sessions
        await asyncio.sleep(self._start + index * gap - clock())

    async def next_due(self) -> float:
        """Wait until a session may step, and return when the step was due."""
        if self._stage.rate is None and self._running:
            if self._think:
                await asyncio.sleep(self._think.draw(self._rng))
            if self._running:
                return clock()
        if self.waiting:
            return self.waiting.popleft()
        turn: asyncio.Future[float] = self._loop.create_future()
        self._idle.append(turn)
        return await turn

    def stop(self) -> None:
        """Make no more steps due. Sessions then begin only the steps in `waiting`."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()

    def _arrive(self) -> None:
        """Begin every step that is due, and schedule the next. A late step counts its delay as latency."""
        now = clock()
        while self._next_due <= now:
            if self._idle:
                self._idle.popleft().set_result(self._next_due)
            else:
                self.waiting.append(self._next_due)
            self._next_due = next(self._arrivals)
        self._timer = self._loop.call_at(self._next_due, self._arrive)


class Generator:
    """Plays one process's share of each stage, and passes each interval to `tell` when it ends.

    Args:
        stop: set by the parent to end a stage early, or by the players if the run cannot continue.
    """

    def __init__(self, plan: LoadPlan, process: int, tell: Callable[[Interval], None], stop: asyncio.Event) -> None:
        self.players = Players(plan, stop.set)
        self._plan = plan
        self._process = process
        self._tell = tell
        self._stop = stop
        self._stage = Stage("", 0, 0.0, 0.0)
        self._helpers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect to the servers. Raise RunEnded if none can be reached."""
        players, start = self.players, clock()
        for server in players.servers:
            server.start()  # connects, and reconnects by itself
        while not all(server.ready for server in players.servers):
            elapsed = clock() - start
            if elapsed > CONNECT_SECONDS or (
                elapsed > REFUSED_SECONDS and all(server.error for server in players.servers)
            ):
                break
            await asyncio.sleep(0.01)
        if not any(server.ready for server in players.servers):
            raise RunEnded(players.unreachable())
        self._helpers = [asyncio.create_task(self._tick()), asyncio.create_task(players.renew_leases())]

    async def prepare(self, stage: Stage) -> None:
        """Open the sessions that the stage still lacks. Raise RunEnded if there are none at all."""
        self._stage, players = stage, self.players
        share = range(self._process, stage.sessions, self._plan.processes)
        open_count = await players.open_all(share)
        if players.fatal or (share and not open_count):
            errors = [failures.example for failures in players.log.interval.errors.values()]
            raise RunEnded(players.fatal or f"no session could be opened: {(errors or ['no reply'])[0]}")

    async def run(self, start: float) -> Summary:
        """Play the stage from the instant `start`. End early if `stop` is set."""
        stage, players, log, stop = self._stage, self.players, self.players.log, self._stop
        first, last = start + stage.warmup, start + stage.warmup + stage.seconds
        log.due_from, log.due_until = first, last
        log.open_loop = stage.rate is not None
        share = len(range(self._process, stage.sessions, self._plan.processes))
        active = [player for player in players.all[:share] if player.session is not None]
        schedule = StepSchedule(self._plan, stage, self._process, start)
        players.begin_stage(continuous=stage.rate is None and self._plan.continuous)
        tasks = [asyncio.create_task(self._play(*place, len(active), schedule)) for place in enumerate(active)]
        server_time = ServerTime()
        number = 0
        try:
            await _until(first, stop)
            self._tell(log.take(-1))
            thread, process, wall = time.thread_time(), time.process_time(), clock()
            server_time.add(players.server_time(), -1)
            paths = players.paths()
            log.counting = True
            while not stop.is_set():
                end = min(first + (number + 1) * stage.interval, last)
                await _until(end, stop)
                if end >= last or stop.is_set():
                    break
                self._tell(log.take(number))
                number += 1
            log.counting = False
            server_time.add(players.server_time())
            paths = players.paths() - paths
            now = clock()
            thread, process = time.thread_time() - thread, time.process_time() - process
            log.due_until = min(last, now)
            self._tell(log.take(number))
            await self._drain(schedule)
            unanswered = players.in_flight
        finally:
            log.counting = False
            schedule.stop()
            players.end_stage()
            await cancel_all(tasks)
        self._tell(log.take(number))
        return Summary(
            seconds=max(now - wall, 0.0),
            thread=thread,
            process=process,
            sessions=len(active),
            unserved=len(schedule.waiting),
            unanswered=unanswered,
            server=server_time,
            paths=paths,
            ended=players.fatal,
        )

    async def close(self) -> Interval:
        """Close sessions and connections, and return the calls and errors that this took."""
        players = self.players
        players.close_sessions()
        await self._settle(clock() + DRAIN_SECONDS)
        await cancel_all(self._helpers)
        await asyncio.gather(*(server.close() for server in players.servers))
        return players.log.take(-1)

    async def _play(self, index: int, player: Player, sessions: int, schedule: StepSchedule) -> None:
        await schedule.begin(index, sessions)
        await player.play(schedule.next_due)

    async def _drain(self, schedule: StepSchedule) -> None:
        """Wait for calls in flight, and for steps that were due before the end unless the stage was interrupted."""
        schedule.stop()
        if self._stage.rate is None:
            self.players.end_stage()
        deadline = clock() + DRAIN_SECONDS
        while schedule.waiting and clock() < deadline and not self._stop.is_set():
            await asyncio.sleep(SETTLE_SECONDS)
        await self._settle(deadline)

    async def _settle(self, deadline: float) -> None:
        """Wait until no call is in flight or the instant is reached. Stop early if no server is connected."""
        while self.players.in_flight and clock() < deadline and any(server.ready for server in self.players.servers):
            await asyncio.sleep(SETTLE_SECONDS)

    async def _tick(self) -> None:
        """Watch the servers, and record how late timers fire: a late generator measures its own delay as latency."""
        wake_time = clock() + TICK_SECONDS
        while True:
            await asyncio.sleep(max(wake_time - clock(), 0))
            now = clock()
            if self.players.log.counting:
                self.players.log.interval.late.append(max(now - wake_time, 0.0))
            wake_time = max(wake_time + TICK_SECONDS, now)
            self.players.watch()


async def _until(instant: float, stop: asyncio.Event) -> None:
    """Wait until the instant or until `stop` is set."""
    try:
        async with asyncio.timeout(max(instant - clock(), 0)):
            await stop.wait()
    except TimeoutError:
        return
