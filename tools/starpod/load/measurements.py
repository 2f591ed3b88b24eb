"""Measurements of a run: latencies, steps, errors by class, and the servers' own times.

A generator writes into a Log and sends its content one Interval at a time. The parent process adds up the
intervals of all generators in a StageResult.
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

MAX_NANOSECONDS = 3_600_000_000_000
"""The highest latency that a histogram distinguishes (an hour). Longer latencies count as an hour."""
DIGITS = 3

ANY_TIME = ("open", "close", "renew")
"""Calls whose latencies are recorded at any time, because most of them are made before or after the measured time."""
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
"""Error class of each `reason` of the protocol. Errors are counted by class and never mixed with latencies."""

Array = np.ndarray[Any, np.dtype[np.int64]]


def error_class(error: StarpodError) -> str:
    """Return the error's class, one of requirements.CLASSES. An unknown or missing reason means a transport error."""
    return ERROR_CLASSES.get(error.reason, "transport")


class Histogram:
    """An HdrHistogram of latencies in nanoseconds, from a microsecond to an hour."""

    __slots__ = ("hdr",)

    def __init__(self, seconds: Sequence[float] = ()) -> None:
        self.hdr = HdrHistogram(1, MAX_NANOSECONDS, DIGITS)
        self.record(seconds)

    @classmethod
    def sum(cls, parts: Iterable[Histogram]) -> Histogram:
        """Return the sum of histograms. Bucket counts are added, so nothing is rounded twice."""
        total = cls()
        for part in parts:
            if len(part):
                total.hdr.add(part.hdr)
        return total

    def record(self, seconds: Sequence[float]) -> None:
        """Add latencies in seconds, rounded to microseconds."""
        if not len(seconds):
            return
        microseconds = np.clip(np.rint(np.asarray(seconds, np.float64) * 1e6), 0, MAX_NANOSECONDS // 1000).astype(
            np.int64
        )
        values, counts = np.unique(microseconds, return_counts=True)  # each record_value() call costs 4 µs
        for value, count in zip((1000 * values).tolist(), counts.tolist(), strict=True):
            self.hdr.record_value(value, count)

    def __len__(self) -> int:
        return int(self.hdr.get_total_count())

    @property
    def counts(self) -> Array:
        """Number of latencies in each of HdrHistogram's buckets."""
        counts: Array = np.frombuffer(self.hdr.counts, np.int64)
        return counts

    @property
    def mean(self) -> float:
        """Mean latency in seconds; NaN without latencies."""
        return float(self.counts @ bucket_ceilings() / len(self) / 1e9) if len(self) else float("nan")

    def percentiles(self, *percents: float) -> list[float]:
        """Return latencies in seconds at these percentiles, from 0 (the minimum) to 100; NaN without latencies."""
        if not len(self):
            return [float("nan")] * len(percents)
        values = self.hdr.get_percentile_to_value_dict(percents)
        return [values[percent] / 1e9 for percent in percents]

    def encode(self) -> str:
        """Return HdrHistogram's own compressed form (V2) in base64, which other tools read too."""
        return str(self.hdr.encode().decode("ascii"))

    @classmethod
    def decode(cls, text: str) -> Histogram:
        """Return the histogram that `encode` made this text from. Raise ValueError for any other text."""
        histogram = cls()
        try:
            histogram.hdr.decode_and_add(text.encode("ascii"))
        except Exception as error:
            raise ValueError(f"not an encoded histogram: {text[:20]!r}") from error
        return histogram


@functools.cache
def bucket_ceilings() -> Array:
    """Return the highest latency in nanoseconds of each of HdrHistogram's buckets."""
    hdr = HdrHistogram(1, MAX_NANOSECONDS, DIGITS)
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
"""Server number, call name, error class."""


@dataclass(slots=True)
class ServerTime:
    """Times that servers report for calls, in seconds, summed over `calls` calls."""

    calls: int = 0
    environment: float = 0.0
    queue: float = 0.0
    """Time before the environment's code begins. Only unary calls report it."""
    total: float = 0.0

    def add(self, other: ServerTime, sign: int = 1) -> None:
        self.calls += sign * other.calls
        self.environment += sign * other.environment
        self.queue += sign * other.queue
        self.total += sign * other.total


def _doubles() -> array[float]:
    return array("d")


LatencyKey = tuple[int, str, bool]
"""Server number, call name, and whether the latency begins when the call was sent (True) or due (False)."""


