"""Connection to one server: one channel and one Stream. It batches calls and matches replies, without recovery.

A program that needs no recovery, such as a load generator, can use it directly. It subclasses `SessionStep` for its
sessions, passes the steps to `submit_steps`, and receives their replies in batches, as a `StepReceiver`.
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
    AwaitedCall,
    Method,
    Reset,
    ServerCall,
    SessionStep,
    StartRow,
    step_request,
)
from starpod.client.connection.columns import StepBatch
from starpod.client.connection.connection import ServerConnection
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
    "AwaitedCall",
    "Method",
    "Reset",
    "ServerCall",
    "ServerConnection",
    "SessionStep",
    "StartRow",
    "StepBatch",
    "StepReceiver",
    "step_request",
]
