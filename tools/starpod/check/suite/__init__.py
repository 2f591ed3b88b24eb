"""The requirements of docs/protocol.md and the proto, each with its test; one module per subject.

Numbers of removed requirements are never used again.
"""

from __future__ import annotations

from types import ModuleType

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
    reward,
    snapshot,
    step,
    stream,
)

_MODULES = (
    *(describe, open, step, outcomes, reset, observations, leases, determinism, deadlines),
    *(invalid_requests, companions, stream, fork, snapshot),
)


def _requirements_in(*modules: ModuleType) -> tuple[Requirement, ...]:
    return tuple(
        sorted(
            (value for module in modules for value in vars(module).values() if isinstance(value, Requirement)),
            key=lambda requirement: (tuple(LEVELS).index(requirement.id[0]), requirement.id),
        )
    )


REQUIREMENTS: tuple[Requirement, ...] = _requirements_in(*_MODULES)
"""The requirements of the contract, by level and number, as `starpod check --list` prints them."""

REWARD: tuple[Requirement, ...] = _requirements_in(reward)
"""The requirements of `starpod check --reward`, which are not part of the contract."""
