"""Shows a run while it goes on: a live screen on a terminal, a plain log elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from rich.console import Console

from starpod.report.console import safe_console
from starpod.trainer.data.episode import Episode


class Screen(Protocol):
    """Told what happens; shows as much of it as fits. Close it, or use it in a `with` statement."""

    def start(self, title: str, plan: Mapping[str, Any]) -> None:
        """title: what is trained. plan: what was decided, by name: model, environments, algorithm, budget.

        A number under "budget_seconds" is the time the run may take; it becomes a progress bar.
        """

    def phase(self, name: str) -> None:
        """The present phase: "warm start", "collecting", "evaluating"."""

    def step(self, step: int, total: int | None, metrics: Mapping[str, float]) -> None:
        """A step is done. total: how many there will be; None where time decides."""

    def episode(self, episode: Episode) -> None:
        """One episode, finished or being played: its last turn is shown."""

    def evaluation(self, step: int, summary: Mapping[str, Any]) -> None:
        """A line of evaluations.jsonl."""

    def warn(self, text: str) -> None:
        """Something the user should know, in words. The same text again is not shown again."""

    def done(self, summary: Mapping[str, Any]) -> None:
        """The run is over; what came of it, by name."""

    def close(self) -> None:
        """Gives the terminal back. Harmless to repeat."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def make_screen(kind: Literal["auto", "live", "plain", "off"] = "auto", console: Console | None = None) -> Screen:
    """A screen on standard error, so that standard output stays free. auto: live where that is a terminal."""
    from starpod.trainer.output.live import LiveScreen  # both modules know `Screen`
    from starpod.trainer.output.plain import PlainScreen, SilentScreen

    console = console or safe_console(file=sys.stderr)
    if kind == "auto":
        kind = "live" if console.is_terminal and not console.is_dumb_terminal else "plain"
    match kind:
        case "live":
            return LiveScreen(console)
        case "plain":
            return PlainScreen(console.file)
        case _:
            return SilentScreen()
