"""Terminals that show what others wrote as it is and never obey it.

Observations, actions, titles and errors come from environments, models and servers. An escape sequence among them could
clear the screen, write the clipboard, or show another action than the one that was played.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.measure import Measurement
from rich.segment import Segment

# The pictures that Unicode has for control characters; and what turns text around or hides it.
_SHOWN = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_SHOWN |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
_SHOWN |= dict.fromkeys((0x200E, 0x200F, 0x061C, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
_SHOWN |= dict.fromkeys(range(0xD800, 0xE000), 0xFFFD)


def visible(text: str) -> str:
    """The text with every control character replaced by a picture of it; line breaks and tabs stay."""
    return text.translate(_SHOWN)


def safe_console(**settings: Any) -> Console:
    """A rich console that shows control characters, whatever is printed, and obeys none but rich's own."""
    console = Console(**settings)
    console.push_render_hook(_EscapeHook())
    return console


class _EscapeHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(renderable) for renderable in renderables]


class _Escaped:
    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _escaped(console.render(self._renderable, options))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._renderable)


def _escaped(segments: Iterable[Segment]) -> Iterable[Segment]:
    for text, style, control in segments:
        # Links are made by markup, of which there is none here, but a style could bring one.
        yield Segment(text if control else visible(text), style, control)
