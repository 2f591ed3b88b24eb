"""The live screen on a terminal."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from starpod.report.console import safe_console
from starpod.report.figures import duration, show, signed
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.metric_names import SHOWN, TASKS, metric
from starpod.trainer.output.screen import PlainScreen, Screen, evaluation_line, step_line
from starpod.trainer.output.words import (
    is_graded,
    return_with_interval,
    sparkline,
    standing_warnings,
    trend,
    with_interval,
)

KEPT = 120
"""Number of values per metric that the small curves show."""

SHARE = 0.008
"""Maximum share of the time that drawing may take."""


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


class LiveScreen(Screen):
    """Screen on the terminal's alternate buffer. After it closes, a summary is left on the main buffer.

    A drawing that took t seconds is followed by a pause of t / SHARE seconds, so that drawing takes less than 1 % of
    the time even on a slow machine with fast steps.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._start_time = clock()
        self._rest_until = 0.0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._live: Live | None = None
        self._ticker: threading.Thread | None = None
        self.view = View()

    # --- events ----------------------------------------------------------------------------------------------------

    def start(self, title: str, plan: Mapping[str, Any]) -> None:
        with self._lock:
            self._start_time = self._clock()
            self.view.title = title
            self.view.plan = {
                name: str(value) for name, value in plan.items() if name not in ("live", "budget_seconds")
            }
            self.view.site = str(plan.get("live", ""))
            budget = plan.get("budget_seconds")
            self.view.budget = float(budget) if budget else None
        if self._live is None:
            # Redirect other output so that it does not break the screen. Output to a file or pipe stays as it is.
            tty = sys.stdout.isatty()
            self._live = Live(self.view, console=self._console, screen=True, auto_refresh=False, redirect_stdout=tty)
            self._live.start()
            self._ticker = threading.Thread(target=self._tick, name="starpod-screen", daemon=True)
            self._ticker.start()
        self._draw()

    def phase(self, name: str) -> None:
        super().phase(name)
        with self._lock:
            self.view.phase = name
        self._draw()

    def progress(self, text: str) -> None:
        self.phase(text)

    def step(self, step: int, total: int | None, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.view.step, self.view.total = step, total
            self.view.metrics = dict(metrics)
            for name, value in metrics.items():
                self.view.curves.setdefault(name, deque(maxlen=KEPT)).append(value)
        self._draw()

    def episode(self, episode: Episode) -> None:
        with self._lock:
            self.view.episode = episode
        self._draw()

    def evaluation(self, step: int, summary: Mapping[str, Any]) -> None:
        with self._lock:
            self.view.evaluations.append((step, dict(summary)))
            self.view.reference = summary.get("reference") or self.view.reference
        self._draw()

    def warn(self, text: str) -> None:
        with self._lock:
            if text not in (warning for _, warning in self.view.warnings):
                self.view.warnings = standing_warnings([*self.view.warnings, (self.at, text)])
        self._draw()

    def log(self, text: str) -> None:
        with self._lock:
            self.view.warnings.append((self.at, text))
        self._draw()

    def done(self, summary: Mapping[str, Any]) -> None:
        with self._lock:
            self.view.outcome = {name: str(value) for name, value in summary.items()}
            self.view.phase = "done"
        self._draw()

    def close(self) -> None:
        if self._live is None:
            return
        self._closing.set()
        if self._ticker is not None:
            self._ticker.join(timeout=2)
        live, self._live = self._live, None
        live.stop()
        with self._lock:
            self.view.seconds = self._clock() - self._start_time
            self._console.print(self.view.farewell(), soft_wrap=True)

    # --- drawing ---------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """Draw, unless the last drawing is too recent or another thread is drawing."""
        now = self._clock()
        if self._live is None or now < self._rest_until or not self._lock.acquire(blocking=False):
            return
        try:
            self.view.seconds = now - self._start_time
            self._live.update(self.view, refresh=True)
            draw_seconds = self._clock() - now
            self._rest_until = now + max(draw_seconds / SHARE, 0.1)
        except Exception as error:  # a failed drawing must not end a run
            live, self._live = self._live, None
            live.stop()
            self._console.print(f"the screen failed and is off; training continues: {error!r}", markup=False)
        finally:
            self._lock.release()

    def _tick(self) -> None:
        """Redraw periodically, because the clock and the terminal's size also change between events."""
        while not self._closing.wait(1.0):
            self._draw()


@dataclass
class View:
    """State of the screen, which renders itself at any size."""

    title: str = ""
    plan: dict[str, str] = field(default_factory=dict)
    site: str = ""
    budget: float | None = None
    phase: str = ""
    seconds: float = 0.0
    step: int = 0
    total: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    curves: dict[str, deque[float]] = field(default_factory=dict)
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    reference: dict[str, dict[str, float]] = field(default_factory=dict)
    warnings: list[tuple[int, str]] = field(default_factory=list)
    episode: Episode | None = None
    outcome: dict[str, str] = field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or options.max_height
        warnings = self._warnings(width)
        # Print the address outside the panels, because terminals only turn it into a link if no border interrupts it.
        address_line = f"live: {self.site}" if self.site else ""
        site = [address_line[start : start + width] for start in range(0, len(address_line), width)]
        used_rows = len(site) + 5 + (len(warnings) + 2 if warnings else 0)
        layout = Layout()
        rows = [Layout(Text(line, no_wrap=True), size=1) for line in site]
        rows += [Layout(self._header(width), size=5), Layout(name="middle")]
        if warnings:
            rows.append(
                Layout(
                    Panel(Group(*warnings), title="warnings", border_style="yellow", box=box.ROUNDED),
                    size=len(warnings) + 2,
                )
            )
        layout.split_column(*rows)
        room = max(height - used_rows, 3)
        if width >= 90:
            layout["middle"].split_row(
                Layout(self._metrics(room - 2, min(max(width // 2 - 48, 8), 24))),
                Layout(self._right(width - width // 2, room)),
            )
        else:  # one column, two halves
            half = room // 2
            layout["middle"].split_column(
                Layout(self._metrics(half - 2, 12), size=half), Layout(self._right(width, room - half))
            )
        yield layout

    def farewell(self) -> RenderableType:
        """Return the summary that stays on the terminal."""
        lines = [Text(self.title, style="bold")]
        if self.metrics:
            lines.append(Text(f"{duration(self.seconds)}  {step_line(self.step, self.total, self.metrics)}"))
        evaluations = self.evaluations if len(self.evaluations) <= 2 else [self.evaluations[0], self.evaluations[-1]]
        lines += [Text(evaluation_line(step, summary)) for step, summary in evaluations]
        lines += [Text(f"warning at step {step}: {text}", style="yellow") for step, text in self.warnings[-5:]]
        lines += [Text(f"{name.replace('_', ' ')}: {value}") for name, value in self.outcome.items()]
        return Group(*lines)

    def _header(self, width: int) -> RenderableType:
        share, text = self._progress()
        plan = "  ·  ".join(self.plan.values())
        bar = ProgressBar(total=1, completed=share, width=max(width - len(text) - 7, 10))
        progress = Table.grid(padding=(0, 1))
        progress.add_row(bar, text)
        return Panel(
            Group(
                Text(self.title, style="bold", no_wrap=True, overflow="ellipsis"),
                Text(plan, style="dim", no_wrap=True, overflow="ellipsis"),
                progress,
            ),
            title=f"starpod · {self.phase}" if self.phase else "starpod",
            title_align="left",
            box=box.ROUNDED,
        )

    def _progress(self) -> tuple[float, str]:
        """Return the run's progress in [0, 1] and a text. Progress is the larger of the shares of steps and of time."""
        shares = [0.0]
        parts = [f"step {self.step}" + (f"/{self.total}" if self.total else "")]
        if self.total:
            shares.append(self.step / self.total)
        if self.budget:
            shares.append(self.seconds / self.budget)
            parts.append(f"{duration(self.seconds)} of {duration(self.budget)}")
        else:
            parts.append(duration(self.seconds))
        return min(max(shares), 1.0), "  ".join(parts)

    def _metrics(self, rows: int, curve: int) -> RenderableType:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True, ratio=1, overflow="ellipsis")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, style="cyan", width=curve)
        first_name, *other_names = SHOWN
        # Show the metrics of single environments directly after the overall success.
        per_task = [n for n in sorted(self.metrics) if n.startswith(f"{TASKS}/") and n.endswith(("/success", "/level"))]
        order = [first_name, *per_task, *other_names]
        names = [*(n for n in order if n in self.metrics), *(n for n in self.metrics if n not in order)]
        for name in names[: max(rows, 1)]:
            entry, values = metric(name), list(self.curves[name])
            arrow = trend(values)
            improvement = {"↗": 1, "↘": -1}.get(arrow, 0) * entry.better
            style = "green" if improvement > 0 else "red" if improvement < 0 else "dim"
            table.add_row(
                entry.label, show(self.metrics[name], entry.kind), Text(arrow, style=style), sparkline(values, curve)
            )
        body = table if self.metrics else Text("the first step is running", style="dim")
        return Panel(body, title="metrics", title_align="left", box=box.ROUNDED)

    def _right(self, width: int, room: int) -> RenderableType:
        table = self._table(width - 4, room - 3)
        panels: list[RenderableType] = [Panel(table, title="evaluation", title_align="left", box=box.ROUNDED)]
        rows_left = room - len(table.renderables) - 2
        if self.episode is not None and rows_left >= 5:
            panels.append(self._episode(self.episode, width - 4, rows_left - 2))
        return Group(*panels)

    def _table(self, width: int, max_rows: int) -> Group:
        """Return a table of the latest evaluation, the first one and the reference policies, sorted by success."""
        if not self.evaluations:
            return Group(Text("none yet", style="dim"))
        step, last_summary = self.evaluations[-1]
        rows: list[tuple[str, float, dict[str, Any] | None]] = [
            (name, row["success"], None) for name, row in self.reference.items()
        ]
        first_step, first_summary = self.evaluations[0]
        if first_step != step:
            rows.append((f"step {first_step}", first_summary["success"], None))
        rows += [(name, result["success"], result) for name, result in (last_summary.get("environments") or {}).items()]
        # If there is too little room, keep the rows nearest to the result.
        rows.sort(key=lambda row: abs(row[1] - last_summary["success"]))
        rows = [*rows[: max(max_rows - 1, 0)], (f"step {step}", last_summary["success"], last_summary)]
        names = min(max(len(name) for name, _, _ in rows), 24)
        lines: list[RenderableType] = []
        for name, success, summary in sorted(rows, key=lambda row: row[1]):
            line = Text(no_wrap=True, overflow="ellipsis")
            line.append(f"{name[:names]:<{names}} ", style="bold" if summary else "")
            line.append(_bar(success, max(width - names - 8, 8), summary), style="bold green" if summary else "dim")
            line.append(f" {show(success, 'share'):>5}", style="bold" if summary else "")
            lines.append(line)
        text = f"success {with_interval(last_summary)} of {last_summary.get('episodes', '?')}"
        text += f", return {return_with_interval(last_summary)}" if is_graded(last_summary) else ""
        lines.append(Text(text, style="dim", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _episode(self, episode: Episode, width: int, room: int) -> RenderableType:
        """Return the last turns of an episode, as many as fit."""
        title = f"{episode.environment} · seed {episode.seed}"
        if episode.end:
            title += f" · {_outcome(episode)}"
        lines: list[Text] = []
        for number, turn in reversed(list(enumerate(episode.turns, start=1))):
            block = _turn(number, turn, width, room)
            if lines and len(block) + len(lines) > room:
                break
            lines = block + lines
        return Panel(Group(*lines), title=title, title_align="left", box=box.ROUNDED)

    def _warnings(self, width: int) -> list[Text]:
        """Return the latest warning in up to three lines, and the one before it in one line."""
        texts: list[Text] = []
        for step, text in self.warnings[-2:]:
            max_lines = 3 if text == self.warnings[-1][1] else 1
            lines = textwrap.wrap(f"step {step}: {text}", max(width - 4, 20), max_lines=max_lines, placeholder=" …")
            texts += [Text(line, style="yellow", no_wrap=True) for line in lines]
        return texts


def _turn(number: int, turn: Turn, width: int, room: int) -> list[Text]:
    """Return the state, reasoning, action and reward of one turn, with each line cut to the width."""
    state = turn.observation.splitlines()
    max_lines = max(min(room - 3, 10), 1)
    shown_lines = state if len(state) <= max_lines else [*state[: max_lines - 1], "…"]
    lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in shown_lines]
    thought = _one_line(turn.thought or "none", max(width - 10, 8))
    lines.append(Text.assemble(("reasoning ", "dim"), (thought, "italic"), no_wrap=True, overflow="ellipsis"))
    colour = "green" if turn.reward > 0 else "red" if turn.reward < 0 else ""
    actions = " || ".join(turn.actions) or "none understood"
    pieces = [(f"{number}. action ", "dim"), (actions, "bold"), ("  reward ", "dim"), (signed(turn.reward), colour)]
    lines.append(Text.assemble(*pieces, no_wrap=True, overflow="ellipsis"))
    return lines


def _outcome(episode: Episode) -> str:
    if episode.success is None:
        return episode.end.replace("_", " ")
    return "solved" if episode.success else "not solved"


def _one_line(text: str, width: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def _bar(success: float, width: int, summary: Mapping[str, Any] | None) -> str:
    """Return a bar of `width` cells; for an evaluation, with its 95 % interval hatched."""
    cells = [" "] * width
    filled_count = round(success * width)
    cells[:filled_count] = ("█" if summary else "━") * filled_count
    low, high = (summary or {}).get("success_low"), (summary or {}).get("success_high")
    if low is not None and high is not None:
        for index in range(round(low * width), min(round(high * width), width)):
            cells[index] = "▓" if index < filled_count else "░"
    return "".join(cells)
