"""Parsing and evaluation of answers as Python expressions, without running them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_LENGTH = 200
"""Maximum number of characters of an answer."""
MAX_POWER_BITS = 10_000
"""Maximum number of bits of a power of integers. Larger powers have no value; 1000 ** 1000 is small enough."""

Number = int | float

_CLAIM = re.compile(r"\s*=\s*([+-]?[0-9]+)\s*\Z")
_STRANGE = re.compile(r"[^-+*/%()0-9 \t\n\r\f]")
_KNOWN = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)


class MalformedExpression(ValueError):
    """The text is not an expression; the message says why."""


@dataclass(frozen=True, slots=True)
class ParsedExpression:
    """A parsed answer."""

    numbers: tuple[int, ...]
    """Numbers in the expression, in order."""
    value: Number | None
    """Value of the expression; None if it has none, as in 1 / 0."""
    claim: int | None
    """The number after `=`, if any."""


def parse(text: str) -> ParsedExpression:
    """Parse `expression` or `expression = integer`. Raises Malformed.

    Expressions have Python's syntax, but only with integers, + - * / // % **, signs and parentheses.
    """
    if len(text) > MAX_LENGTH:
        raise MalformedExpression(f"longer than {MAX_LENGTH} characters")
    claim = _CLAIM.search(text)
    written = text[: claim.start()] if claim else text
    if match := _STRANGE.search(written):
        raise MalformedExpression(f"{match[0]!r} has no meaning here")
    try:
        tree = ast.parse(written.lstrip(" \t"), mode="eval")
    except (SyntaxError, MemoryError, RecursionError):
        raise MalformedExpression(
            "it is no expression: a number, an operator or a parenthesis is missing, or a number starts with 0"
        ) from None
    if not all(isinstance(node, _KNOWN) for node in ast.walk(tree)):
        raise MalformedExpression(
            "a parenthesis follows a number, or is empty: write the operator or the number that is missing"
        )
    numbers = tuple(int(digits) for digits in re.findall("[0-9]+", written))
    try:
        value = _value(tree.body)
    except ArithmeticError:  # by zero, too large, or a root of a negative number
        value = None
    return ParsedExpression(numbers, value, int(claim[1]) if claim else None)


def describe(value: Number | None) -> str:
    """Format a value: integers in full, other numbers with ten digits."""
    if value is None:
        return "undefined"
    if isinstance(value, int):
        return str(value) if value.bit_length() < MAX_POWER_BITS else f"a number of {value.bit_length()} bits"
    return f"{value:.10g}"


def _value(node: ast.expr) -> Number:
    """Evaluate a node as Python does, with floating point. Raises ArithmeticError if it has no value."""
    match node:
        case ast.BinOp(left=left, op=operation, right=right):
            return _OPERATORS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
    assert isinstance(node, ast.Constant) and isinstance(node.value, int)
    return node.value


def _power(base: Number, exponent: Number) -> Number:
    are_whole = isinstance(base, int) and isinstance(exponent, int)
    if are_whole and abs(base) > 1 and int(base).bit_length() * exponent > MAX_POWER_BITS:
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
