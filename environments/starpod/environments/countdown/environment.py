"""Reach a target with given numbers and arithmetic. Answers are read and worked out as Python would, and never run."""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from PIL import Image, ImageDraw
from pydantic import Field, model_validator

from starpod.env_server.drawing import fit_text, png
from starpod.env_server.environment import Environment, EnvironmentOptions, EnvironmentSpec, Limits, Outcome

MAX_LENGTH = 200
"""Characters of an answer."""
MAX_POWER_BITS = 10_000
"""Of a power of whole numbers: 1000 ** 1000 is the largest of drawn numbers. What is larger has no value."""
TOLERANCE = 1e-5
"""How far a value may be off the target, for the errors of floating point."""


class CountdownOptions(EnvironmentOptions):
    """The puzzle and its rewards."""

    numbers: tuple[int, ...] | None = Field(
        default=None, description="The numbers of a puzzle of your own, 1 to 4 of them; needs `target`."
    )
    target: int | None = Field(
        default=None, ge=-1_000_000, le=1_000_000, description="The target of a puzzle of your own; needs `numbers`."
    )
    min_count: int = Field(default=3, ge=2, le=4, description="Fewest numbers of a drawn puzzle.")
    max_count: int = Field(default=4, ge=2, le=4, description="Most numbers of a drawn puzzle.")
    max_number: int = Field(default=99, ge=2, le=1000, description="Drawn numbers go from 1 to this.")
    max_target: int = Field(default=999, ge=10, le=100_000, description="Drawn targets go from 1 to this.")
    operators: Literal["+-", "+-*/"] = Field(
        default="+-",
        description="What some solution of a drawn puzzle gets by with. Answers may use every operator either way.",
    )
    reward_correct: float = Field(
        default=1.0, description="For an expression that uses the numbers and hits the target."
    )
    reward_numbers: float = Field(default=0.1, description="For one that uses the numbers and misses the target.")
    reward_wrong: float = Field(default=0.0, description="For every other answer.")

    @model_validator(mode="after")
    def _consistent(self) -> CountdownOptions:
        if (self.numbers is None) != (self.target is None):
            raise ValueError("numbers and target make one puzzle; give both or neither")
        if self.numbers is not None:
            if not 1 <= len(self.numbers) <= 4 or not all(1 <= number <= 10_000 for number in self.numbers):
                raise ValueError("numbers must be 1 to 4 whole numbers from 1 to 10000")
            drawn = ("min_count", "max_count", "max_number", "max_target", "operators")
            fields = type(self).model_fields
            if idle := [name for name in drawn if getattr(self, name) != fields[name].default]:
                raise ValueError(f"{', '.join(idle)} only shape drawn puzzles; leave out that or numbers")
        if self.min_count > self.max_count:
            raise ValueError(f"min_count {self.min_count} is above max_count {self.max_count}; lower it")
        return self


class Countdown(Environment):
    """One answer decides. The seed fixes the puzzle, which can be solved by construction; nothing is left to chance."""

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
    """As it was given, cut to the longest that is read."""
    points: float

    def reset(self, rng: random.Random) -> None:
        options = self.options
        if options.numbers is not None and options.target is not None:
            self.numbers, self.target = options.numbers, options.target
        else:
            self.numbers, self.target = draw_puzzle(rng, options)
        self.answer = None
        self.points = 0.0

    def step(self, action: Any) -> Outcome:
        options = self.options
        try:
            parsed = parse(action if isinstance(action, str) else "")
        except Malformed as problem:
            return self._end(action, options.reward_wrong, False, False, {"problem": str(problem)}, valid=False)
        right_numbers = sorted(parsed.numbers) == sorted(self.numbers)
        near = parsed.value is not None and abs(parsed.value - self.target) < TOLERANCE
        hit = right_numbers and near and parsed.claim in (None, self.target)
        reward = options.reward_correct if hit else options.reward_numbers if right_numbers else options.reward_wrong
        return self._end(action, reward, right_numbers, hit, {"value": _shown(parsed.value)})

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
        return f"Your answer get {_plain(self.points)} points."

    def state_key(self) -> bytes:
        state = repr((self.numbers, self.target, self.answer is not None, self.points))
        return hashlib.blake2b(state.encode(), digest_size=16).digest()

    def expert_action(self) -> str | None:
        return solve(self.numbers, self.target) if self.answer is None else None

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return png(_draw(self.numbers, self.target, self.answer, self.points, self.options.reward_correct))
        return _text(self.numbers, self.target, self.answer, self.points)


def _plain(points: float) -> str:
    return str(int(points)) if points == int(points) else str(points)


