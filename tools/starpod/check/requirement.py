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
"""Level by the first letter of a requirement's id. All levels but `reward` belong to the contract."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A demand of the contract and its test."""

    id: str
    """The level's letter and a number, such as `C-07`."""
    strength: Strength
    title: str
    """What is demanded, in one sentence."""
    test: Test
    alone: bool = False
    """Whether the test must run alone, because it uses up resources that other tests need."""
    absent: bool = False
    """Whether the requirement is for servers or environments without the level's capability, not for those with it."""
    slow: float = 0.0
    """Duration in seconds, if the test is too slow to run in every check; else 0."""

    @property
    def level(self) -> Level:
        return LEVELS[self.id[0]]


def must(
    number: str, title: str, *, alone: bool = False, absent: bool = False, slow: float = 0.0
) -> Callable[[Test], Requirement]:
    """Return a decorator that makes a test function the test of a MUST. The arguments are fields of `Requirement`.

    Args:
        number: id of the requirement, such as "C-07".
        alone: the test must run alone, because it uses up resources that other tests need.
        absent: the requirement is for servers or environments without the level's capability.
        slow: duration in seconds of a test that is too slow to run in every check; else 0.
    """
    return lambda test: Requirement(number, "MUST", title, test, alone, absent, slow)


def should(number: str, title: str) -> Callable[[Test], Requirement]:
    """Return a decorator that makes a test function the test of a SHOULD, which only warns if it is unmet."""
    return lambda test: Requirement(number, "SHOULD", title, test)
