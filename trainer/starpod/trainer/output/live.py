"""The log on a terminal, above a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from starpod.report.console import safe_console
from starpod.report.figures import duration
from starpod.trainer.output.screen import PlainScreen, Screen


def make_screen(kind: Literal["auto", "live", "plain", "off"] = "auto", console: Console | None = None) -> Screen:
    """Return a screen on standard error, so that standard output stays free. auto: live on a terminal, else plain."""
    console = console or safe_console(file=sys.stderr)
    if kind == "auto":
        kind = "live" if console.is_terminal and not console.is_dumb_terminal else "plain"
    match kind:
        case "live":
            return LiveScreen(console)
        case "plain":
            return PlainScreen(console.file)
        case _:
            return Screen()


class LiveScreen(PlainScreen):
    """Log above a progress bar with the current phase, which is erased when the screen closes."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console.file, clock=clock)
        self._console = console
        self._step = 0
        self._total: int | None = None
        self._budget: float | None = None
        # Redirect other output so that it does not break the bar. Output to a file or pipe stays as it is.
        tty = sys.stdout.isatty()
        self._live = Live(
            console=console, get_renderable=self._bar, transient=True, refresh_per_second=1, redirect_stdout=tty
        )

    def start(self, title: str, plan: Mapping[str, Any]) -> None:
        self._budget = plan.get("budget_seconds")
        super().start(title, plan)
        self._live.start()

    def show_progress(self) -> None:
        """Log nothing: the bar shows the progress of the current phase."""

    def step(self, step: int, total: int | None, metrics: Mapping[str, float]) -> None:
        self._step, self._total = step, total
        super().step(step, total, metrics)

    def close(self) -> None:
        super().close()
        self._live.stop()

    def _bar(self) -> Table:
        """Return the bar. The completed share is the larger one of steps and of time."""
        seconds = self._clock() - self._start_time
        shares = (self._step / self._total if self._total else 0.0, seconds / self._budget if self._budget else 0.0)
        text = f"step {self._step}" + (f"/{self._total}" if self._total else "")
        text += f"  {duration(seconds)}" + (f" of {duration(self._budget)}" if self._budget else "")
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=2, no_wrap=True, overflow="ellipsis")
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(Text(self.doing), ProgressBar(total=1, completed=min(max(shares), 1.0)), Text(text))
        return bar

    def _write(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)
