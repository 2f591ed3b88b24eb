"""One channel and one Stream to one server: sends calls, matches replies, batches. Knows no session.

A program that wants no recovery, such as a load generator, drives it directly: subclass `Step` for whatever is stepped,
hand the steps that are ready to `Connection.submit_steps`, and get their replies in batches, as a `StepReceiver`.
"""

from starpod.client.connection.calls import (
    CLOSE,
    FORK,
    METHODS,
    OPEN,
    RENDER,
    RENEW,
    RESET,
    RESTORE,
    SNAPSHOT,
    Call,
    Method,
    Step,
    step_request,
)
from starpod.client.connection.columns import StepBatch
from starpod.client.connection.connection import Connection
from starpod.client.connection.queue import StepReceiver

__all__ = [
    "CLOSE",
    "FORK",
    "METHODS",
    "OPEN",
    "RENDER",
    "RENEW",
    "RESET",
    "RESTORE",
    "SNAPSHOT",
    "Call",
    "Connection",
    "Method",
    "Step",
    "StepBatch",
    "StepReceiver",
    "step_request",
]
