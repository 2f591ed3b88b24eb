"""Reach a target with given numbers and arithmetic. Answers are evaluated as Python expressions, but never run."""

from __future__ import annotations

import random
from typing import Any, Literal

from pydantic import Field, model_validator

from starpod.env_server import Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome, digest

from .expression import MAX_LENGTH, MalformedExpression, describe, parse
from .picture import draw, draw_text, format_points
from .puzzles import draw_puzzle, solve

TOLERANCE = 1e-5
"""Maximum difference between a value and the target, because of rounding errors."""


class CountdownOptions(EnvironmentOptions):
    """Options for the puzzle and its rewards."""

    numbers: tuple[int, ...] | None = Field(
        default=None, description="Numbers instead of drawn ones: 1 to 4 integers from 1 to 10000. Needs `target`."
    )
    target: int | None = Field(
        default=None, ge=-1_000_000, le=1_000_000, description="The target for `numbers`. It need not be reachable."
    )
    min_count: int = Field(default=3, ge=2, le=4, description="Minimum number of numbers in a drawn puzzle.")
    max_count: int = Field(default=4, ge=2, le=4, description="Maximum number of numbers in a drawn puzzle.")
    max_number: int = Field(default=99, ge=2, le=1000, description="Maximum of drawn numbers.")
    max_target: int = Field(default=999, ge=10, le=100_000, description="Maximum of drawn targets.")
    operators: Literal["+-", "+-*/"] = Field(
        default="+-",
        description="Operators with which a drawn puzzle can be solved. Answers may always use all operators.",
    )
    reward_correct: float = Field(
        default=1.0, description="Reward if the expression uses the numbers and reaches the target."
    )
    reward_numbers: float = Field(default=0.1, description="Reward if it uses the numbers and misses the target.")
    reward_wrong: float = Field(default=0.0, description="Reward of any other answer.")

    @model_validator(mode="after")
    def _consistent(self) -> CountdownOptions:
        if (self.numbers is None) != (self.target is None):
            raise ValueError("numbers and target make one puzzle; give both or neither")
        if self.numbers is not None:
            if not 1 <= len(self.numbers) <= 4 or not all(1 <= number <= 10_000 for number in self.numbers):
                raise ValueError("numbers must be 1 to 4 whole numbers from 1 to 10000")
            if unused_options := self.changed("min_count", "max_count", "max_number", "max_target", "operators"):
                raise ValueError(
                    f"{', '.join(unused_options)} only affect drawn puzzles: leave them out, or leave out numbers"
                )
        if self.min_count > self.max_count:
            raise ValueError(f"min_count {self.min_count} is above max_count {self.max_count}; lower it")
        return self


class Countdown(Environment):
    """An episode of one answer. The seed determines the puzzle. Every puzzle has a solution by construction."""

    spec = EnvironmentSpec(
        id="countdown-v1",
        version="1.0.0",
        title="Countdown",
        instructions=(
            "Combine all the given numbers into an arithmetic expression whose value is the target. Use every number "
            "exactly as often as it is given, and no other number. You may use +, -, *, / and parentheses; fractions on"
            " the way are fine. Answer with the expression alone, for example (25 - 5) * 3; ending it with = and the "
            "target is allowed."
        ),
        grammar=(
            "an expression of whole numbers, + - * / // % **, signs and parentheses, optionally followed by = and the "
            "target; "
            f"at most {MAX_LENGTH} characters"
        ),
        render_modes=("text", "png"),
        limits=Limits(max_turns=1, max_actions_per_turn=1, max_actions=1),
    )
    Options = CountdownOptions
    options: CountdownOptions

    numbers: tuple[int, ...]
    target: int
    answer: str | None
    """The answer, cut to MAX_LENGTH."""
    points: float

    def reset(self, rng: random.Random) -> None:
        options = self.options
        if options.numbers is not None and options.target is not None:
            self.numbers, self.target = options.numbers, options.target
        else:
            self.numbers, self.target = draw_puzzle(
                rng,
                min_count=options.min_count,
                max_count=options.max_count,
                max_number=options.max_number,
                max_target=options.max_target,
                operators=options.operators,
            )
        self.answer = None
        self.points = 0.0

    def step(self, action: Any) -> Outcome:
        options = self.options
        try:
            expression = parse(action if isinstance(action, str) else "")
        except MalformedExpression as problem:
            return self._end(action, options.reward_wrong, False, False, {"problem": str(problem)}, valid=False)
        right_numbers = sorted(expression.numbers) == sorted(self.numbers)
        is_near = expression.value is not None and abs(expression.value - self.target) < TOLERANCE
        hit = right_numbers and is_near and expression.claim in (None, self.target)
        reward = options.reward_correct if hit else options.reward_numbers if right_numbers else options.reward_wrong
        return self._end(action, reward, right_numbers, hit, {"value": describe(expression.value)})

    def _end(
        self, action: Any, reward: float, numbers: bool, hit: bool, info: dict[str, str], valid: bool = True
    ) -> Outcome:
        self.answer = action[:MAX_LENGTH] if isinstance(action, str) else ""
        self.points = reward
        criteria = {"uses_the_numbers": numbers, "hits_the_target": hit}
        return Outcome(
            reward, terminated=True, success=hit, valid=valid, effective=numbers, criteria=criteria, info=info
        )

    def observe(self) -> str:
        if self.answer is None:
            return f"Target: {self.target}, nums: {list(self.numbers)}"
        return f"Your answer get {format_points(self.points)} points."

    def state_key(self) -> bytes:
        return digest(repr((self.numbers, self.target, self.answer is not None, self.points)))

    def expert_action(self) -> str | None:
        return solve(self.numbers, self.target) if self.answer is None else None

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return draw(self.numbers, self.target, self.answer, self.points, self.options.reward_correct)
        return draw_text(self.numbers, self.target, self.answer, self.points)
