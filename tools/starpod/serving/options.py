"""Code that the options of all commands share: headings in the help, and values with a unit."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([a-zµ]*)", re.IGNORECASE)


class Command(click.Command):
    """A command whose help shows options under headings.

    Args:
        headings: Names of parameters by heading. Options that are not named follow under "Other options".
    """

    def __init__(self, *arguments: Any, headings: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.headings = headings or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        rows = {option.name: row for option in options if (row := option.get_help_record(ctx))}
        for heading, names in self.headings.items():
            with formatter.section(heading):
                formatter.write_dl([rows.pop(name) for name in names])
        with formatter.section("Other options" if self.headings else "Options"):
            formatter.write_dl([*rows.values()])


class Number(click.FloatRange):
    """The type of an option with a finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class ParsedOption(click.ParamType[Any]):
    """The type of an option whose value a function parses. The function's ValueError is the error message."""

    def __init__(self, parse: Callable[[str], Any], name: str = "text") -> None:
        self._parse, self.name = parse, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


def duration(least: float = 0.0, *, bare: str = "s") -> ParsedOption:
    """Return the type of an option in seconds, given as 30s, 20ms or 30. bare: unit of a number without a unit."""
    return ParsedOption(functools.partial(parse_duration, least=least, bare=bare), "duration")


def size(least: int = 1, *, bare: str = "B") -> ParsedOption:
    """Return the type of an option in bytes, given as 16MiB or 65536. bare: unit of a number without a unit."""
    return ParsedOption(lambda text: int(_parse(text, BYTES, bare, least, "a size", "16MiB or 512KiB")), "size")


def parse_duration(text: str, *, least: float = 0.0, bare: str = "") -> float:
    """Return the seconds of a duration such as `20ms`, `1.5s`, `5m` or 0.

    Args:
        text: a number and a unit.
        least: the minimum in seconds.
        bare: unit of a number without a unit; empty: only 0 needs none.

    Raises:
        ValueError: the text is no duration, or less than `least`.
    """
    unit = bare or "s" * (text.strip() == "0")
    return _parse(text, SECONDS, unit, least, "a duration", "20ms, 1.5s or 5m")


def _parse(text: str, units: Mapping[str, float], bare: str, least: float, noun: str, examples: str) -> float:
    by_lower_case = {unit.lower(): factor for unit, factor in units.items()}
    match = _NUMBER.fullmatch(text.strip())
    factor = match and by_lower_case.get((match[2] or bare).lower())
    if not match or not factor:
        raise ValueError(f"{text!r} is not {noun}: write a number and a unit, as in {examples}")
    if not least <= (value := float(match[1]) * factor) < math.inf:
        raise ValueError(f"{text!r} is not in the range: write {noun} of at least {show_quantity(least, units)}")
    return value


def show_quantity(value: float, units: Mapping[str, float]) -> str:
    """Return a value in the largest unit in which it is a whole number, such as 10m."""
    counts = {unit: round(value / factor, 9) for unit, factor in units.items()}
    fitting = [unit for unit, count in counts.items() if count >= 1 and count.is_integer()]
    return f"{counts[fitting[-1]]:g}{fitting[-1]}" if fitting else "0"
