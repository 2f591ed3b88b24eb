"""Settings of the browsers: number, size, deadlines; from environment variables, since a process has one pool."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from dataclasses import dataclass

from starpod.env_server import Unavailable

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass(frozen=True, slots=True)
class BrowserConfig:
    """One process's browsers.

    chromium, chromedriver: paths. browsers: the most that run at once; they start when they are needed.
    queue: operations that may wait for one. deadline: seconds of one operation, waiting and starting included.
    width, height: of the page, in CSS pixels. uses: operations after which a browser is replaced.
    flags: further flags of Chromium.
    """

    chromium: str
    chromedriver: str
    browsers: int = 1
    queue: int = 16
    deadline: float = 30.0
    width: int = 1280
    height: int = 800
    uses: int = 2000
    flags: tuple[str, ...] = ()

    @classmethod
    def from_environment(cls) -> BrowserConfig:
        """Reads STARPOD_CHROMIUM, STARPOD_CHROMEDRIVER, STARPOD_BROWSERS, STARPOD_BROWSER_QUEUE,
        STARPOD_BROWSER_DEADLINE, STARPOD_BROWSER_SIZE (1280x800) and STARPOD_BROWSER_FLAGS.

        Raises Unavailable where a program is missing or a value cannot be read.
        """
        chromium = _program("STARPOD_CHROMIUM", _CHROMIUM)
        chromedriver = _program("STARPOD_CHROMEDRIVER", ("chromedriver", "chromium.chromedriver"))
        size = os.environ.get("STARPOD_BROWSER_SIZE", "1280x800")
        if not re.fullmatch(r"[1-9][0-9]{1,3}x[1-9][0-9]{1,3}", size):
            raise Unavailable(f"STARPOD_BROWSER_SIZE is {size!r}; write WIDTHxHEIGHT, e.g. 1280x800")
        width, height = map(int, size.split("x"))
        return cls(
            chromium,
            chromedriver,
            browsers=_number("STARPOD_BROWSERS", 1, 64),
            queue=_number("STARPOD_BROWSER_QUEUE", 16, 10_000),
            deadline=float(_number("STARPOD_BROWSER_DEADLINE", 30, 600)),
            width=width,
            height=height,
            flags=tuple(shlex.split(os.environ.get("STARPOD_BROWSER_FLAGS", ""))),
        )


def _program(variable: str, names: tuple[str, ...]) -> str:
    asked = os.environ.get(variable)
    for name in (asked,) if asked else names:
        if found := shutil.which(name):
            return found
    raise Unavailable(
        f"there is no {asked or names[0]} here; install Chromium and its driver (Debian: apt-get install chromium "
        f"chromium-driver), or name the program in {variable}"
    )


def _number(variable: str, default: int, most: int) -> int:
    text = os.environ.get(variable, str(default))
    if not (text.isdecimal() and 1 <= int(text) <= most):
        raise Unavailable(f"{variable} is {text!r}; it must be a whole number from 1 to {most}")
    return int(text)
