"""Metrics of machines for Prometheus. Boot has its own, since it is not part of a step."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from starpod.env_server.operation.metrics import RESOURCES

_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)

BOOT_SECONDS = Histogram(
    "starpod_machine_boot_seconds",
    "Time from the request of a machine until its shell answers.",
    ["environment"],
    registry=None,
    buckets=_BOUNDS,
)
FAILED_BOOTS = Counter(
    "starpod_machine_failed_boots", "Machines that did not boot in time.", ["environment"], registry=None
)
DEAD_WARM = Counter(
    "starpod_machine_dead_warm", "Warm machines that were dead when one was needed.", ["environment"], registry=None
)
RESOURCES += [BOOT_SECONDS, FAILED_BOOTS, DEAD_WARM]
