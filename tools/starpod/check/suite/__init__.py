"""The requirements of docs/protocol.md, each with its test; one module per subject."""

from __future__ import annotations

from starpod.check.requirement import LEVELS, Requirement
from starpod.check.suite import (
    companions,
    deadlines,
    describe,
    determinism,
    fork,
    invalid_requests,
    leases,
    observations,
    open,
    outcomes,
    reset,
    snapshot,
    step,
    stream,
)

_MODULES = (
    *(describe, open, step, outcomes, reset, observations, leases, determinism, deadlines),
    *(invalid_requests, companions, stream, fork, snapshot),
)

REQUIREMENTS: tuple[Requirement, ...] = tuple(
    sorted(
        (value for module in _MODULES for value in vars(module).values() if isinstance(value, Requirement)),
        key=lambda requirement: (tuple(LEVELS).index(requirement.id[0]), requirement.id),
    )
)
"""All of them, in the order of docs/protocol.md."""
