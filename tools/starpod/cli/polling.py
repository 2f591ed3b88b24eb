"""Choose one of two I/O implementations of gRPC's core. This must be done before gRPC is loaded."""

from __future__ import annotations

import os
from importlib.metadata import version

VARIABLE = "GRPC_EXPERIMENTS"
SETTING = "-event_engine_client,-event_engine_listener"
# Releases of grpcio that know both names. Others would log that a name is unknown.
KNOWN = ((1, 76), (1, 85))


def prefer_poller() -> None:
    """Make gRPC's core do I/O in the thread that waits for events, instead of in an extra thread pool.

    Python uses one core at a time, so handing work to the pool costs more than its parallelism gains. With the pool, a
    Stream message takes a third more CPU time, and a unary call takes a quarter longer (docs/decisions/0007). This
    function has no effect if GRPC_EXPERIMENTS is set or gRPC is already loaded. It affects the whole process, so only
    programs should call it, not libraries.
    """
    release = tuple(int(part) for part in version("grpcio").split(".")[:2])
    if KNOWN[0] <= release <= KNOWN[1]:
        os.environ.setdefault(VARIABLE, SETTING)
