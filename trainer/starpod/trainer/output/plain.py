"""The screen where there is no terminal: lines that read well in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, Any, Self

from starpod.report.console import visible
from starpod.report.figures import duration, show
from starpod.trainer.data.episode import Episode
from starpod.trainer.output.words import is_graded, return_with_interval, with_interval

LINE = (
    ("success", "collect/success", "share"),
    ("return", "collect/return_mean", "number"),
    ("deviation", "collect/reward_std_in_group", "number"),
    ("entropy", "policy/entropy", "number"),
    ("grad", "update/grad_norm", "number"),
)
"""Metrics in the line of a step."""

SHARES = (
    ("generating", "time/generate_wait"),
    ("environments", "time/environment_wait"),
    ("updating", "time/update"),
)


class SilentScreen:
    """Shows nothing."""

    def start(self, title: str, plan: Mapping[str, Any]) -> None: ...

    def phase(self, name: str) -> None: ...

    def step(self, step: int, total: int | None, metrics: Mapping[str, float]) -> None: ...

    def episode(self, episode: Episode) -> None: ...

    def evaluation(self, step: int, summary: Mapping[str, Any]) -> None: ...

    def warn(self, text: str) -> None: ...

    def done(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class PlainScreen(SilentScreen):
    """One line per step, at most one a second; evaluations and warnings always. Episodes are in the run folder."""

    def __init__(self, file: IO[str], *, clock: Callable[[], float] = time.monotonic, interval: float = 1.0) -> None:
        self._file = file
        self._clock = clock
        self._interval = interval
        self._began = clock()
        self._spoke = float("-inf")
        self._withheld = ""
        self._phases: set[str] = set()
        self._warned: set[str] = set()

    def start(self, title: str, plan: Mapping[str, Any]) -> None:
        self._say(title)
        for name, value in plan.items():
            self._say(f"  {name.replace('_', ' ')}: {value}")

    def phase(self, name: str) -> None:
        # The phases of every step would drown the log: each is said when it comes for the first time.
        if name not in self._phases:
            self._phases.add(name)
            self._say(f"{self._stamp()} {name}")

    def step(self, step: int, total: int | None, metrics: Mapping[str, float]) -> None:
        line = f"{self._stamp()} {step_line(step, total, metrics)}"
        now = self._clock()
        if now - self._spoke < self._interval and step != total:
            self._withheld = line
            return
        self._spoke, self._withheld = now, ""
        self._say(line)

    def evaluation(self, step: int, summary: Mapping[str, Any]) -> None:
        self._flush()
        self._say(f"{self._stamp()} {evaluation_line(step, summary)}")

    def warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._say(f"{self._stamp()} warning: {text}")

    def done(self, summary: Mapping[str, Any]) -> None:
        self._flush()
        for name, value in summary.items():
            self._say(f"  {name.replace('_', ' ')}: {value}")

    def close(self) -> None:
        self._flush()

    def _flush(self) -> None:
        """Says the last line that came too soon: a log must end with the last step."""
        if self._withheld:
            self._say(self._withheld)
            self._withheld = ""

    def _stamp(self) -> str:
        return f"[{duration(self._clock() - self._began)}]"

    def _say(self, line: str) -> None:
        print(visible(line), file=self._file, flush=True)


def step_line(step: int, total: int | None, metrics: Mapping[str, float]) -> str:
    """step 12/200 · success 41 % · return 0.32 · ... · 2.1 s (generating 61 %, environments 12 %, updating 24 %)"""
    parts = [f"step {step}" + (f"/{total}" if total else "")]
    parts += [f"{label} {show(metrics[name], kind)}" for label, name, kind in LINE if name in metrics]  # type: ignore[arg-type]
    seconds = metrics.get("time/step")
    if seconds:
        shares = [f"{label} {100 * metrics[name] / seconds:.0f} %" for label, name in SHARES if name in metrics]
        parts.append(f"{seconds:.2g} s" + (f" ({', '.join(shares)})" if shares else ""))
    return " · ".join(parts)


def evaluation_line(step: int, summary: Mapping[str, Any]) -> str:
    """evaluation at step 50: success 72 % (66 to 77 %) of 256 episodes; greedy 75 %; beside random 13 %

    Where the return tells more than that, it follows each success.
    """
    reference = summary.get("reference") or {}
    graded = any(map(is_graded, (summary, *reference.values())))
    line = f"evaluation at step {step}: success {with_interval(summary)}"
    if summary.get("episodes"):
        line += f" of {summary['episodes']} episodes"
    if graded:
        line += f", return {return_with_interval(summary)}"
    if summary.get("greedy"):
        line += f"; greedy {_short(summary['greedy'], graded)}"
    if reference:
        line += "; beside " + ", ".join(f"{name} {_short(summary, graded)}" for name, summary in reference.items())
    return line


def _short(summary: Mapping[str, Any], graded: bool) -> str:
    """75 %, or 75 % (0.91)."""
    text = show(summary.get("success"), "share")
    return f"{text} ({show(summary.get('return_mean'))})" if graded else text
