"""What a generator writes down while it runs, and hands over at the end of each interval."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from starpod.load.histogram import Histogram

Key = tuple[int, str, bool]
"""Which server, which call, and whether the latency counts from the sending (True) or from when the call was due."""

ANY_TIME = ("open", "close", "renew")
"""Calls that count whenever they happen: most of them come before and after the time that is measured."""

EXAMPLE_CHARACTERS = 300


@dataclass(slots=True)
class Failures:
    """Errors of one class of one call."""

    count: int = 0
    example: str = ""


@dataclass(slots=True)
class ServerTime:
    """What the servers told of their time, in seconds, summed over so many calls. queue: known of unary calls alone."""

    calls: int = 0
    environment: float = 0.0
    queue: float = 0.0
    total: float = 0.0

    def add(self, other: ServerTime) -> None:
        self.calls += other.calls
        self.environment += other.environment
        self.queue += other.queue
        self.total += other.total


@dataclass(slots=True)
class Interval:
    """What happened in one interval of a stage. place: its number; -1: outside the time that is measured.

    steps, calls: answered within it, for each server. late: seconds by which timers fired late.
    """

    place: int
    latencies: dict[Key, Histogram]
    steps: dict[int, int]
    calls: int
    errors: dict[tuple[int, str, str], Failures]
    late: Histogram

    @classmethod
    def empty(cls, place: int) -> Interval:
        return cls(place, {}, {}, 0, {}, Histogram.sum(()))

    def add(self, other: Interval) -> None:
        """Takes in what another generator saw, or what came after the end."""
        for key, histogram in other.latencies.items():
            known = self.latencies.get(key)
            self.latencies[key] = histogram if known is None else Histogram.sum((known, histogram))
        for link, steps in other.steps.items():
            self.steps[link] = self.steps.get(link, 0) + steps
        self.calls += other.calls
        for error, failures in other.errors.items():
            seen = self.errors.setdefault(error, Failures())
            seen.count += failures.count
            seen.example = seen.example or failures.example
        self.late = Histogram.sum((self.late, other.late))


@dataclass(slots=True)
class Log:
    """The present interval.

    counting: the measured time runs. due_from, due_until: latencies of calls that were due in between count.
    both: sending and being due are two things, as in an open loop.
    """

    due_from: float = float("inf")
    due_until: float = float("inf")
    counting: bool = False
    both: bool = False
    latencies: defaultdict[Key, list[float]] = field(default_factory=lambda: defaultdict(list))
    steps: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    calls: int = 0
    errors: defaultdict[tuple[int, str, str], Failures] = field(default_factory=lambda: defaultdict(Failures))
    late: list[float] = field(default_factory=list)
    server: ServerTime = field(default_factory=ServerTime)

    def answered(self, link: int, call: str, due: float, sent: float, now: float) -> None:
        """A call came back. due: when it should have been sent."""
        if self.counting:
            self.calls += 1
            if call == "step":
                self.steps[link] += 1
        if self.due_from <= due < self.due_until or call in ANY_TIME:
            self.latencies[link, call, False].append(now - due)
            if self.both:
                self.latencies[link, call, True].append(now - sent)

    def failed(self, link: int, call: str, kind: str, message: str) -> None:
        """A call failed. That counts whenever it happens, because errors are never normal."""
        failures = self.errors[link, call, kind]
        failures.count += 1
        failures.example = failures.example or message[:EXAMPLE_CHARACTERS]

    def take(self, place: int) -> Interval:
        """What was written since the last time."""
        interval = Interval(
            place,
            {key: Histogram.of(seconds) for key, seconds in self.latencies.items() if seconds},
            dict(self.steps),
            self.calls,
            dict(self.errors),
            Histogram.of(self.late),
        )
        self.latencies.clear()
        self.steps.clear()
        self.calls = 0
        self.errors.clear()
        self.late = []
        return interval
