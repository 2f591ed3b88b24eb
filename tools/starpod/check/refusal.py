"""A failed call as a caller sees it: code, message and google.rpc details."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "starpod.v1"


@dataclass(frozen=True, slots=True)
class Refusal:
    """info: the google.rpc.ErrorInfo, None where the server sent none. violations: the fields that BadRequest names.

    retry_seconds: the delay of RetryInfo, None where there is none.
    """

    code: str
    message: str
    info: error_details_pb2.ErrorInfo | None = None
    violations: tuple[str, ...] = ()
    retry_seconds: float | None = None

    def __str__(self) -> str:
        reason = f" ({self.info.reason})" if self.info else ""
        return f"{self.code}{reason}: {self.message}"

    @property
    def wait(self) -> float | None:
        """Seconds after which an overloaded server takes the call; None where it is refused for good."""
        return self.retry_seconds if self.code == "RESOURCE_EXHAUSTED" else None

    @property
    def reason(self) -> str:
        return self.info.reason if self.info else ""

    @property
    def bug(self) -> bool:
        """Whether something broke inside the environment or the server, which no request may cause."""
        return self.reason == "ENVIRONMENT_BUG" or self.code == "UNKNOWN"

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.info.metadata) if self.info else {}


def from_status(status: status_pb2.Status) -> Refusal:
    """The refusal that a google.rpc.Status tells of."""
    info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    sent = [message for packed in status.details for message in (info, bad, retry) if packed.Unpack(message)]
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else str(status.code)
    return Refusal(
        code,
        status.message,
        info if info in sent else None,
        tuple(violation.field for violation in bad.field_violations),
        retry.retry_delay.ToTimedelta().total_seconds() if retry in sent else None,
    )


def from_error(error: grpc.aio.AioRpcError) -> Refusal:
    """The refusal that a failed unary call tells of: gRPC carries the Status in a trailer."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                break
            status.code = error.code().value[0]
            status.message = error.details() or status.message
            return from_status(status)
    return Refusal(error.code().name, error.details() or "")
