"""Reads errors of the contract: google.rpc.Status, its details, and the trailer in which gRPC carries it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "starpod.v1"
"""Domain of the contract's ErrorInfo."""


class Details(NamedTuple):
    """The details of an error. A detail that is absent or cannot be decoded is None, or empty.

    violations: pairs of a field and what is wrong with it. retry_after: seconds.
    """

    info: error_details_pb2.ErrorInfo | None
    violations: tuple[tuple[str, str], ...]
    retry_after: float | None


def details_of(status: status_pb2.Status) -> Details:
    """Return the details of an error that the contract knows."""
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    names = set()
    for detail in status.details:
        for message in (info, bad, retry):
            with contextlib.suppress(DecodeError):
                if detail.Unpack(message):
                    names.add(message.DESCRIPTOR.name)
    return Details(
        info if "ErrorInfo" in names else None,
        tuple((violation.field, violation.description) for violation in bad.field_violations),
        retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9 if "RetryInfo" in names else None,
    )


def status_in(trailer: Iterable[Any] | None) -> status_pb2.Status | None:
    """Return the Status that gRPC's trailing metadata (names and values) carries, or None if none can be decoded."""
    for key, value in trailer or ():
        if key == "grpc-status-details-bin":
            with contextlib.suppress(DecodeError, TypeError):
                return status_pb2.Status.FromString(value)
    return None
