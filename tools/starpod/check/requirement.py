"""A numbered requirement of the contract with the test that shows whether a server meets it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from starpod.check.probe import Probe

Level = Literal["core", "stream", "fork", "snapshot", "reward"]
Strength = Literal["MUST", "SHOULD"]
Test = Callable[[Probe], Awaitable[None]]

LEVELS: dict[str, Level] = {"C": "core", "S": "stream", "F": "fork", "N": "snapshot", "R": "reward"}
"""Level by the letter that a number begins with. All but `reward` make up the contract."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """id: as `C-07`; its letter gives the level. title: what is demanded, in one sentence.

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
