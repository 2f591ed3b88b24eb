"""Selection of the server for the next session."""

from __future__ import annotations

import random
from collections.abc import Sequence

from starpod.client.pool.replica import Replica
from starpod.v1 import environment_pb2 as pb

CANDIDATES = 4

# A random state of our own, so that a program's seed does not fix the placement, and placement does not change the
# random numbers that the program draws.
_random = random.Random()

Host = tuple[Replica, pb.EnvironmentSpec]
"""A server and the environment version that a session would run on it."""


def least_loaded(hosts: Sequence[Host]) -> Host | None:
    """Return the least loaded of at most CANDIDATES random hosts, or None if none of these accepts sessions now.

    Loads are reported every few seconds. If clients compared all hosts, they would all choose the same server until the
    next report (Mitzenmacher, "How useful is old information?", 2000). A random sample balances well and takes constant
    time: see docs/benchmarks.md.
    """
    candidates = _random.sample(hosts, min(CANDIDATES, len(hosts)))
    accepting_hosts = [host for host in candidates if host[0].accepts(host[1].id)]
    return min(accepting_hosts, key=lambda host: host[0].load) if accepting_hosts else None
