"""Terminal output in which control characters of untrusted text are shown instead of executed.

Observations, actions, titles and errors come from environments, models and servers. Escape sequences in them could
clear the screen, write to the clipboard, or disguise the action that was played.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

# Control characters become Unicode's symbols for them. Characters that reverse or hide text become U+FFFD.
_REPLACEMENTS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_REPLACEMENTS |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
_REPLACEMENTS |= dict.fromkeys((0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
_REPLACEMENTS |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


def visible(text: str) -> str:
    """Replace every control character by a symbol, except line breaks and tabs."""
    return text.translate(_REPLACEMENTS)


def safe_console(**settings: Any) -> Console:
    """Return a rich console that shows control characters in all output, and executes only rich's own."""
    console = Console(**settings)
    console.push_render_hook(_EscapeHook())
    return console


class _EscapeHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_EscapedRenderable(renderable) for renderable in renderables]


class _EscapedRenderable:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _escaped(console.render(self._renderable, options))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._renderable)


def _escaped(segments: Iterable[Segment]) -> Iterable[Segment]:
    for text, style, control in segments:
        # A style may contain a link, but only markup creates links, and untrusted text is not printed as markup.
        yield Segment(text if control else visible(text), style, control)
