"""Generator processes: how the parent leads them through the stages of a run, and when each session steps.

The parent sends orders through a pipe: ("prepare", Stage), ("go", instant), ("stop",), ("quit",). A process answers
with ("ready",), ("interval", Interval), ("finished", Summary), ("ended", why), ("closed", Interval, episodes).
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from starpod.load.measurements import Interval, ServerTime, StageResult, Summary
from starpod.load.plan import LoadPlan, Stage, arrivals
from starpod.load.servers import LoadSession, clock
from starpod.load.sessions import Sessions

CONNECT_SECONDS = 10.0
REFUSED_SECONDS = 2.0
"""Seconds after which to give up connecting if every server has refused."""
DRAIN_SECONDS = 5.0
"""Seconds after the end of a stage in which calls that were due before its end may still be answered."""
TICK_SECONDS = 0.02
NEVER = float("inf")
START_SECONDS = 0.05
"""Seconds between the order to go and the first call, so that all generators have read the order by then."""
POLL_SECONDS = 0.25
CLOSE_SECONDS = 15.0


class RunEnded(Exception):
    """The run cannot continue; the text says why."""


class Generator:
    """Plays one process's share of each stage, and passes each interval to `tell` when it ends."""

    def __init__(self, plan: LoadPlan, process: int, tell: Callable[[Interval], None]) -> None:
        self.sessions = Sessions(plan, process, self._ready)
        self._plan = plan
        self._process = process
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(f"{plan.seed}/{process}/think")
        self._stage = Stage("", 0, 0.0, 0.0)
        self._share = 0
        self._stage_number = 0  # lets timers of an earlier stage be recognised and ignored
        self._idle: deque[LoadSession] = deque()
        self._waiting: deque[float] = deque()
        self._arrivals: Iterator[float] = iter(())
        self._next_due = NEVER
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Connect to the servers. Raise RunEnded if none can be reached."""
        sessions, start = self.sessions, clock()
        sessions.connect()
        while not all(server.ready for server in sessions.servers):
            elapsed = clock() - start
            if elapsed > CONNECT_SECONDS or (
                elapsed > REFUSED_SECONDS and all(server.error for server in sessions.servers)
            ):
                break
            await asyncio.sleep(0.01)
        if not any(server.ready for server in sessions.servers):
            raise RunEnded(sessions.unreachable())

    async def prepare(self, stage: Stage) -> None:
        """Open the sessions that the stage still lacks. Raise RunEnded if there are none at all."""
        self._stage = stage
        share = range(self._process, stage.sessions, self._plan.processes)
        self._share = len(share)
        open_count = await self.sessions.open_all(share)
        if self.sessions.fatal or (share and not open_count):
            errors = [failures.example for failures in self.sessions.log.interval.errors.values()]
            raise RunEnded(self.sessions.fatal or f"no session could be opened: {(errors or ['no reply'])[0]}")

    async def run(self, start: float, stop: asyncio.Event) -> Summary:
        """Play the stage from the instant `start`. End early if `stop` is set or the run cannot continue."""
        stage, sessions, log = self._stage, self.sessions, self.sessions.log
        first, last = start + stage.warmup, start + stage.warmup + stage.seconds
        log.due_from, log.due_until = first, last
        log.open_loop = stage.rate is not None
        self._idle.clear()
        self._waiting.clear()
        self._stage_number += 1
        active_sessions = [session for session in sessions.all[: self._share] if session.server is not None]
        sessions.running = True
        sessions.continuous = stage.rate is None and self._plan.continuous
        server_time = ServerTime()
        self._loop.call_at(start, self._begin, start)
        helpers = [self._loop.create_task(self._tick(stop)), self._loop.create_task(sessions.renew_leases())]
        number = 0
        try:
            await _until(first, stop)
            self._tell(log.take(-1))
            thread, process, wall = time.thread_time(), time.process_time(), clock()
            server_time.add(sessions.server_time(), -1)
            paths = sessions.paths()
            log.counting = True
            while not stop.is_set():
                end = min(first + (number + 1) * stage.interval, last)
                await _until(end, stop)
                if end >= last or stop.is_set():
                    break
                self._tell(log.take(number))
                number += 1
            log.counting = False
            server_time.add(sessions.server_time())
            paths = sessions.paths() - paths
            now = clock()
            thread, process = time.thread_time() - thread, time.process_time() - process
            log.due_until = min(last, now)
            self._tell(log.take(number))
            unserved_steps = await self._drain(0.0 if stop.is_set() else DRAIN_SECONDS)
            self._tell(log.take(number))
        finally:
            sessions.running = log.counting = False
            self._next_due = NEVER
            for helper in helpers:
                helper.cancel()
        return Summary(
            seconds=max(now - wall, 0.0),
            thread=thread,
            process=process,
            sessions=len(active_sessions),
            unserved=unserved_steps,
            unanswered=sessions.in_flight,
            server=server_time,
            paths=paths,
            ended=sessions.fatal,
        )

    async def close(self) -> Interval:
        """Close sessions and connections, and return the calls and errors that this took."""
        sessions = self.sessions
        deadline = clock() + DRAIN_SECONDS
        await self._settle(deadline)  # a session with a call in flight, as after an interruption, cannot be closed
        for session in sessions.all:
            if session.server is not None and session.server.ready and not session.call:
                sessions.close(session)
        await self._settle(deadline)
        await asyncio.gather(*(server.close() for server in sessions.servers))
        return sessions.log.take(-1)

    async def _settle(self, until: float) -> None:
        """Wait until no call is in flight or the instant is reached. Stop early if no server is connected."""
        while self.sessions.in_flight and clock() < until and any(server.ready for server in self.sessions.servers):
            await asyncio.sleep(0.005)

    # --- when sessions act ------------------------------------------------------------------------------------------

    def _begin(self, start: float) -> None:
        stage = self._stage
        ready_sessions = [
            session for session in self.sessions.all[: self._share] if session.server is not None and not session.call
        ]
        if stage.rate is None:
            gap = min(0.1, stage.warmup / 2) / max(len(ready_sessions), 1)
            for index, session in enumerate(ready_sessions):
                # Start the sessions one by one: real agents are not synchronised.
                wait = self._plan.think.draw(self._rng) if self._plan.think else index * gap
                self._loop.call_later(wait, self._act, session, self._stage_number)
            return
        self._idle.extend(ready_sessions)
        self._arrivals = arrivals(
            stage.arrivals, stage.rate, start, self._process, self._plan.processes, self._plan.seed
        )
        self._next_due = next(self._arrivals)
        self._arrive()

    def _arrive(self) -> None:
        """Send every step that is due, and schedule the next. A late step counts its delay as latency."""
        now = clock()
        while self._next_due <= now:
            if self._idle:
                self._step(self._idle.popleft(), self._next_due)
            else:
                self._waiting.append(self._next_due)
            self._next_due = next(self._arrivals)
        if self._next_due < NEVER and self.sessions.running:
            self._timer = self._loop.call_at(self._next_due, self._arrive)

    def _ready(self, session: LoadSession) -> None:
        """Send the session's next call now, or when it is due."""
        if not self.sessions.running:
            return
        if self._stage.rate is not None:
            if self._waiting:
                self._step(session, self._waiting.popleft())
            else:
                self._idle.append(session)
        elif self._plan.think:
            self._loop.call_later(self._plan.think.draw(self._rng), self._act, session, self._stage_number)
        else:
            self.sessions.step(session, None)

    def _step(self, session: LoadSession, due: float) -> None:
        """Send a step of an open loop. Queue it again if the session must begin another episode first."""
        if session.server is None or not self.sessions.step(session, due):
            self._waiting.appendleft(due)

    def _act(self, session: LoadSession, stage_number: int) -> None:
        if stage_number == self._stage_number and self.sessions.running and session.server and not session.call:
            self.sessions.step(session, None)

    async def _drain(self, seconds: float) -> int:
        """Wait up to `seconds` for steps that were due before the end, and return how many of them were never sent."""
        sessions = self.sessions
        self._next_due = NEVER
        if self._timer is not None:
            self._timer.cancel()
        if self._stage.rate is None:
            sessions.running = False
        deadline = clock() + seconds
        while (sessions.in_flight or self._waiting) and clock() < deadline and not sessions.fatal:
            await asyncio.sleep(0.005)
        sessions.running = False
        unserved_steps = len(self._waiting)
        self._waiting.clear()
        return unserved_steps

    async def _tick(self, stop: asyncio.Event) -> None:
        """Watch the servers, and record how late timers fire: a late generator measures its own delay as latency."""
        wake_time = clock() + TICK_SECONDS
        while True:
            await asyncio.sleep(max(wake_time - clock(), 0))
            now = clock()
            if self.sessions.log.counting:
                self.sessions.log.interval.late.append(max(now - wake_time, 0.0))
            wake_time = max(wake_time + TICK_SECONDS, now)
            self.sessions.watch()
            if self.sessions.fatal:
                stop.set()


