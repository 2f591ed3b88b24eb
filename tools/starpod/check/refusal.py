"""The error of a failed call, as a caller sees it: code, message and google.rpc details."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2

from starpod.v1.statuses import details_of, status_in


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error of a failed call."""

    code: str
    message: str
    info: error_details_pb2.ErrorInfo | None = None
    violations: tuple[str, ...] = ()
    """Names of the invalid fields, from the error's BadRequest."""
    retry_seconds: float | None = None
    """The delay in the error's RetryInfo; None without one."""

    def __str__(self) -> str:
        reason = f" ({self.info.reason})" if self.info else ""
        return f"{self.code}{reason}: {self.message}"

    @property
    def wait(self) -> float | None:
        """Seconds until an overloaded server may accept the call; None if the error has another reason."""
        return self.retry_seconds if self.code == "RESOURCE_EXHAUSTED" else None

    @property
    def reason(self) -> str:
        return self.info.reason if self.info else ""

    @property
    def bug(self) -> bool:
        """Whether the environment or the server failed internally. No request, however invalid, may cause that."""
        return self.reason == "ENVIRONMENT_BUG" or self.code == "UNKNOWN"

    @property
    def metadata(self) -> dict[str, str]:
        return dict(self.info.metadata) if self.info else {}


def from_status(status: status_pb2.Status) -> Refusal:
    """Return the error in a google.rpc.Status."""
    info, violations, retry_after = details_of(status)
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else str(status.code)
    return Refusal(code, status.message, info, tuple(field for field, _ in violations), retry_after)


def from_error(error: grpc.aio.AioRpcError) -> Refusal:
    """Return the error of a failed unary call, whose Status gRPC carries in a trailer."""
    status = status_in(error.trailing_metadata())
    if status is None:
        return Refusal(error.code().name, error.details() or "")
    status.code = error.code().value[0]
    status.message = error.details() or status.message
    return from_status(status)
