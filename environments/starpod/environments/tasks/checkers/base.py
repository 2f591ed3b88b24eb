"""Base of checkers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from starpod.env_server import EnvironmentOptions


class Grade(NamedTuple):
    """The score of an answer: 1 if it is right, 0 if it is wrong, and feedback for further attempts."""

    score: float
    told: str = ""


class AnswerChecker(EnvironmentOptions, ABC):
    """A checker with its settings. Rows with equal settings share one object."""

    packages: ClassVar[Mapping[str, str]] = {}
    """Names in the package index of the modules that it imports."""
    reads_program: ClassVar[bool] = False
    """Whether it reads the whole reply, instead of the answer that was found in it."""
    kind: str

    def prepare(self) -> None:
        """Raise Unavailable if answers cannot be checked on this machine."""

    def expect(self, rights: Sequence[str]) -> None:
        """Raise ValueError unless each right answer of a row is right. It is called once for every row of a file."""
        if not rights:
            raise ValueError(f"it has no answer, which reward {self.kind} needs")
        for right in rights:
            grade = self.check(right, rights, {})
            if grade.score < 1:
                raise ValueError(f"reward {self.kind} does not accept the answer {right[:60]!r}. {grade.told}".strip())

    @abstractmethod
    def check(self, answer: str, rights: Sequence[str], row: dict[str, Any]) -> Grade:
        """Check an answer. rights: right answers, of which one is enough. row: all columns."""
