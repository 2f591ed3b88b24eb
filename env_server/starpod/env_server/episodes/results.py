"""Checks of what an environment's methods return, before it is sent."""

from __future__ import annotations

from collections.abc import Mapping
from sys import float_info
from typing import Any, NamedTuple

import numpy as np

from starpod.env_server.authoring.environment import BadResult, Outcome
from starpod.v1.values import DEEPEST_INFO, MAX_REWARD


class TurnDetails(NamedTuple):
    """Optional fields of a transition, which an environment may set."""

    reward_parts: Mapping[str, float] | None = None
    """Components of the reward by name, summed over the turn."""
    criteria: Mapping[str, bool] | None = None
    """Whether each named criterion was met."""
    info: Mapping[str, Any] | None = None
    """Diagnostic data, as JSON values."""


def expect_text(method: str, text: Any) -> str:
    """Return a text that a method returned. Raises BadResult if it is not one that can be sent."""
    if not isinstance(text, str):
        raise BadResult(method, f"{type(text).__name__}, not str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadResult.unsendable(method, text, error) from error
    return text


def expect_outcome(result: Any, error: Exception) -> None:
    """Raise BadResult from the error if the result of `step` is the cause of it."""
    if not isinstance(result, Outcome | None):
        raise BadResult("step", f"{repr(result)[:80]}; return an Outcome") from error
    if result is not None:
        expect_number("step", "a reward of", result.reward, MAX_REWARD)


def expect_number(method: str, what: str, value: Any, limit: float = float_info.max) -> Any:
    """Return a number or None that a method returned. Raises BadResult for anything else and beyond the limit.

    Args:
        what: words before the value in the message, such as "a reward of"; may be empty.
        limit: largest absolute value; by default any finite number is valid.
    """
    try:
        is_good = value is None or abs(float(value)) <= limit
    except (TypeError, ValueError):
        is_good = False
    if is_good and not isinstance(value, str | bytes):
        return value
    rule = "it must be finite" + (f" and at most {limit:g}" if limit < float_info.max else "")
    raise BadResult(method, f"{what} {repr(value)[:80]}; {rule}".lstrip())


def _expect_json(info: Mapping[str, Any]) -> None:
    """Raise BadResult if `info` holds a number that JSON cannot express, or is nested too deeply for clients."""
    level: list[Any] = [info]
    for _ in range(DEEPEST_INFO):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, np.generic | np.ndarray):
                value = value.tolist()
            if isinstance(value, Mapping):
                next_level += value.values()
            elif isinstance(value, list | tuple):
                next_level += value
            elif isinstance(value, float):
                expect_number("step", "info with the number", value)
        if not next_level:
            return
        level = next_level
    raise BadResult("step", f"info that is nested more than {DEEPEST_INFO} deep")


def merge(details: TurnDetails | None, outcome: Outcome) -> TurnDetails:
    """Add an outcome to the turn's details. Reward parts are added up; later criteria and info replace earlier ones."""
    parts, criteria, info = details or TurnDetails()
    if outcome.reward_parts is not None:
        parts = dict(parts or {})
        for name, value in outcome.reward_parts.items():
            expect_number("step", f"a reward part {name!r} of", value, MAX_REWARD)
            parts[name] = expect_number(
                "step", f"reward parts {name!r} that add up to", parts.get(name, 0.0) + value, MAX_REWARD
            )
    if outcome.criteria is not None:
        criteria = {**(criteria or {}), **outcome.criteria}
    if outcome.info is not None:
        _expect_json(outcome.info)
        info = {**(info or {}), **outcome.info}
    return TurnDetails(parts, criteria, info)
