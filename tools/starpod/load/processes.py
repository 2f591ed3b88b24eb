"""Generator processes, which the parent leads through the stages of a run.

The parent sends orders through a pipe: ("prepare", Stage), ("go", instant), ("stop",), ("quit",). A process answers
with ("ready",), ("interval", Interval), ("finished", Summary), ("ended", why), ("closed", Interval, episodes).
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import selectors
import signal
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from starpod.load.generator import Generator, RunEnded
from starpod.load.measurements import Interval, StageResult
from starpod.load.plan import LoadPlan, Stage

START_SECONDS = 0.05
"""Seconds between the order to go and the first call, so that all generators have read the order by then."""
POLL_SECONDS = 0.25
CLOSE_SECONDS = 15.0


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
    generator = Generator(plan, process, tell, stop)
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
                    pipe.send(("finished", await generator.run(instant)))
                case ("quit",):
                    pipe.send(("closed", await generator.close(), generator.players.recorded))
                    return
        except RunEnded as error:
            tell(generator.players.log.take(-1))
            pipe.send(("ended", generator.players.fatal or str(error)))


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
