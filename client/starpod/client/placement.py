"""Which of the servers that could takes the next session."""

from __future__ import annotations

import random
from collections.abc import Sequence

from starpod.client.replica import Replica
from starpod.v1 import environment_pb2 as pb

CANDIDATES = 4

# A stream of its own: placement must not depend on a program's seed, nor take from its random numbers.
_random = random.Random()

Server = tuple[Replica, pb.EnvironmentSpec]


def least_loaded(servers: Sequence[Server]) -> Server | None:
    """The least loaded one of a few that are taken by chance; of all, where they are no more than CANDIDATES.

    None if those that were looked at take no sessions now.

    A look at all would cost more the larger the fleet is, and send every client that knows the others by what servers
    report every few seconds to the same ones (Mitzenmacher, "How useful is old information?", 2000). Few are enough:
    docs/benchmarks.md has the balance that comes of it.
    """
    candidates = _random.sample(servers, min(CANDIDATES, len(servers)))
    accepting = [server for server in candidates if server[0].accepting]
    return min(accepting, key=lambda server: server[0].load) if accepting else None
