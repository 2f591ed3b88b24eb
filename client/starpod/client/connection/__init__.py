"""Connection to one server: one channel and one Stream. It batches calls and matches replies, without recovery.

A program that needs no recovery, such as a load generator, can use it directly. It subclasses `Step` for its sessions,
passes the steps to `Connection.submit_steps`, and receives their replies in batches, as a `StepReceiver`.
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
    Reset,
    Start,
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
    "Reset",
    "Start",
    "Step",
    "StepBatch",
    "StepReceiver",
    "step_request",
]
