"""Settings of the browsers, from environment variables, because a process has only one pool of browsers."""

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
    """Settings of a process's browsers."""

    chromium: str
    """Path of the Chromium executable."""
    chromedriver: str
    """Path of Chromium's driver."""
    browsers: int = 1
    """Maximum number of browsers. They are started when they are needed."""
    queue: int = 16
    """Maximum number of operations that wait for a browser."""
    deadline: float = 30.0
    """Maximum seconds for one operation, including waiting for a browser and starting it."""
    width: int = 1280
    height: int = 800
    """Width and height of the window in CSS pixels."""
    uses: int = 2000
    """Number of operations after which a browser is replaced."""
    flags: tuple[str, ...] = ()
    """Further flags of Chromium."""

    @classmethod
    def from_environment(cls) -> BrowserConfig:
        """Read the settings from environment variables.

        They are STARPOD_CHROMIUM, STARPOD_CHROMEDRIVER, STARPOD_BROWSERS, STARPOD_BROWSER_QUEUE,
        STARPOD_BROWSER_DEADLINE, STARPOD_BROWSER_SIZE (default 1280x800) and STARPOD_BROWSER_FLAGS.

        Raises:
            Unavailable: a program is missing, or a value is malformed.
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
    setting = os.environ.get(variable)
    for name in (setting,) if setting else names:
        if path := shutil.which(name):
            return path
    raise Unavailable(
        f"there is no {setting or names[0]} here; install Chromium and its driver (Debian: apt-get install chromium "
        f"chromium-driver), or name the program in {variable}"
    )


def _number(variable: str, default: int, maximum: int) -> int:
    text = os.environ.get(variable, str(default))
    if not (text.isdecimal() and 1 <= int(text) <= maximum):
        raise Unavailable(f"{variable} is {text!r}; it must be a whole number from 1 to {maximum}")
    return int(text)