@dataclass(slots=True)
class Interval:
    """Measurements of one generator in one interval of a stage."""

    place: int = -1
    """Number of the interval; -1: outside the measured time."""
    latencies: defaultdict[LatencyKey, array[float]] = field(default_factory=lambda: defaultdict(_doubles))
    """Latencies in seconds."""
    steps: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of steps answered in the interval, by server."""
    calls: int = 0
    """Number of calls of any kind answered in the interval."""
    errors: defaultdict[ErrorKey, Failures] = field(default_factory=lambda: defaultdict(Failures))
    late: list[float] = field(default_factory=list)
    """Delay in seconds of each timer that fired."""


@dataclass(slots=True)
class Log:
    """The measurements of a generator since it last sent an interval."""

    due_from: float = float("inf")
    """Only calls due from this instant until `due_until` have their latencies recorded (but see ANY_TIME)."""
    due_until: float = float("inf")
    counting: bool = False
    """Whether the measured time is running."""
    open_loop: bool = False
    """Whether a call may be sent later than it was due, so that two latencies are recorded."""
    interval: Interval = field(default_factory=Interval)

    def answered(self, server: int, call: str, due: float, sent: float, now: float) -> None:
        """Record a reply.

        Args:
            due: instant at which the call should have been sent, in seconds of `time.monotonic`, like the next two.
            sent: instant at which it was sent.
            now: instant at which the reply arrived.
        """
        interval = self.interval
        if self.counting:
            interval.calls += 1
            if call == "step":
                interval.steps[server] += 1
        if self.due_from <= due < self.due_until or call in ANY_TIME:
            interval.latencies[server, call, False].append(now - due)
            if self.open_loop:
                interval.latencies[server, call, True].append(now - sent)

    def answered_steps(self, server: int, due: Sequence[float], now: float) -> None:
        """Record replies to several steps of a closed loop.

        Args:
            due: instants at which the steps were due and sent, in seconds of `time.monotonic`.
            now: instant at which the replies arrived.
        """
        interval = self.interval
        if self.counting:
            interval.calls += len(due)
            interval.steps[server] += len(due)
        start, end = self.due_from, self.due_until
        if latencies := [now - due_time for due_time in due if start <= due_time < end]:
            interval.latencies[server, "step", False].extend(latencies)

    def failed(self, server: int, call: str, kind: str, message: str) -> None:
        """Count a failed call, even outside the measured time, because errors are never normal.

        Args:
            kind: error class, as `error_class` returns it.
            message: the error's message. The first one of each class is kept as an example, shortened.
        """
        self.interval.errors[server, call, kind].add(1, message[:EXAMPLE_CHARACTERS])

    def take(self, place: int) -> Interval:
        """Return the measurements since the last call of this function, and begin a new interval."""
        interval, self.interval = self.interval, Interval()
        interval.place = place
        return interval


@dataclass(frozen=True, slots=True)
class Summary:
    """Measurements of one generator over a whole stage."""

    seconds: float
    """Measured time."""
    thread: float
    """CPU seconds of the thread with the event loop."""
    process: float
    """CPU seconds of all threads."""
    sessions: int
    unserved: int
    """Number of steps that were due and never sent."""
    unanswered: int
    """Number of calls without a reply at the end."""
    server: ServerTime
    ended: str
    """Why the generator ended early; empty if it did not."""
    paths: Counter[str]
    """Number of measured steps, by key of plan.PATHS."""


@dataclass(slots=True)
class Totals:
    """The sum of all generators' intervals."""

    latencies: defaultdict[tuple[str, bool], Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    """Latencies by call name and by whether they begin when the call was sent (see LatencyKey)."""
    replicas: defaultdict[int, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    """Latencies of steps by server. They begin when steps were due."""
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
        """Return the latencies of a call on all servers, from when it was due or from when it was sent."""
        return self.latencies.get((call, sent)) or Histogram()


@dataclass(slots=True)
class Point:
    """One interval of the curves over time, summed over all generators."""

    steps: int = 0
    errors: int = 0
    latencies: dict[str, str] = field(default_factory=dict)
    """Encoded latency histogram by call name. Latencies begin when calls were due."""

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
    """Measurements of a stage, summed over all generators."""

    stage: Stage
    start_time: float
    points: list[Point] = field(default_factory=list)
    """One point per interval of the measured time, in order."""
    measured: Totals = field(default_factory=Totals)
    around: Totals = field(default_factory=Totals)
    """Totals outside the measured time: opening, closing, and errors during the warm-up."""
    summaries: list[Summary] = field(default_factory=list)
    ended: str = ""
    """Why the stage ended early; empty if it did not."""
    interrupted: bool = False
    """Whether Ctrl-C ended the stage."""

    def add(self, interval: Interval) -> None:
        if interval.place < 0:
            self.around.add(interval)
            return
        while len(self.points) <= interval.place:
            self.points.append(Point())
        self.points[interval.place].add(interval)
        self.measured.add(interval)
