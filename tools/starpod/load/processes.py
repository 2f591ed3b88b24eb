"""Generator processes: started, led through the stages of a run, and asked what they saw."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from starpod.load.generator import generate
from starpod.load.measurements import StageResult
from starpod.load.plan import Plan, Stage

START_SECONDS = 0.05
"""Between the order to go and the first call: all generators are listening by then."""
LOOK_SECONDS = 0.25
CLOSE_SECONDS = 15.0


class RunFailed(Exception):
    """The run cannot begin, or a generator process died; the text says why."""


Watcher = Callable[[StageResult], None]
"""Called several times a second while a stage runs."""


class GeneratorProcesses:
    """Starts the processes on entering, ends them on leaving."""

    def __init__(self, plan: Plan, watch: Watcher) -> None:
        self.interrupted = False
        self._asked = False
        self._before: Any = signal.SIG_DFL
        self.recorded: list[dict[str, Any]] = []
        self._plan = plan
        self._watch = watch
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection[Any, Any]] = []

    def __enter__(self) -> GeneratorProcesses:
        context = multiprocessing.get_context("spawn")
        # Inherited, so that a Ctrl-C before a child is up does not end it.
        self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in range(self._plan.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=generate, args=(self._plan, number, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        signal.signal(signal.SIGINT, self._interrupt)
        return self

    def _interrupt(self, *_: object) -> None:
        if self._asked:
            raise KeyboardInterrupt  # twice: at once
        self._asked = True

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()

    def run(self, stage: Stage) -> StageResult:
        """Plays a stage to its end, or until Ctrl-C. Raises RunFailed if it cannot begin."""
        result = StageResult(stage, time.time())
        self._tell_all("prepare", stage)
        ready = self._answers("ready", result)
        if result.interrupted:
            self.interrupted = True
            return result
        if not any(ready) or result.ended:
            raise RunFailed(result.ended)
        result.started = time.time() + START_SECONDS
        self._tell_all("go", time.monotonic() + START_SECONDS)
        result.summaries = [answer[1] for answer in self._answers("finished", result) if answer]
        result.ended = result.ended or next((s.ended for s in result.summaries if s.ended), "")
        self.interrupted = self.interrupted or result.interrupted
        return result

    def close(self, last: StageResult) -> None:
        """Ends the sessions; what that took belongs to the last stage."""
        self._tell_all("quit")
        until = time.monotonic() + CLOSE_SECONDS
        for answer in self._answers("closed", last, until):
            if answer:
                last.add(answer[1])
                self.recorded += answer[2]

    def _tell_all(self, *order: Any) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(order)
            except OSError:
                continue  # its death is noticed where answers are awaited

    def _answers(self, kind: str, result: StageResult, until: float = float("inf")) -> list[tuple[Any, ...] | None]:
        """The answer of each process; None of one that has ended, which is noted in the result."""
        answers: dict[int, tuple[Any, ...] | None] = {}
        while len(answers) < len(self._pipes) and time.monotonic() < until:
            if self._asked and not result.interrupted and kind != "closed":
                result.interrupted = True
                self._tell_all("stop")
            for pipe in wait([pipe for number, pipe in enumerate(self._pipes) if number not in answers], LOOK_SECONDS):
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
