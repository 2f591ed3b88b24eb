"""Grade-school arithmetic in words: a story with numbers, a calculator, and an answer."""

from __future__ import annotations

import random
import re
from typing import Any, Literal

from pydantic import Field, model_validator

from starpod.env_server import INVALID, Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome, digest
from starpod.environments.countdown.expression import MalformedExpression, ParsedExpression, describe, parse

from .picture import draw
from .stories import Problem, draw_problem

MAX_LENGTH = 4_000
"""Maximum number of characters of an action."""

_MOVE = re.compile(r"\s*(calculate|answer)\s*\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)
_FINAL = re.compile(r"####\s*\$?(-?[0-9][0-9,]*(?:\.0+)?)(?![0-9.])")
_TOLD = re.compile(r"[0-9]+|twice|three times")
_WORDS = {"twice": 2, "three times": 3}
_EQUATION_CHARACTERS = "0123456789+-*/() "
_MOST_EQUATIONS = 40
_SHOWN = 20
"""Maximum number of lines of work that are kept for pictures."""
_INSTRUCTIONS = {
    "calculator": (
        "Solve the problem. Each action is either calculate[expression], such as calculate[12 * 3 + 5], which tells "
        "you the value, or answer[number], which ends the episode. Give your answer as a whole number."
    ),
    "steps": (
        "Solve the problem in one reply. Write one equation per line, such as 12 * 3 = 36, and end with #### and the "
        "answer as a whole number: #### 36"
    ),
}


class WordProblemsOptions(EnvironmentOptions):
    """Options for the problems and the form of answers."""

    min_steps: int = Field(default=2, ge=1, le=8, description="Minimum number of calculations of a problem.")
    max_steps: int = Field(default=4, ge=1, le=8, description="Maximum number of calculations of a problem.")
    max_number: int = Field(default=50, ge=5, le=1000, description="Maximum of the numbers in the story.")
    distractors: int = Field(default=0, ge=0, le=4, description="Number of sentences with irrelevant numbers.")
    mode: Literal["calculator", "steps"] = Field(
        default="calculator",
        description="calculator: calculate[...] any number of times, then answer[...]; steps: one reply with an "
        "equation per line, and #### before the answer.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> WordProblemsOptions:
        if self.min_steps > self.max_steps:
            raise ValueError(f"min_steps {self.min_steps} is above max_steps {self.max_steps}; lower it")
        return self


class WordProblems(Environment):
    """Word problems. The seed determines the story; the transitions are deterministic."""

    spec = EnvironmentSpec(
        id="word_problems-v1",
        version="1.1.0",
        title="Word problems: grade-school arithmetic",
        grammar="calculate[expression] or answer[number]; with mode=steps lines of equations that end with #### number",
        render_modes=("text", "png"),
        limits=Limits(max_turns=12, max_actions_per_turn=1, max_actions=12),
    )
    Options = WordProblemsOptions
    options: WordProblemsOptions

    text: str
    steps: tuple[tuple[str, int], ...]
    found: frozenset[int]
    """Indices of the steps whose results were calculated."""
    work: list[str]
    """The latest calculations and answers."""
    verdict: str
    """"right" or "wrong"; "" before the answer."""

    def reset(self, rng: random.Random) -> None:
        options = self.options
        self.text, self.steps = draw_problem(
            rng,
            min_steps=options.min_steps,
            max_steps=options.max_steps,
            largest=options.max_number,
            distractors=options.distractors,
        )
        self.found = frozenset()
        self.work = []
        self.verdict = ""

    @property
    def problem(self) -> Problem:
        return Problem(self.text, self.steps)

    def step(self, action: Any) -> Outcome:
        if not isinstance(action, str) or len(action) > MAX_LENGTH:
            return self._refuse("it is no text, or too long")
        if self.options.mode == "steps":
            return self._read_reply(action)
        move = _MOVE.fullmatch(action)
        if move is None:
            return self._refuse("write calculate[expression] or answer[number]")
        if move[1].lower() == "answer":
            answer = move[2].strip().replace(",", "")
            if not re.fullmatch(r"-?[0-9]{1,20}(\.0+)?", answer):
                return self._refuse("the answer is a whole number")
            return self._end(f"answer {answer}", float(answer), {})
        try:
            calculation = parse(move[2].strip())
        except MalformedExpression as problem:
            return self._refuse(str(problem))
        result = describe(calculation.value)
        self._note(f"{move[2].strip()} = {result if len(result) <= 40 else f'a number of {len(result)} digits'}")
        before = self.found
        self.found |= self._steps_of(calculation)
        return Outcome(effective=self.found != before)

    def _read_reply(self, reply: str) -> Outcome:
        equations = read_equations(reply)
        true = [each for each in equations if each.value is not None and abs(each.value - (each.claim or 0)) < 1e-9]
        for equation in true:
            self.found |= self._steps_of(equation)
        holds = len(true) == len(equations) and bool(self.found)
        self._note(*[line.strip() for line in reply.splitlines() if line.strip()])
        finals = _FINAL.findall(reply)
        answer = float(finals[-1].replace(",", "")) if finals else None
        return self._end("", answer, {"equations_hold": holds})

    def _note(self, *lines: str) -> None:
        self.work = [*self.work, *lines][-_SHOWN:]

    def _steps_of(self, calculation: ParsedExpression) -> frozenset[int]:
        """Return the indices of the steps with this result.

        There are none unless several numbers are combined, all of which are in the story or are results of earlier
        steps. Otherwise a list of equations such as 1 = 1 and 1 + 1 = 2 would include the results of all steps.
        """
        known = {_WORDS.get(word) or int(word) for word in _TOLD.findall(self.text)}
        known |= {self.steps[index][1] for index in self.found}
        if len(calculation.numbers) < 2 or not known.issuperset(calculation.numbers):
            return frozenset()
        return frozenset(index for index, (_, result) in enumerate(self.steps) if result == calculation.value)

    def _refuse(self, problem: str) -> Outcome:
        if self.options.mode == "steps":
            return self._end("", None, {"equations_hold": False})
        self._note(problem)
        return INVALID

    def _end(self, written: str, answer: float | None, criteria: dict[str, bool]) -> Outcome:
        right = answer == self.steps[-1][1]
        if written:
            self._note(written)
        if right:
            self.found |= {len(self.steps) - 1}
        self.verdict = "right" if right else "wrong"
        criteria |= {f"step_{number}": number - 1 in self.found for number in range(1, len(self.steps) + 1)}
        return Outcome(
            float(right),
            terminated=True,
            success=right,
            valid=answer is not None,
            criteria=criteria,
            info={"answer": str(self.steps[-1][1]), "steps": [f"{left} = {right}" for left, right in self.steps]},
        )

    def observe(self) -> str:
        if self.verdict:
            return f"The answer is {self.verdict}."
        return self.work[-1] if self.work else self.text

    def state_key(self) -> bytes:
        return digest(repr((self.text, sorted(self.found), self.verdict)))

    def expert_action(self) -> str | None:
        if self.verdict:
            return None
        if self.options.mode == "steps":
            return "\n".join([*(f"{left} = {right}" for left, right in self.steps), f"#### {self.steps[-1][1]}"])
        expressions = (left for number, (left, _) in enumerate(self.steps) if number not in self.found)
        expression = next(expressions, None)
        return f"calculate[{expression}]" if expression else f"answer[{self.steps[-1][1]}]"

    def score(self) -> float:
        """Return 0.9 * the share of steps that were calculated; after the answer, 1 or 0."""
        if self.verdict:
            return float(self.verdict == "right")
        return 0.9 * len(self.found) / len(self.steps)

    def instructions(self) -> str:
        return _INSTRUCTIONS[self.options.mode]

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return draw(self.text, self.work, self.verdict)
        return "\n".join([self.text, *self.work, *([self.verdict] if self.verdict else [])])


def read_equations(reply: str) -> list[ParsedExpression]:
    """Return the calculation of each line that ends with `expression = integer`. A number alone is no calculation.

    The value is None if the expression has none, as in 1 / 0.
    """
    equations: list[ParsedExpression] = []
    for line in reply.splitlines():
        left, equals, right = line.rpartition("=")
        number = right.split()[0].strip("$.,") if right.split() else ""
        expression = left[len(left.rstrip(_EQUATION_CHARACTERS)) :].strip()
        if equals and re.fullmatch(r"[0-9]{1,20}", number) and expression and len(equations) < _MOST_EQUATIONS:
            try:
                equation = parse(f"{expression} = {number}")
            except MalformedExpression:
                equation = ParsedExpression((), None, int(number))
            if len(equation.numbers) != 1:
                equations.append(equation)
    return equations
