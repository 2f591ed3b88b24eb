"""Functions and classes in a user's file, which a configuration names as FILE.py:NAME."""

from __future__ import annotations

import functools
import hashlib
import runpy
import traceback
from collections.abc import Iterator, Mapping, Sequence
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


_files: set[str] = set()
"""Paths of the files that `read` ran, as tracebacks name them."""
_run = functools.cache(runpy.run_path)


def read(file: str, name: str) -> Any:
    """Return the object that a file defines under a name. The file runs once in a process, whatever is read from it.

    Raises LookupError, and any exception of the file.
    """
    _files.add(file)
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
        raise ConfigError(f"{key} {place} cannot be loaded: {with_place(error)}") from error
    if not callable(value):
        raise ConfigError(f"{key} {place} is a {type(value).__name__}, not a function or a class")
    return value


def with_place(error: Exception) -> str:
    """Return an error's type and message, and its line if it was raised in a user's file or in a call from there."""
    _, place = _trace(error)
    return f"{type(error).__name__}: {error}{place and f' ({place})'}"


def describe_failure(error: Exception) -> str:
    """Return which function of a user's file failed, and how and where; "" if none did."""
    function, _ = _trace(error)
    return function and f"{function} failed: {with_place(error)}"


def _trace(error: Exception) -> tuple[str, str]:
    """Return the function of a user's file that raised an error, and its file and line; "" and "" if none did."""
    stack = traceback.walk_tb(error.__traceback__)
    frames = [(frame.f_code, line) for frame, line in stack if frame.f_code.co_filename in _files]
    if not frames:
        return "", ""
    code, line = frames[-1]
    return frames[0][0].co_qualname, f"{code.co_filename}, line {line}"


def digests(values: Any) -> dict[str, str]:
    """Return the SHA-256 of each Python file that the values of a configuration name, by its path there."""
    files = {text if text.endswith(".py") else text.rpartition(":")[0] for text in _texts(values)}
    paths = [file for file in sorted(files) if file.endswith(".py") and Path(file).is_file()]
    return {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths}


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping | list):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _texts(value)
