"""What the options of the command line may be, and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from starpod.client.spelling import nearest
from starpod.load.plan import EXTRAS
from starpod.load.report import FORMAT
from starpod.load.schedule import Think, parse_duration
from starpod.load.thresholds import parse_requirement


class Parsed(click.ParamType[Any]):
    """A parameter that a function reads; its ValueError becomes the message."""

    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_mix(text: str) -> dict[str, float]:
    mix = {}
    for part in text.split(","):
        call, equals, share = part.strip().partition("=")
        if call not in EXTRAS:
            raise ValueError(f"{call!r} cannot be mixed in{nearest(call, EXTRAS)}")
        try:
            mix[call] = float(share) if equals else -1.0
        except ValueError:
            mix[call] = -1.0
        if not 0 <= mix[call] <= 1:
            raise ValueError(f"{part!r} is not CALL=SHARE with a share from 0 to 1, as in render=0.1")
    if sum(mix.values()) > 1:
        raise ValueError(f"the shares of {text!r} add up to more than 1")
    return mix


def _parse_ramp(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise ValueError(f"{text!r} is not a list of numbers above 0, as in 16,64,256")
    return values


def _parse_report(text: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{text} cannot be read: {error}") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{text} is not a report of starpod load; --json writes one")
    return report


def _parse_policy(text: str) -> tuple[str, Path | None]:
    kind, _, file = text.partition(":")
    if kind in ("random", "expert") and not file:
        return kind, None
    if kind == "recorded" and file:
        return kind, Path(file)
    raise ValueError(f"{text!r} is not random, expert or recorded:FILE")


DURATION = Parsed("duration", parse_duration)
REQUIREMENT = Parsed("requirement", parse_requirement)
THINK = Parsed("think", Think)
RAMP = Parsed("ramp", _parse_ramp)
MIX = Parsed("mix", _parse_mix)
POLICY = Parsed("policy", _parse_policy)
REPORT = Parsed("report", _parse_report)
