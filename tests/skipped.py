"""Skipped requirements in a report of `starpod check`."""

from collections.abc import Iterable

BY_TIME = ("too busy", "past its deadline", "the shortest timeout")
"""In the reasons that the pace of this machine decides: too slow to be in time, or too fast to be late."""


def not_by_time(skipped: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the reason by requirement, without requirements whose skipping depends on time."""
    return {number: reason for number, reason in skipped if not any(words in reason for words in BY_TIME)}
