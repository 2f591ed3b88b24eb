"""What can go wrong, as one exception per reason of the protocol (docs/protocol.md, error table)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class StarpodError(Exception):
    """A call failed.

    message: what was wrong and how to mend it.
    code: the gRPC status code.
    reason: the protocol's ErrorReason without prefix; empty where the server did not say.
    advice: what helps: "retry" the very same call, "reopen" the session, or "give_up".
    metadata: the keys that the protocol names for the reason.
    retry_after: seconds to wait before a retry; 0 if the server did not say.
    violations: for a bad argument: (field, what is wrong with it).
    """

    default_code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = ""
    default_advice: ClassVar[str] = "give_up"

    def __init__(
        self,
        message: str,
        *,
        code: grpc.StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float = 0.0,
        violations: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})
        self.advice = self.metadata.get("advice") or self.default_advice
        self.retry_after = retry_after
        self.violations = tuple(violations)

    def __str__(self) -> str:
        return self.message

    def _list(self, key: str) -> list[str]:
        return [item.strip() for item in self.metadata.get(key, "").split(",") if item.strip()]


class BadArgument(StarpodError):
    """The request is malformed; `violations` names the fields.

    options_schema: the JSON Schema of the environment's options, where options were what was wrong.
    """

    default_code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "BAD_ARGUMENT"
    options_schema: Mapping[str, Any] | None = None


class UnknownEnvironment(StarpodError):
    """No server hosts this environment; `nearest` lists ids that are close."""

    default_code = grpc.StatusCode.NOT_FOUND
    default_reason = "UNKNOWN_ENVIRONMENT"

    @property
    def nearest(self) -> list[str]:
        return self._list("nearest")


class UnknownVersion(StarpodError):
    """No hosted version of the environment fits; `available` lists those that are hosted."""

    default_code = grpc.StatusCode.NOT_FOUND
    default_reason = "UNKNOWN_VERSION"

    @property
    def available(self) -> list[str]:
        return self._list("available")


class UnknownSession(StarpodError):
    """The session never existed, was closed, or its lease ran out."""

    default_code = grpc.StatusCode.NOT_FOUND
    default_reason = "UNKNOWN_SESSION"
    default_advice = "reopen"


class OutOfOrder(StarpodError):
    """The epoch or step index is not the one the server expects."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "OUT_OF_ORDER"

    @property
    def expected_epoch(self) -> int:
        return int(self.metadata.get("expected_epoch", 0))

    @property
    def expected_step_index(self) -> int:
        return int(self.metadata.get("expected_step_index", 0))


class EpisodeOver(OutOfOrder):
    """The episode is over: reset first."""

    default_reason = "EPISODE_OVER"


class KeyReused(StarpodError):
    """The key of an Open, Fork or Restore was used for another request."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "KEY_REUSED"


class IncompatibleSnapshot(StarpodError):
    """No hosted version restores this snapshot."""

    default_code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "INCOMPATIBLE_SNAPSHOT"


class Unsupported(StarpodError):
    """The environment or the server lacks a capability."""

    default_code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNSUPPORTED"


class Overloaded(StarpodError):
    """A limit of the server was met; ask again after `retry_after` seconds. The fleet does so by itself at first."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"
    default_advice = "retry"


class TooLarge(StarpodError):
    """One message or snapshot is larger than allowed."""

    default_code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "TOO_LARGE"


class Draining(StarpodError):
    """The server is going away and takes no new sessions."""

    default_code = grpc.StatusCode.UNAVAILABLE
    default_reason = "DRAINING"
    default_advice = "reopen"


class SessionLost(StarpodError):
    """The session is gone, and could not be brought back."""

    default_code = grpc.StatusCode.DATA_LOSS
    default_reason = "SESSION_LOST"
    default_advice = "reopen"


class EnvironmentBug(StarpodError):
    """The environment raised an exception of its own; `session_lost` tells whether the session went with it."""

    default_code = grpc.StatusCode.INTERNAL
    default_reason = "ENVIRONMENT_BUG"

    @property
    def session_lost(self) -> bool:
        return self.metadata.get("session") == "lost"


class Unauthenticated(StarpodError):
    """The server wants a bearer token or a client certificate that it was not given."""

    default_code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class DeadlineExceeded(StarpodError):
    """The call took too long. It is or will be done once: the very same call again returns its reply."""

    default_code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE"
    default_advice = "retry"


class ServerBug(StarpodError):
    """The server failed for a reason of its own."""

    default_code = grpc.StatusCode.INTERNAL
    default_reason = "SERVER_BUG"


class Unreachable(StarpodError):
    """No answer from the server: not running, not reachable, or cut off."""

    default_code = grpc.StatusCode.UNAVAILABLE
    default_advice = "reopen"


class ReplayDiverged(SessionLost):
    """A replayed episode did not come out as it was first: the environment is not deterministic, though it says so.

    step: the turn at which it differed; 0 is the first observation, 1 the reply to the first turn.
    what: the field that differed, and how where it is short.
    expected_key, found_key: the state keys then and now. They are equal where only other fields differ.
    """

    default_advice = "give_up"

    def __init__(self, step: int, expected_key: bytes, found_key: bytes, what: str) -> None:
        keys = (
            "" if expected_key == found_key else f" (state key {expected_key.hex()} became {found_key.hex() or 'none'})"
        )
        super().__init__(
            f"The replay differs from the episode at step {step}: {what}{keys}. The environment is not deterministic:"
            " its spec must say so, then sessions are recovered from snapshots."
        )
        self.step = step
        self.what = what
        self.expected_key = expected_key
        self.found_key = found_key


_BY_REASON: dict[str, type[StarpodError]] = {
    kind.default_reason: kind
    for kind in (
        BadArgument,
        UnknownEnvironment,
        UnknownVersion,
        UnknownSession,
        OutOfOrder,
        EpisodeOver,
        KeyReused,
        IncompatibleSnapshot,
        Unsupported,
        Overloaded,
        TooLarge,
        Draining,
        SessionLost,
        EnvironmentBug,
        Unauthenticated,
        DeadlineExceeded,
        ServerBug,
    )
}

# For errors that come from the transport or a proxy, which know no reasons.
_BY_CODE: dict[grpc.StatusCode, type[StarpodError]] = {
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.CANCELLED: Unreachable,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.INVALID_ARGUMENT: BadArgument,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,
    grpc.StatusCode.DATA_LOSS: SessionLost,
}


def from_status(status: status_pb2.Status) -> StarpodError:
    """The exception for a google.rpc.Status, as a Reply of the Stream carries it."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    for detail in status.details:
        for message in (info, retry, bad_request):
            if detail.Is(message.DESCRIPTOR):
                detail.Unpack(message)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    kind = _BY_REASON.get(info.reason.removeprefix("ERROR_REASON_")) or _BY_CODE.get(code, StarpodError)
    return kind(
        status.message or code.name,
        code=code,
        reason=info.reason.removeprefix("ERROR_REASON_"),
        metadata=info.metadata,
        retry_after=retry.retry_delay.ToTimedelta().total_seconds(),
        violations=[(violation.field, violation.description) for violation in bad_request.field_violations],
    )


def from_rpc(error: grpc.RpcError) -> StarpodError:
    """The exception for a failed unary call or a broken stream, with its rich details where it has any."""
    code: grpc.StatusCode = error.code()
    message: str = error.details() or code.name
    trailer: Any = error.trailing_metadata() or ()
    for key, value in trailer:
        if key == "grpc-status-details-bin":
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                break
            return from_status(status)
    return _BY_CODE.get(code, StarpodError)(message, code=code)