async def _until(instant: float, stop: asyncio.Event) -> None:
    """Wait until the instant or until `stop` is set."""
    try:
        async with asyncio.timeout(max(instant - clock(), 0)):
            await stop.wait()
    except TimeoutError:
        return


# --- the process ------------------------------------------------------------------------------------------------------


def generate(plan: LoadPlan, process: int, pipe: Connection[Any, Any]) -> None:
    """Run a generator process (its main function)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and sends an order to stop
    tune_garbage_collection()
    with asyncio.Runner(loop_factory=_make_loop) as runner:
        runner.run(_follow_orders(plan, process, pipe))
    # Skip the interpreter's shutdown, which would wait for gRPC's threads.
    pipe.close()
    os._exit(0)


def tune_garbage_collection() -> None:
    """Make garbage collections rare in a process that measures a server, and exempt all objects that exist now.

    A full collection takes milliseconds, which would be counted as latency of the server.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _make_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop over select(), whose timeouts have microsecond resolution.

    With epoll(), the resolution is 1 ms, so a step due in 0.2 ms would be sent after 1 ms. select() is limited to
    1,024 files, which is enough because the sessions of a server share a connection.
    """
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


async def _follow_orders(plan: LoadPlan, process: int, pipe: Connection[Any, Any]) -> None:
    def tell(interval: Interval) -> None:
        pipe.send(("interval", interval))

    orders: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
    stop = asyncio.Event()

    def listen() -> None:
        try:
            order = pipe.recv()
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone
        if order[0] == "stop":
            stop.set()
        else:
            orders.put_nowait(order)

    asyncio.get_running_loop().add_reader(pipe.fileno(), listen)
    generator = Generator(plan, process, tell)
    is_connected = False
    while True:
        order = await orders.get()
        try:
            match order:
                case "prepare", stage:
                    if not is_connected:
                        await _run_until(stop, generator.start())
                        is_connected = True
                    await _run_until(stop, generator.prepare(stage))
                    pipe.send(("ready",))
                case "go", instant:
                    pipe.send(("finished", await generator.run(instant, stop)))
                case ("quit",):
                    pipe.send(("closed", await generator.close(), generator.sessions.recorded))
                    return
        except RunEnded as error:
            tell(generator.sessions.log.take(-1))
            pipe.send(("ended", str(error)))


async def _run_until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end. If `stop` is set before the end, cancel `work` and raise RunEnded."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise RunEnded("interrupted")
        task.result()
    finally:
        task.cancel()
        stopping.cancel()


class RunFailed(Exception):
    """The run cannot begin, or a generator process died; the text says why."""


class GeneratorProcesses:
    """Context manager that runs the generator processes.

    Args:
        watch: called several times a second while a stage runs.

    Attributes:
        interrupted: True once Ctrl-C has ended a stage.
        recorded: the episodes played, if the plan says to record them; filled by `close`.
    """

    def __init__(self, plan: LoadPlan, watch: Callable[[StageResult], None]) -> None:
        self.interrupted = False
        self.recorded: list[dict[str, Any]] = []
        self._plan = plan
        self._watch = watch
        self._interrupt_requested = False
        self._previous_handler: Any = signal.SIG_DFL
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection[Any, Any]] = []

    def __enter__(self) -> GeneratorProcesses:
        context = multiprocessing.get_context("spawn")
        os.environ.setdefault("PYTHONSAFEPATH", "1")  # a queue.py of the working folder must not shadow the library's
        # Children inherit this, so that a Ctrl-C during their start does not end them.
        self._previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in range(self._plan.processes):
            pipe, child_pipe = context.Pipe()
            process = context.Process(target=generate, args=(self._plan, number, child_pipe), daemon=True)
            process.start()
            child_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, *_: object) -> None:
        if self._interrupt_requested:
            raise KeyboardInterrupt  # a second Ctrl-C ends the program at once
        self._interrupt_requested = True

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()

    def run(self, stage: Stage) -> StageResult:
        """Play a stage until its end or Ctrl-C. Raise RunFailed if it cannot begin."""
        result = StageResult(stage, time.time())
        self._tell_all("prepare", stage)
        answers = self._collect_answers("ready", result)
        if result.interrupted:
            self.interrupted = True
            return result
        if not any(answers) or result.ended:
            raise RunFailed(result.ended)
        result.start_time = time.time() + START_SECONDS
        self._tell_all("go", time.monotonic() + START_SECONDS)
        result.summaries = [answer[1] for answer in self._collect_answers("finished", result) if answer]
        result.ended = result.ended or next((s.ended for s in result.summaries if s.ended), "")
        self.interrupted = self.interrupted or result.interrupted
        return result

    def close(self, last: StageResult) -> None:
        """End the sessions. The calls and errors of closing count in the result of the last stage."""
        self._tell_all("quit")
        deadline = time.monotonic() + CLOSE_SECONDS
        for answer in self._collect_answers("closed", last, deadline):
            if answer:
                last.add(answer[1])
                self.recorded += answer[2]

    def _tell_all(self, *order: Any) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(order)
            except OSError:
                continue  # `_collect_answers` notices that the process is dead

    def _collect_answers(
        self, kind: str, result: StageResult, until: float = float("inf")
    ) -> list[tuple[Any, ...] | None]:
        """Return each process's answer of this kind, or None for one that has ended (see `result.ended`)."""
        answers: dict[int, tuple[Any, ...] | None] = {}
        while len(answers) < len(self._pipes) and time.monotonic() < until:
            if self._interrupt_requested and not result.interrupted and kind != "closed":
                result.interrupted = True
                self._tell_all("stop")
            for pipe in wait([pipe for number, pipe in enumerate(self._pipes) if number not in answers], POLL_SECONDS):
                assert isinstance(pipe, Connection)
                number = self._pipes.index(pipe)
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):
                    answers[number] = None
                    self._processes[number].join(1.0)
                    code = self._processes[number].exitcode
                    result.ended = result.ended or f"generator process {number} ended with status {code}"
                    continue
                match answer[0]:
                    case "interval":
                        result.add(answer[1])
                    case "ended":
                        answers[number] = None
                        result.ended = result.ended or ("" if result.interrupted else answer[1])
                    case _ if answer[0] == kind:
                        answers[number] = answer
            if kind != "closed":
                self._watch(result)
        return [answers.get(number) for number in range(len(self._pipes))]
