"""A numbered requirement of docs/protocol.md with the test that shows whether a server meets it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from starpod.check.probe import Probe

Level = Literal["core", "stream", "fork", "snapshot"]
Strength = Literal["MUST", "SHOULD"]
Test = Callable[["Probe"], Awaitable[None]]

LEVELS: dict[str, Level] = {"C": "core", "S": "stream", "F": "fork", "N": "snapshot"}


@dataclass(frozen=True, slots=True)
class Requirement:
    """id: as `C-07`; its letter gives the level. title: the sentence of docs/protocol.md, word for word.

    alone: run while nothing else runs, because it uses up what the others need.
    absent: about servers and environments that lack the level's capability, unlike the level's others.
    slow: seconds that it takes by itself, if that is too long for every check; 0 otherwise.
    """

    id: str
    strength: Strength
    title: str
    test: Test
    alone: bool = False
    absent: bool = False
    slow: float = 0.0

    @property
    def level(self) -> Level:
        return LEVELS[self.id[0]]


def must(
    number: str, title: str, *, alone: bool = False, absent: bool = False, slow: float = 0.0
) -> Callable[[Test], Requirement]:
    """Makes a test function the test of a MUST."""
    return lambda test: Requirement(number, "MUST", title, test, alone, absent, slow)


def should(number: str, title: str) -> Callable[[Test], Requirement]:
    """Makes a test function the test of a SHOULD: missing it is a warning."""
    return lambda test: Requirement(number, "SHOULD", title, test)


class Unmet(Exception):
    """The server does not meet the requirement."""

    def __init__(self, expected: str, got: str, mend: str = "") -> None:
        super().__init__(f"expected {expected}; got {got}" + (f". To mend it: {mend}" if mend else ""))


class NotShown(Exception):
    """This server or environment has nothing by which the requirement could be shown."""


class TooBusy(NotShown):
    """This machine was held up while it had to be in time, so nothing can be said of the server."""

    def __init__(self) -> None:
        super().__init__("this machine is too busy to call in time")


def expect(met: bool, expected: str, got: object, mend: str = "") -> None:
    """Raises Unmet with what was expected, what came and how to mend it, unless `met`."""
    if not met:
        raise Unmet(expected, str(got), mend)
