"""Measurements of a run: latencies, steps, errors by class, and the servers' own times.

A generator writes into a Log and hands over an Interval at a time; GeneratorProcesses adds them up in a StageResult.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hdrh.histogram import HdrHistogram

from starpod.client.errors import StarpodError
from starpod.load.plan import Stage

HIGHEST = 3_600_000_000_000
"""Nanoseconds of the longest latency; what is longer counts as this."""
DIGITS = 3

ANY_TIME = ("open", "close", "renew")
"""Calls that count whenever they happen: most of them come before and after the time that is measured."""
EXAMPLE_CHARACTERS = 300

ERROR_CLASSES = {
    "BAD_ARGUMENT": "bad_argument",
    "UNKNOWN_ENVIRONMENT": "bad_argument",
    "UNKNOWN_VERSION": "bad_argument",
    "OUT_OF_ORDER": "bad_argument",
    "EPISODE_OVER": "bad_argument",
    "KEY_REUSED": "bad_argument",
    "INCOMPATIBLE_SNAPSHOT": "bad_argument",
    "UNSUPPORTED": "bad_argument",
    "TOO_LARGE": "bad_argument",
    "ENVIRONMENT_BUG": "environment_bug",
    "OVERLOADED": "overload",
    "UNKNOWN_SESSION": "lost_session",
    "SESSION_LOST": "lost_session",
    "DEADLINE": "deadline",
    "SERVER_BUG": "server_bug",
    "DRAINING": "refused",
    "UNAUTHENTICATED": "refused",
}
"""The class of each of the protocol's reasons. Errors are counted by class and never mixed with latencies."""

Array = np.ndarray[Any, np.dtype[np.int64]]


def error_class(error: StarpodError) -> str:
    """One of requirements.CLASSES: by the protocol's reason; without one it came from the transport."""
    return ERROR_CLASSES.get(error.reason, "transport")


