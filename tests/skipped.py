"""What a report of `starpod check` leaves out."""

from collections.abc import Iterable

BY_TIME = ("too busy", "past its deadline", "the shortest timeout")
"""In the reasons that the pace of this machine decides: too slow to be in time, or too fast to be late."""


def not_by_time(skipped: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Reason by requirement, without those that may differ from run to run."""
    return {number: reason for number, reason in skipped if not any(words in reason for words in BY_TIME)}
