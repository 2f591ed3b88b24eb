"""Functions and classes in a user's file, which a configuration names as FILE.py:NAME."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starpod.serving.user_code import end_forked_copy, is_ctrl_c
from starpod.trainer.configuration.section import ConfigError
from starpod.v1.spelling import nearest


class UserCodeError(Exception):
    """A user's function failed or returned something wrong. The message names it, with file and line."""


def call(what: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """Call a function of a user's file or of another package. No other place calls one.

    Args:
        what: Subject and verb of the error message, such as `reward function 'f' failed`.

    Raises:
        UserCodeError: The function raised an exception, or tried to end the program. Only Ctrl-C passes.
    """
    process_id = os.getpid()
    try:
        return function(*arguments, **keywords)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise UserCodeError(f"{what}: {_describe(error)}") from error
    finally:
        end_forked_copy(process_id, what)


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A function of a user's file or of another package."""

    name: str
    """Name in messages, such as `reward function 'f'`."""
    function: Callable[..., Any]

    def __call__(self, where: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Call the function; see `call`. where: end of the message's first part, such as ` on turn 3`."""
        return call(f"{self.name} failed{where}", self.function, *arguments, **keywords)

    def refuse(self, problem: str) -> UserCodeError:
        """Return the error for a value that the function returned, with the place where the function is defined."""
        function = inspect.unwrap(getattr(self.function, "func", self.function))
        code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
        place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        return UserCodeError(f"{self.name} {problem}{place}")


def names_file(text: str) -> bool:
    """Return whether a text has the form FILE.py:NAME."""
    return text.rpartition(":")[0].endswith(".py")


def located(text: str) -> str:
    """Return FILE:NAME with the absolute path of the file, so that a run can be resumed from another folder."""
    file, _, name = text.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


def known_or_located(text: str, known: Sequence[str], what: str) -> str:
    """Return a known name as it is, and FILE.py:NAME with an absolute path.

    Args:
        what: What the names name, for the message, such as `reply grammar`.

    Raises:
        ValueError: The name is unknown. The message suggests a known one.
    """
    if names_file(text):
        return located(text)
    if text not in known:
        raise ValueError(f"no {what} {text!r}{nearest(text, known)}; one of your own is FILE.py:NAME")
    return text


_run = functools.cache(runpy.run_path)
_files: set[str] = set()
"""Paths of the files that `load` ran, as tracebacks name them."""
_LOADERS = (__file__, runpy.__file__, importlib.__file__.removesuffix("__init__.py"), "<")
"""Beginnings of the files that tracebacks name before a user's file."""


def load(key: str, place: str) -> Any:
    """Return the function or class that FILE.py:NAME names. The file runs once in a process, whatever is read from it.

    Raises:
        ConfigError: The file cannot be run, or does not define it. The message begins with `key`.
    """
    file, _, name = place.rpartition(":")
    problem = f"{key} {place} cannot be loaded"
    _files.add(file)
    try:
        symbols = call(problem, _run, file)
    except UserCodeError as error:
        raise ConfigError(str(error)) from error
    if name not in symbols:
        functions = [key for key in symbols if callable(symbols[key])]
        raise ConfigError(f"{problem}: it defines no {name}{nearest(name, functions)}")
    return expect_callable(f"{key} {place}", symbols[name])


def expect_callable(what: str, value: Any) -> Any:
    """Return a function or class. Raises ConfigError for another value."""
    if not callable(value):
        raise ConfigError(f"{what} is a {type(value).__name__}, not a function or a class")
    return value


def _describe(error: BaseException) -> str:
    """Return the type and message of an error that `call` caught, and the line of the called file that raised it."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, SystemExit):
        text = f"it ends the program, with sys.exit({error.code!r})"
    elif not isinstance(error, Exception):
        text = f"it ends the program, with {text}"
    stack = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    calls = [entry for entry in stack if not entry[0].startswith(_LOADERS)]
    if not calls:
        return text
    # The traceback may begin in a decorator of another package, and end in a function that the user's code called.
    file = next((name for name, _ in calls if name in _files), calls[0][0])
    return f"{text} ({file}, line {[line for name, line in calls if name == file][-1]})"


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
