"""Rich consoles that show what others wrote and do not obey it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

from starpod.report.terminal import visible


def safe_console(**settings: Any) -> Console:
    """A rich console that shows control characters, whatever is printed, and obeys none but rich's own."""
    console = Console(**settings)
    console.push_render_hook(_Harmless())
    return console


class _Harmless(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Seen(renderable) for renderable in renderables]


class _Seen:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _seen(console.render(self._renderable, options))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._renderable)


def _seen(segments: Iterable[Segment]) -> Iterable[Segment]:
    for text, style, control in segments:
        # Links are made by markup and by nobody here, but a style could bring one.
        yield Segment(text if control else visible(text), style, control)
