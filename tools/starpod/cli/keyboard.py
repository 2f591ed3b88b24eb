"""One line from the player: from a terminal with arrow keys, or from lines of any stream."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

Reader = Callable[[Mapping[str, str]], str | None]
"""Returns the next line without its end, None at the end of the input. The mapping gives arrow keys a meaning: `up`,
`down`, `left` and `right` to the line that they stand for."""

_ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}
_END = "\x04"
_ESCAPE = "\x1b"


def read_line(shortcuts: Mapping[str, str]) -> str | None:
    """The next line of standard input as it is."""
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


@contextlib.contextmanager
def keys() -> Iterator[Reader]:
    """A reader of the terminal on standard input: an arrow key on an empty line returns its shortcut at once.

    The terminal delivers single keys until the context ends, so that keys typed ahead are not lost between turns.
    """
    import termios  # not on Windows, where only `read_line` works
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    key = _keys(terminal)
    try:
        yield lambda shortcuts: _edit_line(key, shortcuts, sys.stdout)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _keys(terminal: int) -> Callable[[], str]:
    """Reads one key: a character, an arrow's name, or the empty string at the end of the input."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def character() -> str:
        while data := os.read(terminal, 1):
            if text := decoder.decode(data):
                return text
        return ""

    def key() -> str:
        first = character()
        if first != _ESCAPE:
            return first
        if character() not in ("[", "O"):
            return _ESCAPE
        return _ARROWS.get(character(), _ESCAPE)

    return key


def _edit_line(key: Callable[[], str], shortcuts: Mapping[str, str], echo: TextIO) -> str | None:
    line = ""
    while True:
        pressed = key()
        if pressed == "" or (pressed == _END and not line):
            return None
        if pressed in ("\n", "\r"):
            echo.write("\n")
            return line
        if pressed in shortcuts and len(pressed) > 1:
            if not line:
                return shortcuts[pressed]
        elif pressed in ("\x7f", "\b"):
            if line:
                line = line[:-1]
                echo.write("\b \b")
        elif pressed.isprintable() and len(pressed) == 1:
            line += pressed
            echo.write(pressed)
        echo.flush()
