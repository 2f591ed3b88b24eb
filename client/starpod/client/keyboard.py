"""One line from the player: from a terminal with arrow keys, or from lines of any stream."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Mapping
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


def read_keys(shortcuts: Mapping[str, str]) -> str | None:
    """A line typed on the terminal; an arrow key on an empty line returns its shortcut at once."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        return _edit_line(_keys(terminal), shortcuts, sys.stdout)
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
