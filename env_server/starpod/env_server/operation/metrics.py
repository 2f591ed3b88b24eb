"""Metrics for Prometheus. The hot path only counts; families are built when they are scraped."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from starpod.env_server.operation.tenants import Tenant

STEP_SECONDS = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5, 1.0, 5.0, 30.0)
"""Upper bounds of the step latency buckets, from inline environments to slow ones."""


RESOURCES: list[Collector] = []
"""Collectors of resources that all sessions of this process share, such as containers. Their modules add them."""


class Tenants(Protocol):
    """An object that lists the tenants."""

    @property
    def tenants(self) -> Sequence[Tenant]: ...


class _Histogram:
    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0.0] * (len(STEP_SECONDS) + 1)
        self.sum = 0.0


class Metrics(Collector):
    """Counters of one server process, exported as Prometheus families with the prefix `starpod_`."""

    def __init__(self) -> None:
        self._steps: defaultdict[str, _Histogram] = defaultdict(_Histogram)
        self._live: Counter[str] = Counter()
        self._opened: Counter[str] = Counter()
        self._reaped: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._errors: Counter[tuple[str, str]] = Counter()
        self.calls_in_flight = 0
        self.streams = 0
        self.hang_ups: Counter[str] = Counter(grpc=0, http=0)
        """Number of calls by transport whose caller left or gave up before the reply. They are not failures of the
        server."""
        self.tenants: Tenants | None = None
        self.effects: Counter[tuple[str, str]] = Counter()

    def host(self, environment: str) -> None:
        """Initialize the counters of an environment with 0.

        Otherwise a rate would miss the first event, and an autoscaler could not tell an idle server from one without
        metrics.
        """
        for counter in (self._live, self._opened, self._reaped, self._lost):
            counter[environment] += 0

    def step(self, environment: str, seconds: float) -> None:
        """Count one turn, with the seconds that the environment itself took."""
        histogram = self._steps[environment]
        histogram.counts[bisect_left(STEP_SECONDS, seconds)] += 1
        histogram.sum += seconds

    def steps(self, environment: str, count: int, sample: list[float]) -> None:
        """Count many turns, of which a sample was timed.

        Args:
            sample: seconds that the environment took in each timed turn; if empty, nothing is counted.
        """
        if not sample:
            return
        histogram = self._steps[environment]
        weight = count / len(sample)
        counts = histogram.counts
        for seconds in sample:
            counts[bisect_left(STEP_SECONDS, seconds)] += weight
        histogram.sum += sum(sample) * weight

    def count_live(self, environment: str, change: int) -> None:
        """Count opened (positive `change`) or ended (negative) sessions."""
        self._live[environment] += change
        if change > 0:
            self._opened[environment] += change

    def count_reaped(self, environment: str) -> None:
        """Count an expired lease."""
        self._reaped[environment] += 1

    def count_lost(self, environment: str) -> None:
        """Count a session lost because its environment crashed, hung or raised."""
        self._lost[environment] += 1

    def error(self, method: str, reason: str) -> None:
        """Count a failed call by its reason in the protocol's table."""
        self._errors[method, reason] += 1

    def collect(self) -> Iterator[Metric]:
        steps = HistogramMetricFamily(
            "starpod_step_seconds", "Time of one turn in the environment itself.", labels=["environment"]
        )
        for environment, histogram in list(self._steps.items()):
            total, buckets = 0.0, []
            for bound, count in zip((*map(str, STEP_SECONDS), "+Inf"), histogram.counts, strict=True):
                total += count
                buckets.append((bound, total))
            steps.add_metric([environment], buckets, histogram.sum)
        yield steps
        yield _gauge("starpod_live_sessions", "Sessions alive.", ["environment"], self._live)
        yield _counter("starpod_sessions_opened", "Sessions created.", ["environment"], self._opened)
        yield _counter("starpod_sessions_reaped", "Sessions whose lease ran out.", ["environment"], self._reaped)
        text = "Sessions that were lost because of their environment."
        yield _counter("starpod_sessions_lost", text, ["environment"], self._lost)
        yield _counter("starpod_errors", "Failed calls by reason.", ["method", "reason"], self._errors)
        text = "Calls whose caller went away before the reply."
        yield _counter("starpod_hang_ups", text, ["transport"], self.hang_ups)
        text = "Calls of environments to the outside."
        yield _counter("starpod_effects", text, ["environment", "outcome"], self.effects)
        yield GaugeMetricFamily("starpod_calls_in_flight", "Calls in progress.", value=self.calls_in_flight)
        yield GaugeMetricFamily("starpod_streams", "Streams connected.", value=self.streams)
        yield from self._of_tenants()
        for collector in RESOURCES:
            yield from collector.collect()

    def _of_tenants(self) -> Iterator[Metric]:
        """Yield metrics by tenant name. Tenants without a name are added up, and nothing of a token is shown."""
        refusals: Counter[tuple[str, str]] = Counter()
        sessions: Counter[str] = Counter()
        streams: Counter[str] = Counter()
        for tenant in self.tenants.tenants if self.tenants else ():
            sessions[tenant.name] += tenant.sessions
            streams[tenant.name] += tenant.streams
            refusals.update({(tenant.name, limit): count for limit, count in tenant.refused.items()})
        yield _gauge("starpod_tenant_sessions", "Live sessions by name of their token.", ["tenant"], sessions)
        yield _gauge("starpod_tenant_streams", "Connected streams by name of their token.", ["tenant"], streams)
        yield _counter("starpod_tenant_refused", "Calls beyond a limit of their token.", ["tenant", "limit"], refusals)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Serve /metrics on a new thread, and return a function that stops it."""
        registry = CollectorRegistry()
        registry.register(self)
        server, _ = start_http_server(port, host, registry)
        return server.shutdown


Values = Mapping[str, float] | Mapping[tuple[str, str], float]
"""Values by label, or by two labels."""


def _gauge(name: str, text: str, labels: list[str], values: Values) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _counter(name: str, text: str, labels: list[str], values: Values) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for label, value in list(values.items()):
        family.add_metric([label] if isinstance(label, str) else label, value)
    return family
