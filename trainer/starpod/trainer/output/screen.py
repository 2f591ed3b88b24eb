"""Display of a run's progress as a log."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Self

from starpod.report.console import visible
from starpod.report.figures import Kind, duration, show
from starpod.trainer.data.metric_names import TASKS
from starpod.trainer.output.words import (
    WITHDRAWN,
    by_task,
    format_success,
    is_graded,
    outcome,
    return_with_interval,
)

LINE: tuple[tuple[str, str, Kind], ...] = (
    ("success", "collect/success", "share"),
    ("first attempts", "collect/first_attempt_success", "share"),
    ("repeated", "collect/attempts_identical", "share"),
    ("return", "collect/return_mean", "number"),
    ("deviation", "collect/reward_std_in_group", "number"),
    ("entropy", "policy/entropy", "number"),
    ("grad", "update/grad_norm", "number"),
)
"""Metrics in the line of a step, as (label, metric, kind)."""

PAUSE = 20.0
"""Seconds without a line after which a log shows the progress of the current phase."""
STEP_SECONDS = 1.0
"""Minimum time between the lines of two steps."""

SHARES = (
    ("generating", "time/generate_wait"),
    ("environments", "time/environment_wait"),
    ("updating", "time/update"),
)


class Screen:
    """Interface of screens, and a screen that shows nothing. Close it, or use it in a `with` statement.

    Attributes:
        doing: The current phase, which the live site shows as well.
        at: The step that has begun, to which warnings belong.
    """

    doing = ""
    at = 0

    def start(self, title: str, plan: Mapping[str, Any]) -> None:
        """Show the start of a run.

        Args:
            plan: The main settings by name: model, environments, algorithm, budget. "budget_seconds" is a number, the
                time limit, and becomes a progress bar. "live" is the address of the run's pages, shown in full on its
                own line.
        """

    def phase(self, name: str) -> None:
        """Show the current phase: "warm start", "collecting", "evaluating"."""
        self.doing = name

    def progress(self, text: str) -> None:
        """Show how far the current phase is. A log shows the latest text after PAUSE seconds without a line."""
        self.doing = text

    def counter(self, what: str, total: int) -> Callable[[object], None]:
        """Return a function that shows one more of `total` episodes at each call."""
        numbers = itertools.count()

        def show_next(_: object) -> None:
            self.progress(f"{what}: {next(numbers):,} of {total:,}")

        show_next(None)
        return show_next

    def step(self, step: int, total: int | None, metrics: Mapping[str, float]) -> None:
        """Show a finished step.

        Args:
            step: Number of the step, from 1.
            total: Number of steps of the run; None if a time limit decides.
        """

    def evaluation(self, step: int, summary: Mapping[str, Any]) -> None:
        """Show an evaluation, given as a line of evaluations.jsonl."""

    def warn(self, text: str) -> None:
        """Show a warning. The same text is only shown once."""

    def log(self, text: str) -> None:
        """Show an event, such as the loss of a server."""

    def done(self, summary: Mapping[str, Any]) -> None:
        """Show the results of a run that is over, by name."""

    def close(self) -> None:
        """Restore the terminal. May be called repeatedly."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlainScreen(Screen):
    """Log with a line per step (at most one per second), evaluation and warning."""

    def __init__(self, file: IO[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._start_time = clock()
        self._last_line_time = float("-inf")
        self._withheld = ""
        self._last_text_time = self._start_time
        self._progress = ""
        self._phases: set[str] = set()
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self._closing = threading.Event()

    def start(self, title: str, plan: Mapping[str, Any]) -> None:
        threading.Thread(target=self._tick, name="starpod-log", daemon=True).start()
        self._say(title)
        for name, value in plan.items():
            self._say(f"  {name.replace('_', ' ')}: {value}")

    def progress(self, text: str) -> None:
        super().progress(text)
        self._progress = text
        self.show_progress()

    def show_progress(self) -> None:
        """Log the latest progress that was not logged, after PAUSE seconds without a line."""
        with self._lock:
            if self._progress and self._clock() - self._last_text_time >= PAUSE:
                self._say(f"{self._stamp()} {self._progress}")
                self._progress = ""

    def phase(self, name: str) -> None:
        super().phase(name)
        self._progress = ""
        # Log each phase only once, because phases repeat in every step.
        if name not in self._phases:
            self._phases.add(name)
            self._say(f"{self._stamp()} {name}")

    def step(self, step: int, total: int | None, metrics: Mapping[str, float]) -> None:
        line = f"{self._stamp()} {step_line(step, total, metrics)}"
        now = self._clock()
        if now - self._last_line_time < STEP_SECONDS and step != total:
            self._withheld = line
            return
        self._last_line_time, self._withheld = now, ""
        self._say(line)

    def evaluation(self, step: int, summary: Mapping[str, Any]) -> None:
        self._flush()
        self._say(f"{self._stamp()} {evaluation_line(step, summary)}")

    def warn(self, text: str) -> None:
        if text.startswith(WITHDRAWN):
            self._say(f"{self._stamp()} {text}")
        elif text not in self._warned:
            self._warned.add(text)
            self._say(f"{self._stamp()} warning: {text}")

    def log(self, text: str) -> None:
        self._say(f"{self._stamp()} {text}")

    def done(self, summary: Mapping[str, Any]) -> None:
        self._flush()
        for name, value in summary.items():
            self._say(f"  {name.replace('_', ' ')}: {value}")

    def close(self) -> None:
        self._closing.set()
        self._flush()

    def _tick(self) -> None:
        """Log progress periodically, because a slow environment may end no episode for minutes."""
        while not self._closing.wait(1.0):
            self.show_progress()

    def _flush(self) -> None:
        """Print the last line that the rate limit held back, so that a log ends with the last step."""
        if self._withheld:
            self._say(self._withheld)
            self._withheld = ""

    def _stamp(self) -> str:
        return f"[{duration(self._clock() - self._start_time)}]"

    def _say(self, line: str) -> None:
        with self._lock:
            self._last_text_time = self._clock()
            self._write(visible(line))

    def _write(self, line: str) -> None:
        print(line, file=self._file, flush=True)


@contextmanager
def client_events(screen: Screen) -> Iterator[None]:
    """Show what the client logs, such as servers that are lost and come back, on the screen during the context."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: screen.log(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("starpod.client")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def step_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """Return the line of a step. Metrics that are missing are left out.

    Example: step 12/200 · success 41 % · return 0.32 · ... · 2.1 s (generating 61 %, environments 12 %, updating 24 %)

    Args:
        step: Number of the step, from 1.
        total: Number of steps of the run; None if a time limit decides.
    """
    parts = [f"step {step}" + (f"/{total}" if total else "")]
    parts += [f"{label} {show(metrics[name], kind)}" for label, name, kind in LINE if name in metrics]
    task_names = [name for name in metrics if name.startswith(f"{TASKS}/") and name.endswith("/success")]
    if task_names:
        task_texts = ", ".join(f"{name.split('/')[1]} {show(metrics[name], 'share')}" for name in sorted(task_names))
        parts[1] += f" ({task_texts})"
    seconds = metrics.get("time/step")
    if seconds:
        shares = [f"{label} {100 * metrics[name] / seconds:.0f} %" for label, name in SHARES if name in metrics]
        parts.append(f"{seconds:.2g} s" + (f" ({', '.join(shares)})" if shares else ""))
    return " · ".join(parts)


def evaluation_line(step: int, summary: Mapping[str, Any]) -> str:
    """Return the line of an evaluation.

    Example: evaluation at step 50 on selection seeds: success 72 % (66 to 77 %) of 256 episodes; beside random 13 %

    If mean returns differ from success rates, each success rate is followed by the mean return.
    """
    reference = summary.get("reference") or {}
    graded = any(map(is_graded, (summary, *reference.values())))
    line = f"evaluation at step {step} on selection seeds: {outcome(summary)}"
    if summary.get("episodes"):
        line += f" of {summary['episodes']} episodes"
    if graded and summary.get("success") is not None:
        line += f", return {return_with_interval(summary)}"
    line += by_task(summary)
    if reference:
        line += "; beside " + ", ".join(
            f"{name} {format_success(summary, graded)}" for name, summary in reference.items()
        )
    return line
