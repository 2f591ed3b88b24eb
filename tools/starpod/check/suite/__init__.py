"""The requirements of docs/protocol.md, each with its test; one module per subject."""

from __future__ import annotations

from starpod.check.requirement import Requirement
from starpod.check.suite import (
    companions,
    describing,
    ending,
    forking,
    living,
    misusing,
    observing,
    opening,
    resetting,
    snapshotting,
    stepping,
    streaming,
)

_MODULES = (
    describing,
    opening,
    stepping,
    resetting,
    ending,
    observing,
    living,
    misusing,
    companions,
    streaming,
    forking,
    snapshotting,
)

REQUIREMENTS: tuple[Requirement, ...] = tuple(
    value for module in _MODULES for value in vars(module).values() if isinstance(value, Requirement)
)
"""All of them, in the order of docs/protocol.md."""