class Histogram:
    """An HdrHistogram of latencies in nanoseconds, from a microsecond to an hour."""

    __slots__ = ("hdr",)

    def __init__(self, seconds: Sequence[float] = ()) -> None:
        self.hdr = HdrHistogram(1, HIGHEST, DIGITS)
        self.record(seconds)

    @classmethod
    def sum(cls, parts: Iterable[Histogram]) -> Histogram:
        """All of them as one: the counts of each bucket are added, nothing is rounded again."""
        whole = cls()
        for part in parts:
            if len(part):
                whole.hdr.add(part.hdr)
        return whole

    def record(self, seconds: Sequence[float]) -> None:
        """Takes in latencies in seconds, rounded to microseconds."""
        if not len(seconds):
            return
        microseconds = np.clip(np.rint(np.asarray(seconds, np.float64) * 1e6), 0, HIGHEST // 1000).astype(np.int64)
        values, counts = np.unique(microseconds, return_counts=True)  # HdrHistogram takes 4 µs for each value
        for value, count in zip((1000 * values).tolist(), counts.tolist(), strict=True):
            self.hdr.record_value(value, count)

    def __len__(self) -> int:
        return int(self.hdr.get_total_count())

    @property
    def counts(self) -> Array:
        """How many latencies fell into each of HdrHistogram's buckets."""
        counts: Array = np.frombuffer(self.hdr.counts, np.int64)
        return counts

    @property
    def mean(self) -> float:
        """Seconds; not a number where nothing was counted."""
        return float(self.counts @ bucket_ceilings() / len(self) / 1e9) if len(self) else float("nan")

    def percentiles(self, *percents: float) -> list[float]:
        """For each the seconds that so many percent do not exceed; 0: the least. Not a number where there is none."""
        if not len(self):
            return [float("nan")] * len(percents)
        found = self.hdr.get_percentile_to_value_dict(percents)
        return [found[percent] / 1e9 for percent in percents]

    def encode(self) -> str:
        """HdrHistogram's own compressed form (V2) in base64: other tools read it too."""
        return str(self.hdr.encode().decode("ascii"))

    @classmethod
    def decode(cls, text: str) -> Histogram:
        """The histogram of such a text. Raises ValueError if it is none."""
        histogram = cls()
        try:
            histogram.hdr.decode_and_add(text.encode("ascii"))
        except Exception as error:
            raise ValueError(f"not an encoded histogram: {text[:20]!r}") from error
        return histogram


@functools.cache
def bucket_ceilings() -> Array:
    """The highest nanosecond of each of HdrHistogram's buckets."""
    hdr = HdrHistogram(1, HIGHEST, DIGITS)
    values = map(hdr.get_value_from_index, range(hdr.counts_len))
    return np.array([hdr.get_highest_equivalent_value(value) for value in values], np.int64)


@dataclass(slots=True)
class Failures:
    """Errors of one class of one call."""

    count: int = 0
    example: str = ""

    def add(self, count: int, example: str) -> None:
        self.count += count
        self.example = self.example or example


ErrorKey = tuple[int, str, str]
"""Which server, which call, which class."""


@dataclass(slots=True)
class ServerTime:
    """What the servers said of their time, in seconds, summed over so many calls. queue: known of unary calls alone."""

    calls: int = 0
    environment: float = 0.0
    queue: float = 0.0
    total: float = 0.0

    def add(self, other: ServerTime, sign: int = 1) -> None:
        self.calls += sign * other.calls
        self.environment += sign * other.environment
        self.queue += sign * other.queue
        self.total += sign * other.total


def _doubles() -> array[float]:
    return array("d")


LatencyKey = tuple[int, str, bool]
"""Which server, which call, and whether the latency counts from the sending (True) or from when the call was due."""


@dataclass(slots=True)
class Interval:
    """What one generator saw in one interval of a stage. place: its number; -1: outside the time that is measured.

    latencies: in seconds. steps: answered within it, by server. calls: of any kind.
    late: seconds by which timers fired late.
    """

    place: int = -1
    latencies: defaultdict[LatencyKey, array[float]] = field(default_factory=lambda: defaultdict(_doubles))
    steps: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    calls: int = 0
    errors: defaultdict[ErrorKey, Failures] = field(default_factory=lambda: defaultdict(Failures))
    late: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Log:
    """What a generator writes down.

    counting: the measured time runs. due_from, due_until: latencies of calls that were due in between count.
    both: sending and being due are two things, as in an open loop.
    """

    due_from: float = float("inf")
    due_until: float = float("inf")
    counting: bool = False
    both: bool = False
    interval: Interval = field(default_factory=Interval)

    def answered(self, server: int, call: str, due: float, sent: float, now: float) -> None:
        """A call came back. due: when it should have been sent."""
        interval = self.interval
        if self.counting:
            interval.calls += 1
            if call == "step":
                interval.steps[server] += 1
        if self.due_from <= due < self.due_until or call in ANY_TIME:
            interval.latencies[server, call, False].append(now - due)
            if self.both:
                interval.latencies[server, call, True].append(now - sent)

    def answered_steps(self, server: int, due: Sequence[float], now: float) -> None:
        """Steps of a closed loop came back together: they were sent when they were due."""
        interval = self.interval
        if self.counting:
            interval.calls += len(due)
            interval.steps[server] += len(due)
        first, last = self.due_from, self.due_until
        if counted := [now - each for each in due if first <= each < last]:
            interval.latencies[server, "step", False].extend(counted)

    def failed(self, server: int, call: str, kind: str, message: str) -> None:
        """A call failed. That counts whenever it happens, because errors are never normal."""
        self.interval.errors[server, call, kind].add(1, message[:EXAMPLE_CHARACTERS])

    def take(self, place: int) -> Interval:
        """What was written since the last time."""
        taken, self.interval = self.interval, Interval()
        taken.place = place
        return taken


@dataclass(frozen=True, slots=True)
class Summary:
    """A generator's own figures of a stage.

    seconds: how long it measured. thread, process: seconds of CPU that its event loop and all its threads used.
    unserved: steps that were due and never sent. unanswered: calls without a reply at the end.
    ended: why it ended early; empty where it did not. paths: steps that were measured, by plan.PATHS.
    """

    seconds: float
    thread: float
    process: float
    sessions: int
    unserved: int
    unanswered: int
    server: ServerTime
    ended: str
    paths: Counter[str]


@dataclass(slots=True)
class Totals:
    """Intervals of all generators, added up. latencies: by call, and whether from the sending. replicas: of steps."""

    latencies: defaultdict[tuple[str, bool], Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    replicas: defaultdict[int, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    steps: Counter[int] = field(default_factory=Counter)
    calls: int = 0
    errors: defaultdict[ErrorKey, Failures] = field(default_factory=lambda: defaultdict(Failures))
    late: Histogram = field(default_factory=Histogram)

    def add(self, interval: Interval) -> None:
        for (server, call, sent), seconds in interval.latencies.items():
            self.latencies[call, sent].record(seconds)
            if call == "step" and not sent:
                self.replicas[server].record(seconds)
        self.steps.update(interval.steps)
        self.calls += interval.calls
        for key, failures in interval.errors.items():
            self.errors[key].add(failures.count, failures.example)
        self.late.record(interval.late)

    def of(self, call: str, *, sent: bool = False) -> Histogram:
        """Latencies of a call on all servers, from when it was due or from when it was sent."""
        return self.latencies.get((call, sent)) or Histogram()


@dataclass(slots=True)
class Point:
    """An interval of the curves. latencies: by call, from when it was due, encoded."""

    steps: int = 0
    errors: int = 0
    latencies: dict[str, str] = field(default_factory=dict)

    def add(self, interval: Interval) -> None:
        self.steps += sum(interval.steps.values())
        self.errors += sum(failures.count for failures in interval.errors.values())
        for (_, call, sent), seconds in interval.latencies.items():
            if not sent:
                histogram = self.of(call)
                histogram.record(seconds)
                self.latencies[call] = histogram.encode()

    def of(self, call: str) -> Histogram:
        return Histogram.decode(self.latencies[call]) if call in self.latencies else Histogram()


@dataclass(slots=True)
class StageResult:
    """Everything that was seen of a stage. points: of all generators together, in order.

    measured: of the measured time. around: the rest: opening, closing, errors before the measured time.
    ended: why the stage ended early; empty where it did not. interrupted: by Ctrl-C.
    """

    stage: Stage
    started: float
    points: list[Point] = field(default_factory=list)
    measured: Totals = field(default_factory=Totals)
    around: Totals = field(default_factory=Totals)
    summaries: list[Summary] = field(default_factory=list)
    ended: str = ""
    interrupted: bool = False

    def add(self, interval: Interval) -> None:
        if interval.place < 0:
            self.around.add(interval)
            return
        while len(self.points) <= interval.place:
            self.points.append(Point())
        self.points[interval.place].add(interval)
        self.measured.add(interval)
