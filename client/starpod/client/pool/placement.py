"""Which of the servers that could takes the next session."""

from __future__ import annotations

import random
from collections.abc import Sequence

from starpod.client.pool.replica import Replica
from starpod.v1 import environment_pb2 as pb

CANDIDATES = 4

# A stream of its own: placement must not depend on a program's seed, nor take from its random numbers.
_random = random.Random()

Host = tuple[Replica, pb.EnvironmentSpec]
"""A server and the environment version that it would run there."""


def least_loaded(hosts: Sequence[Host]) -> Host | None:
    """The least loaded one of a few that are taken by chance; of all, where they are no more than CANDIDATES.

    None if those that were looked at take no sessions now.

    A look at all would cost more the larger the fleet is, and send every client that knows the others by what servers
    report every few seconds to the same ones (Mitzenmacher, "How useful is old information?", 2000). Few are enough:
    docs/benchmarks.md has the balance that comes of it.
    """
    candidates = _random.sample(hosts, min(CANDIDATES, len(hosts)))
    accepting = [host for host in candidates if host[0].accepting]
    return min(accepting, key=lambda host: host[0].load) if accepting else None