# --- puzzles -----------------------------------------------------------------------------------------------------


def draw_puzzle(rng: random.Random, options: CountdownOptions) -> tuple[tuple[int, ...], int]:
    """Numbers and a target between 1 and `max_target` that some expression of `operators` reaches."""
    while True:
        count = rng.randint(options.min_count, options.max_count)
        numbers = tuple(rng.randint(1, options.max_number) for _ in range(count))
        target = _combine(rng, numbers, options.operators)
        if 1 <= target <= options.max_target:
            return numbers, target


def _combine(rng: random.Random, numbers: Sequence[int], operators: str) -> int:
    """The value of a random expression of all the numbers; with "+-*/" every step of it is a whole number."""
    if operators == "+-":
        return sum(rng.choice((-1, 1)) * number for number in numbers)
    pool = list(numbers)
    while len(pool) > 1:
        left, right = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        results = [left + right, left - right, left * right]
        if right and left % right == 0:
            results.append(left // right)
        pool.append(rng.choice(results))
    return pool[0]


def solvable_by_signs(numbers: Sequence[int], target: int) -> bool:
    """Whether sums and differences alone reach the target, each number used once, a leading minus allowed.

    RAGEN's filter of its data set, except that it looks at the first four numbers only.
    """
    return _signs(numbers, target) is not None


def _signs(numbers: Sequence[int], target: int) -> tuple[int, ...] | None:
    for signs in itertools.product((1, -1), repeat=len(numbers)):
        if sum(sign * number for sign, number in zip(signs, numbers, strict=True)) == target:
            return signs
    return None


@functools.lru_cache(maxsize=256)
def solve(numbers: tuple[int, ...], target: int) -> str | None:
    """An expression of all the numbers whose value is the target; None if there is none.

    Sums and differences first, then everything: up to 20 ms for four numbers.
    """
    if signs := _signs(numbers, target):
        text = " ".join(f"{'+' if sign > 0 else '-'} {number}" for sign, number in zip(signs, numbers, strict=True))
        return text.removeprefix("+ ")
    found = _search([(Fraction(number), str(number)) for number in numbers], target)
    return found and found[1:-1]


def _search(pool: list[tuple[Fraction, str]], target: int) -> str | None:
    """Makes one value of any two until one is left, in every way there is."""
    if len(pool) == 1:
        value, text = pool[0]
        return text if value == target else None
    for i, j in itertools.combinations(range(len(pool)), 2):
        rest = [pool[k] for k in range(len(pool)) if k not in (i, j)]
        for result in _results(*pool[i], *pool[j]):
            if found := _search([*rest, result], target):
                return found
    return None


def _results(a: Fraction, a_text: str, b: Fraction, b_text: str) -> list[tuple[Fraction, str]]:
    """What two values make, by any operator and in either order."""
    results = [
        (a + b, f"({a_text} + {b_text})"),
        (a - b, f"({a_text} - {b_text})"),
        (b - a, f"({b_text} - {a_text})"),
        (a * b, f"({a_text} * {b_text})"),
    ]
    if b:
        results.append((a / b, f"({a_text} / {b_text})"))
    if a:
        results.append((b / a, f"({b_text} / {a_text})"))
    return results


# --- answers -----------------------------------------------------------------------------------------------------


class Malformed(ValueError):
    """The text is not an expression; the message says why."""


Number = int | float


@dataclass(frozen=True, slots=True)
class Parsed:
    """An expression: its numbers in order, its value (None: it has none), and what it was said to equal."""

    numbers: tuple[int, ...]
    value: Number | None
    claim: int | None


_CLAIM = re.compile(r"\s*=\s*([+-]?[0-9]+)\s*\Z")
_STRANGE = re.compile(r"[^-+*/%()0-9 \t\n\r\f]")
_KNOWN = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)


