"""Which of its two ways of reading and writing gRPC's core uses, chosen before it is loaded."""

from __future__ import annotations

import os
from importlib.metadata import version

VARIABLE = "GRPC_EXPERIMENTS"
SETTING = "-event_engine_client,-event_engine_listener"
# Releases of grpcio in which both names are known; others would only log that they are not.
KNOWN = ((1, 76), (1, 85))


def prefer_poller() -> None:
    """Let gRPC's core read and write in the thread that waits for events, not through a pool of threads beside it.

    Python uses one core at a time, so what the pool gains on many cores is lost in hand-overs: with the pool a message
    of the Stream takes a third more CPU time, and a unary call a quarter longer (docs/decisions/0007). Does nothing
    where the user has set the variable, or where gRPC is loaded already. For a whole process: programs call it,
    libraries don't.
    """
    release = tuple(int(part) for part in version("grpcio").split(".")[:2])
    if KNOWN[0] <= release <= KNOWN[1]:
        os.environ.setdefault(VARIABLE, SETTING)
