"""Families of other packages' environments, registered by entry point: `starpod serve FAMILY:NAME`."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import signal
import threading
from collections.abc import Iterator
from typing import Protocol

from starpod.env_server.authoring.environment import Environment
from starpod.env_server.registry import Registry, RegistryError
from starpod.v1.environment_word import families

logger = logging.getLogger(__name__)

LONG_START = 5.0
"""Maximum CPU seconds for trying one environment that matches a pattern. A pattern may match hundreds."""


class Family(Protocol):
    """A module that hosts environments of another package, registered by an entry point.

    If the family supports patterns, it also has a function `installed(pattern)`, which returns the matching names. If a
    name without `*` can be a pattern, such as a folder of tasks, it has a function `is_plural(name)` that says so.
    """

    def host(self, text: str) -> type[Environment]:
        """Return the class for `NAME?argument=value&...#setting=value&...`. Raises RegistryError."""


class NothingFits(RegistryError):
    """No environment that matches a pattern can be hosted."""


def add_hosted(registry: Registry, wanted: str) -> list[str]:
    """Add another package's environments to the registry, and return their ids.

    Args:
        registry: where they are added.
        wanted: `FAMILY:NAME`, checked as an EnvironmentWord. A `*` in the name matches any text. All matches that can
            be hosted are added, unless they take long to start. Those can only be added by their full names.

    Raises:
        RegistryError: the environment cannot be hosted; NothingFits for a pattern.
    """
    name, _, text = wanted.partition(":")
    try:
        family = families()[name.replace("-", "_")].load()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        hint = f"pip install {package.replace('_', '-')}"
        raise RegistryError(f"{wanted} needs the package {package}: {hint}") from error
    pattern, *suffixes = re.split(r"(?=[?#])", text, maxsplit=1)
    is_plural = "*" in pattern or (hasattr(family, "is_plural") and family.is_plural(pattern))
    if not is_plural:
        return [_add_one(registry, wanted, family, text)]
    if not hasattr(family, "installed"):
        raise RegistryError(f"{wanted}: this family does not take *; name the environments to host")
    ids: list[str] = []
    reasons: list[str] = []
    for name in family.installed(pattern):
        try:
            with _soon():
                ids.append(_add_one(registry, wanted, family, "".join([name, *suffixes])))
        except (RegistryError, TimeoutError) as error:
            reasons.append(str(error) if isinstance(error, RegistryError) else f"{name}: {error}")
            logger.info("%s: %s", wanted, reasons[-1])
    if not ids:
        because = "".join(f"; {reason}" for reason in reasons[:1])
        raise NothingFits(f"{wanted}: no matching environment can be hosted{because}")
    if reasons:
        advice = "; --log-level info lists all reasons" if reasons[1:] else ""
        logger.warning("%s: hosts %d, cannot host %d: %s%s", wanted, len(ids), len(reasons), reasons[0], advice)
    return ids


def _add_one(registry: Registry, wanted: str, family: Family, text: str) -> str:
    output = io.StringIO()  # output such as the progress of a download, which would hide a later error message
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            environment = family.host(text)
    finally:
        if output.getvalue():
            logger.debug("%s wrote: %s", wanted, output.getvalue().strip())
    id = environment.spec.id
    if id in registry.ids:
        raise RegistryError(f"{wanted}: {id} is already hosted; give this one another id: #id=name-vN")
    registry.add(environment)
    return id


@contextlib.contextmanager
def _soon() -> Iterator[None]:
    """Raise TimeoutError in code that takes more than LONG_START CPU seconds, if this is the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {LONG_START:g} s to start: name it to host it anyway")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LONG_START)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
