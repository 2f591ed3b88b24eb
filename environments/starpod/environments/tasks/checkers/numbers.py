"""Checkers of numbers, with a tolerance, and of mathematical equality."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from starpod.env_server import Unavailable, run_confined

from .base import AnswerChecker, Grade
from .text import normalise_text

MAX_FORMULA = 1_000
"""Maximum number of characters of a formula in an answer; a longer one is wrong."""
_NUMBER = re.compile(
    r"([-+]?)[$€£]?\s?((?:\d{1,40}|\d{1,3}(?:,\d{3}){1,12})(?:\.\d{0,60})?|\.\d{1,60})([eE][-+]?\d{1,3})?"
    r"(?:\s?/\s?(\d{1,40}))?\s?(%?)"
)
_RUNNER = str(Path(__file__).with_name("equality.py"))


def read_number(text: str) -> Fraction | None:
    """Return the number that a text is, such as 1,234.50, -3, 2e-5, 3/4, $12 or 40% (0.4), or None."""
    text = text.replace("\u2212", "-").replace("\\", "").strip("*_`$ \n").removesuffix(".")
    match = _NUMBER.fullmatch(text)
    divisor = int(match[4] or 1) * (100 if match[5] else 1) if match else 0
    if match is None or not divisor:
        return None
    return Fraction(match[1] + match[2].replace(",", "").rstrip(".") + (match[3] or "")) / divisor


class NumberChecker(AnswerChecker):
    """The answer is a number that differs from a right one by at most the larger tolerance."""

    kind: Literal["number"] = "number"
    tolerance: float = Field(default=0.0, ge=0)
    relative: float = Field(default=1e-6, ge=0)
    """Tolerance as a share of the right number."""

    def check(self, answer: str, rights: Sequence[str], row: dict[str, Any]) -> Grade:
        number, numbers = read_number(answer), [n for n in map(read_number, rights) if n is not None]
        if number is None:
            return Grade(0, "It is not a number.")
        return Grade(any(abs(number - n) <= max(self.tolerance, self.relative * abs(n)) for n in numbers))


class MathChecker(AnswerChecker):
    """The answer, plain or in LaTeX, is mathematically equal to a right one: \\frac{1}{2}, 0.5 and 1/2 are.

    math-verify bounds its own time by SIGALRM, which threads cannot use. It therefore runs in a confined process with
    limits on CPU time and memory. An answer that exceeds them is wrong.
    """

    packages: ClassVar[Mapping[str, str]] = {"math_verify": "math-verify"}
    kind: Literal["math"] = "math"
    max_seconds: int = Field(default=5, ge=1, le=60)

    def prepare(self) -> None:
        try:
            if not self._are_equal("2", ["1+1"], cpu_seconds=60):
                raise Unavailable("reward math: the package math-verify does not work here")
        except (RuntimeError, OSError) as error:
            raise Unavailable(f"reward math: {error}; it needs Linux with Landlock or mounts, and seccomp") from error

    def check(self, answer: str, rights: Sequence[str], row: dict[str, Any]) -> Grade:
        number, *numbers = map(read_number, (answer, *rights))
        if number is not None and None not in numbers:
            return Grade(number in numbers)
        same = normalise_text(answer) in map(normalise_text, rights)
        return Grade(same or (len(answer) <= MAX_FORMULA and self._are_equal(answer, rights, self.max_seconds)))

    def _are_equal(self, answer: str, rights: Sequence[str], cpu_seconds: int) -> bool:
        work = json.dumps([answer, *rights]).encode()
        limits = {"cpu_seconds": cpu_seconds, "memory_bytes": 2**29}
        return run_confined(_RUNNER, work, imports=("math_verify",), **limits).reply == b"true"