def parse(text: str) -> Parsed:
    """Reads `expression` or `expression = integer`. Raises Malformed.

    Python says what an expression is, of whole numbers, + - * / // % **, signs and parentheses alone.
    """
    if len(text) > MAX_LENGTH:
        raise Malformed(f"longer than {MAX_LENGTH} characters")
    claim = _CLAIM.search(text)
    written = text[: claim.start()] if claim else text
    if strange := _STRANGE.search(written):
        raise Malformed(f"{strange[0]!r} has no meaning here")
    try:
        tree = ast.parse(written.lstrip(" \t"), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise Malformed(
            "it is no expression: a number, an operator or a parenthesis is missing, or a number starts with 0"
        ) from None
    if not all(isinstance(node, _KNOWN) for node in ast.walk(tree)):
        raise Malformed("a parenthesis follows a number, or is empty: write the operator or the number that is missing")
    numbers = tuple(int(digits) for digits in re.findall("[0-9]+", written))
    try:
        value = _value(tree.body)
    except ArithmeticError:  # by zero, too large, or a root of a negative number
        value = None
    return Parsed(numbers, value, int(claim[1]) if claim else None)


def _value(node: ast.expr) -> Number:
    """What Python would make of it, floating point included. Raises ArithmeticError where it has no value."""
    match node:
        case ast.BinOp(left=left, op=operation, right=right):
            return _OPERATORS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
    assert isinstance(node, ast.Constant) and isinstance(node.value, int)
    return node.value


def _power(base: Number, exponent: Number) -> Number:
    whole = isinstance(base, int) and isinstance(exponent, int)
    if whole and abs(base) > 1 and int(base).bit_length() * exponent > MAX_POWER_BITS:
        raise OverflowError("too large a power")
    power: Number | complex = base**exponent
    if isinstance(power, complex):
        raise ArithmeticError("a root of a negative number")
    return power


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _shown(value: Number | None) -> str:
    """A value for people: whole numbers in full, others with ten digits."""
    if value is None:
        return "undefined"
    if isinstance(value, int):
        return str(value) if value.bit_length() < MAX_POWER_BITS else f"a number of {value.bit_length()} bits"
    return f"{value:.10g}"


# --- the picture -------------------------------------------------------------------------------------------------


def _text(numbers: Sequence[int], target: int, answer: str | None, points: float) -> str:
    cells = [f"{number:^{len(str(number)) + 2}}" for number in numbers]
    lines = [
        f"Target {target}",
        "  ".join(f"┌{'─' * len(cell)}┐" for cell in cells),
        "  ".join(f"│{cell}│" for cell in cells),
        "  ".join(f"└{'─' * len(cell)}┘" for cell in cells),
    ]
    if answer is not None:
        lines.append(f"{answer!r}: {_plain(points)} points")
    return "\n".join(lines)


_SCALE = 3  # drawn three times too large and reduced, for smooth edges
_FELT, _INK, _PAPER, _GOLD, _GREEN, _RED = (
    (29, 84, 78), (35, 40, 52), (255, 251, 240), (246, 196, 83), (72, 170, 110), (206, 80, 76),
)  # fmt: skip


def _draw(numbers: Sequence[int], target: int, answer: str | None, points: float, best: float) -> Image.Image:
    """A picture of 480 x 300 pixels: the target on a display, the numbers on cards, the answer below."""
    s = _SCALE
    canvas = Image.new("RGB", (480 * s, 300 * s), _FELT)
    draw = ImageDraw.Draw(canvas)

    def box(left: float, top: float, right: float, bottom: float, radius: int, fill: tuple[int, int, int]) -> None:
        draw.rounded_rectangle((left * s, top * s, right * s, bottom * s), radius * s, fill)

    def centred(x: float, y: float, text: str, width: int, size: int, fill: tuple[int, int, int]) -> None:
        fit_text(draw, (x * s, y * s), text, width * s, size * s, fill)

    box(10, 10, 470, 290, 16, (36, 98, 90))
    box(140, 26, 340, 108, 12, (14, 22, 30))
    box(146, 32, 334, 102, 8, (24, 36, 46))
    centred(240, 46, "TARGET", 120, 12, (150, 170, 180))
    centred(240, 77, str(target), 170, 46, _GOLD)

    width, gap = 76, 14
    left = 240 - (len(numbers) * (width + gap) - gap) / 2
    for place, number in enumerate(numbers):
        x, y = left + place * (width + gap), 130 + 3 * (place % 2)
        box(x + 3, y + 5, x + width + 3, y + 95, 10, (22, 64, 60))
        box(x, y, x + width, y + 90, 10, _PAPER)
        box(x + 5, y + 5, x + width - 5, y + 85, 7, (244, 236, 216))
        centred(x + width / 2, y + 45, str(number), width - 16, 36, _INK)

    if answer is None:
        for mark in range(5):
            centred(120 + 60 * mark, 260, "+-*/="[mark], 30, 26, (120, 170, 160))
    else:
        colour = _GREEN if points >= best else _GOLD if points > 0 else _RED
        box(30, 240, 450, 278, 10, _PAPER)
        box(380, 240, 450, 278, 10, colour)
        shown = "".join(character if character.isprintable() else " " for character in answer)
        centred(205, 259, shown if len(shown) <= 60 else shown[:59] + "…", 330, 20, _INK)
        centred(415, 259, f"{points:g}", 60, 20, _INK)
    return canvas.reduce(_SCALE)
