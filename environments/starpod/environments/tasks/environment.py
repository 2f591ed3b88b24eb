"""Answer a question of a file, perhaps with tools and in several attempts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from starpod.env_server import INVALID, Environment, EnvironmentOptions, Image, Outcome, digest

from .answers import ASKED, find_answer
from .file import TaskFile
from .questions import Question
from .tools import explain_tools, use_tool

MAX_LENGTH = 100_000
"""Maximum number of characters of a reply."""


MAX_CALLS = 8
"""Maximum number of calls of tools in an episode."""


class TasksOptions(EnvironmentOptions):
    """Options for the choice of a row."""

    split: str = "all"
    id: str = Field(default="", description="Row with this id; by default the seed chooses a row of the split.")


class Tasks(Environment):
    """Questions of a file. The seed determines the row; the transitions are deterministic."""

    file: ClassVar[TaskFile]
    Options = TasksOptions
    options: TasksOptions

    row: int
    tries: int
    calls: int
    """Number of calls of tools."""
    best: float
    """Best score of the answers so far."""
    told: str
    """Result of the last call or answer."""
    _cached_question: Question | None = None

    @classmethod
    def prepare(cls) -> None:
        # Packages have to be named before the first confined process starts.
        for checker in sorted(cls.file.checkers.values(), key=lambda checker: not checker.packages):
            checker.prepare()

    def reset(self, rng: random.Random) -> None:
        self.row = self.file.choose(self.options.split, self.seed, self.options.id)
        self._cached_question = None
        self.tries = self.calls = 0
        self.best, self.told = 0.0, ""

    @property
    def question(self) -> Question:
        """The question. It is not part of the state, so it is read again after a restore or fork."""
        if self._cached_question is None:
            self._cached_question = self.file.read(self.row)
        return self._cached_question

    @property
    def is_over(self) -> bool:
        return self.best == 1 or self.tries >= self.file.settings.attempts

    def step(self, action: Any) -> Outcome:
        if not isinstance(action, str) or len(action) > MAX_LENGTH:
            return INVALID
        settings, question = self.file.settings, self.question
        if self.calls < MAX_CALLS and (result := use_tool(action, settings.tools)) is not None:
            self.calls += 1
            self.told = result
            return Outcome()
        answer = action if question.checker.reads_program else find_answer(action)
        grade = question.checker.check(answer, question.rights, question.columns)
        score = float(grade.score)
        gain, self.best = max(0.0, score - self.best), max(self.best, score)
        self.tries += 1
        left = 0 if self.is_over else settings.attempts - self.tries
        more = f"Attempts left: {left}." if left else ""
        self.told = " ".join(filter(None, ["Right." if score == 1 else "Wrong.", grade.told, more]))
        return Outcome(
            gain,
            terminated=self.is_over,
            success=self.best == 1 if self.is_over else None,
            info={"id": question.id, "answer": "".join(question.rights[:1])} if self.is_over else None,
        )

    def observe(self) -> str | Sequence[str | Image]:
        question = self.question
        return self.told or ([question.prompt, question.image] if question.image else question.prompt)

    def state_key(self) -> bytes:
        return digest(repr((self.file.version, self.row, self.tries, self.calls, self.best, self.told)))

    def score(self) -> float:
        """Return the best score of the answers so far."""
        return self.best

    def instructions(self) -> str:
        settings = self.file.settings
        attempts = f"You have {settings.attempts} attempts." if settings.attempts > 1 else ""
        tools = explain_tools(settings.tools) if settings.tools else ""
        return " ".join(filter(None, ["Answer the question.", ASKED, attempts, tools]))

    def render(self, mode: str = "text") -> str:
        return f"{self.question.prompt}\n{self.told}".strip()


class AnsweredTasks(Tasks):
    """Questions of a file in which every row has an answer, so that there is an expert."""

    def expert_action(self) -> str | None:
        """Return the first right answer as the file has it, perhaps with the solution before it."""
        return None if self.is_over else self.question.answers[0]
