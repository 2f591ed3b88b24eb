"""Functions and classes in a user's file, which a configuration names as FILE.py:NAME."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starpod.client.spelling import nearest
from starpod.trainer.section import ConfigError


def names_file(text: str) -> bool:
    """Return whether a text has the form FILE.py:NAME."""
    return text.rpartition(":")[0].endswith(".py")


def located(text: str) -> str:
    """Return FILE:NAME with the absolute path of the file, so that a run can be resumed from another folder."""
    file, _, name = text.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


def known_or_located(text: str, known: Sequence[str], what: str) -> str:
    """Return a known name as it is, and FILE.py:NAME with an absolute path.

    Raises:
        ValueError: The name is unknown. The message suggests a known one.
    """
    if names_file(text):
        return located(text)
    if text not in known:
        raise ValueError(f"no {what} {text!r}{nearest(text, known)}; one of your own is FILE.py:NAME")
    return text


_run = functools.cache(runpy.run_path)


def read(file: str, name: str) -> Any:
    """Return the object that a file defines under a name. The file runs once in a process, whatever is read from it.

    Raises LookupError, and any exception of the file.
    """
    try:
        symbols = _run(file)
    except SystemExit as error:
        raise RuntimeError(f"it ends the program, with sys.exit({error.code!r})") from error
    if name not in symbols:
        raise LookupError(f"it defines no {name}{nearest(name, [key for key in symbols if callable(symbols[key])])}")
    return symbols[name]


def load(key: str, place: str) -> Any:
    """Return the function or class that FILE.py:NAME names; see `read`.

    Raises:
        ConfigError: if the file cannot be run, or does not define it. The message names the configuration's key.
    """
    file, _, name = place.rpartition(":")
    try:
        value = read(file, name)
    except Exception as error:
        raise ConfigError(f"{key} {place} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(value):
        raise ConfigError(f"{key} {place} is a {type(value).__name__}, not a function or a class")
    return value
