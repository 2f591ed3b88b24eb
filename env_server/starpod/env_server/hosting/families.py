"""Families of others' environments, which packages register by entry point: what `serve --host FAMILY:NAME` hosts."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import re
import signal
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

from starpod.env_server.environment import Environment
from starpod.env_server.registry import Registry, RegistryError

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "starpod.hosting"
LONG_START = 5.0
"""CPU seconds of trying what fits a pattern: there may be hundreds."""


class Family(Protocol):
    """A module that an entry point of the group names.

    A family that takes patterns has a function `installed(pattern)`, too, which lists the names that fit.
    """

    def host(self, text: str) -> type[Environment]:
        """Return the class that `NAME?argument=value&...#setting=value&...` asks for. Raises RegistryError."""


class NothingFits(RegistryError):
    """A pattern under which nothing can be hosted."""


@functools.cache
def families() -> dict[str, EntryPoint]:
    """Return the families by name."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def family_of(text: str) -> str:
    """Return the family of `FAMILY:NAME`, or an empty string if it begins with none."""
    name = text.partition(":")[0].replace("-", "_") if ":" in text else ""
    return name if name in families() else ""


def add_hosted(registry: Registry, wanted: str) -> list[str]:
    """Add another package's environments, asked for as `FAMILY:NAME`, to the registry and return their ids.

    A `*` in the name stands for any text: then all that fit and can be hosted are added, but for those that take long
    to start, which have to be named.

    Raises:
        RegistryError: It cannot be hosted; NothingFits for a pattern.
    """
    name, _, text = wanted.partition(":")
    entry = families().get(name.replace("-", "_"))
    if entry is None:
        raise RegistryError(f"--host {wanted}: there is no family {name!r} here; there are {', '.join(families())}")
    try:
        family = entry.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        hint = f"pip install {missing.replace('_', '-')}"
        raise RegistryError(f"--host {wanted} needs the package {missing}: {hint}") from error
    pattern, *rest = re.split(r"(?=[?#])", text, maxsplit=1)
    if "*" not in pattern:
        return [_add_one(registry, wanted, family, text)]
    if not hasattr(family, "installed"):
        raise RegistryError(f"--host {wanted}: this family takes no *; name what is to be hosted")
    ids: list[str] = []
    reasons: list[str] = []
    for name in family.installed(pattern):
        try:
            with _soon():
                ids.append(_add_one(registry, wanted, family, "".join([name, *rest])))
        except (RegistryError, TimeoutError) as error:
            reasons.append(str(error) if isinstance(error, RegistryError) else f"{name}: {error}")
            logger.info("--host %s: %s", wanted, reasons[-1])
    if not ids:
        because = "".join(f"; {reason}" for reason in reasons[:1])
        raise NothingFits(f"--host {wanted}: nothing that fits can be hosted{because}")
    if reasons:
        more = "; --log-level info lists all reasons" if reasons[1:] else ""
        logger.warning("--host %s: hosts %d, cannot host %d: %s%s", wanted, len(ids), len(reasons), reasons[0], more)
    return ids


def _add_one(registry: Registry, wanted: str, family: Family, text: str) -> str:
    said = io.StringIO()  # such as the progress of a download: a reason that comes after it must not be lost in it
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            environment = family.host(text)
    finally:
        if said.getvalue():
            logger.debug("--host %s wrote: %s", wanted, said.getvalue().strip())
    id = environment.spec.id
    if id in registry.ids:
        raise RegistryError(f"--host {wanted}: {id} is hosted already; give this one another id: #id=name-vN")
    registry.add(environment)
    return id


@contextlib.contextmanager
def _soon() -> Iterator[None]:
    """Stops what takes longer than LONG_START, where the system can."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"it takes more than {LONG_START:g} s to start: name it to host it all the same")

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
