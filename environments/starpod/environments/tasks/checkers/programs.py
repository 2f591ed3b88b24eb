"""Checkers that run programs: unit tests in the sandbox of coding-v1, and a function of the user's file."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field

from starpod.environments.coding.environment import read_program
from starpod.environments.coding.execution import RunLimits, call_program, prepare_runs, same_value

from .base import AnswerChecker, Grade


class TestsChecker(AnswerChecker):
    """The reply is a Python program, alone or in a block of ```python, that passes tests such as `add(1, 2) == 3`.

    The process that runs the program does not know the right results. Arguments and results are values of JSON.
    """

    reads_program: ClassVar[bool] = True
    kind: Literal["tests"] = "tests"
    tests: tuple[str, ...] = Field(min_length=1, max_length=100)
    max_instructions: int = Field(default=1_000_000, ge=10_000, le=20_000_000)
    max_seconds: int = Field(default=4, ge=1, le=30)

    def prepare(self) -> None:
        prepare_runs()

    @cached_property
    def _parsed(self) -> list[tuple[str, list[Any], Any]]:
        """Function, arguments and right result of each test."""
        return [_read_test(test) for test in self.tests]

    def expect(self, rights: Sequence[str]) -> None:
        if len({function for function, _, _ in self._parsed}) > 1:
            raise ValueError("the tests call several functions: test one")

    def check(self, answer: str, rights: Sequence[str], row: dict[str, Any]) -> Grade:
        names, arguments, truths = zip(*self._parsed, strict=True)
        limits = RunLimits(self.max_instructions, self.max_seconds)
        problem, results = call_program(read_program(answer), names[0], arguments, limits)
        if problem:
            return Grade(0, f"The program does not work: {problem}.")
        failures = [
            f" {test[:200]}: {f'failed with {error}' if error else f'it gave {value!r}'[:200]}"
            for test, (error, value), truth in zip(self.tests, results, truths, strict=True)
            if error or not same_value(value, truth)
        ]
        return Grade(
            not failures, f"{len(truths) - len(failures)} of {len(truths)} tests passed.{''.join(failures[:1])}"
        )


def _read_test(text: str) -> tuple[str, list[Any], Any]:
    """Parse `function(arguments) == result`, with or without `assert`. Raises ValueError."""
    try:
        match ast.parse(text.strip().removeprefix("assert ").strip(), mode="eval").body:
            case ast.Compare(ast.Call(ast.Name(name), arguments, []), [ast.Eq()], [result]):
                values = [ast.literal_eval(node) for node in (*arguments, result)]
                if all(map(_is_json, values)):
                    return name, values[:-1], values[-1]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise ValueError(f"{text[:80]!r} is no test: write function(values) == value with values of JSON: add(1, 2) == 3")


def _is_json(value: Any) -> bool:
    return all(map(_is_json, value)) if isinstance(value, list) else isinstance(value, str | int | float | None)


class FunctionChecker(AnswerChecker):
    """The score is what `NAME(answer, row)` of FILE.py returns: True, False, or a number from 0 to 1.

    The function runs in the server's process, on several threads. It must be deterministic.
    """

    kind: Literal["function"] = "function"
    file: str
    name: str

    @cached_property
    def _function(self) -> Any:
        try:
            return runpy.run_path(self.file)[self.name]
        except Exception as error:
            raise ValueError(f"reward {self.file}:{self.name}: {type(error).__name__}: {error}") from error

    def expect(self, rights: Sequence[str]) -> None:
        assert self._function

    def check(self, answer: str, rights: Sequence[str], row: dict[str, Any]) -> Grade:
        score = self._function(answer, row)
        if not isinstance(score, bool | int | float) or not 0 <= score <= 1:
            raise TypeError(f"{self.file}:{self.name} returned {score!r:.80}; return a bool, or a number from 0 to 1")
        return Grade(score)
