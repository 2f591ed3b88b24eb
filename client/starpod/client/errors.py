"""What can go wrong, as one exception per reason of the protocol (docs/protocol.md, error table)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

_CODES: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}
_BY_REASON: dict[str, type[StarpodError]] = {}


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

    _code: ClassVar[StatusCode] = StatusCode.UNKNOWN
    _reason: ClassVar[str] = ""
    _advice: ClassVar[str] = "give_up"

    def __init_subclass__(cls, *, code: StatusCode | None = None, reason: str = "", advice: str = "") -> None:
        """code, reason, advice: where an error does not say another one. Those left out are the base class's."""
        cls._code, cls._reason, cls._advice = code or cls._code, reason or cls._reason, advice or cls._advice
        if reason:
            _BY_REASON[reason] = cls

    def __init__(
        self,
        message: str,
        *,
        code: StatusCode | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float = 0.0,
        violations: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self._code
        self.reason = reason or self._reason
        self.metadata = dict(metadata or {})
        self.advice = self.metadata.get("advice") or self._advice
        self.retry_after = retry_after
        self.violations = tuple(violations)

    def __str__(self) -> str:
        return self.message

    def _list(self, key: str) -> list[str]:
        return [item.strip() for item in self.metadata.get(key, "").split(",") if item.strip()]


class BadArgument(StarpodError, code=StatusCode.INVALID_ARGUMENT, reason="BAD_ARGUMENT"):
    """The request is malformed; `violations` names the fields.

    options_schema: the JSON Schema of the environment's options, where options were what was wrong.
    """

    options_schema: Mapping[str, Any] | None = None


class UnknownEnvironment(StarpodError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_ENVIRONMENT"):
    """No server hosts this environment; `nearest` lists ids that are close."""

    @property
    def nearest(self) -> list[str]:
        return self._list("nearest")


class UnknownVersion(StarpodError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_VERSION"):
    """No hosted version of the environment fits; `available` lists those that are hosted."""

    @property
    def available(self) -> list[str]:
        return self._list("available")


class UnknownSession(StarpodError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_SESSION", advice="reopen"):
    """The session never existed, was closed, or its lease ran out."""


class OutOfOrder(StarpodError, code=StatusCode.FAILED_PRECONDITION, reason="OUT_OF_ORDER"):
    """The epoch or step index is not the one the server expects."""

    @property
    def expected_epoch(self) -> int:
        return int(self.metadata.get("expected_epoch", 0))

    @property
    def expected_step_index(self) -> int:
        return int(self.metadata.get("expected_step_index", 0))


class EpisodeOver(OutOfOrder, reason="EPISODE_OVER"):
    """The episode is over: reset first."""


class KeyReused(StarpodError, code=StatusCode.FAILED_PRECONDITION, reason="KEY_REUSED"):
    """The key of an Open, Fork or Restore was used for another request."""


class IncompatibleSnapshot(StarpodError, code=StatusCode.FAILED_PRECONDITION, reason="INCOMPATIBLE_SNAPSHOT"):
    """No hosted version restores this snapshot."""


class Unsupported(StarpodError, code=StatusCode.UNIMPLEMENTED, reason="UNSUPPORTED"):
    """The environment or the server lacks a capability."""


class Overloaded(StarpodError, code=StatusCode.RESOURCE_EXHAUSTED, reason="OVERLOADED", advice="retry"):
    """A limit of the server was met; ask again after `retry_after` seconds. The fleet does so by itself at first."""


class TooLarge(StarpodError, code=StatusCode.RESOURCE_EXHAUSTED, reason="TOO_LARGE"):
    """One message or snapshot is larger than allowed."""


class Draining(StarpodError, code=StatusCode.UNAVAILABLE, reason="DRAINING", advice="reopen"):
    """The server is going away and takes no new sessions."""


class SessionLost(StarpodError, code=StatusCode.DATA_LOSS, reason="SESSION_LOST", advice="reopen"):
    """The session is gone, and could not be brought back."""


class EnvironmentBug(StarpodError, code=StatusCode.INTERNAL, reason="ENVIRONMENT_BUG"):
    """The environment raised an exception of its own; `session_lost` tells whether the session went with it."""

    @property
    def session_lost(self) -> bool:
        return self.metadata.get("session") == "lost"


class Unauthenticated(StarpodError, code=StatusCode.UNAUTHENTICATED, reason="UNAUTHENTICATED"):
    """The server wants a bearer token or a client certificate that it was not given."""


class DeadlineExceeded(StarpodError, code=StatusCode.DEADLINE_EXCEEDED, reason="DEADLINE", advice="retry"):
    """The call took too long. It is or will be done once: the very same call again returns its reply."""


class ServerBug(StarpodError, code=StatusCode.INTERNAL, reason="SERVER_BUG"):
    """The server failed for a reason of its own."""


class Unreachable(StarpodError, code=StatusCode.UNAVAILABLE, advice="reopen"):
    """No answer from the server: not running, not reachable, or cut off."""


class ReplayDiverged(SessionLost, advice="give_up"):
    """A replayed episode did not come out as it was first: the environment is not deterministic, though it says so.

    step: the turn at which it differed; 0 is the first observation, 1 the reply to the first turn.
    what: what differed: the state, or something else in the reply.
    expected_key, found_key: the state keys then and now. They are equal where only other fields differ.
    """

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


# For errors that come from the transport or a proxy, which know no reasons.
_BY_CODE: dict[StatusCode, type[StarpodError]] = {
    StatusCode.UNAVAILABLE: Unreachable,
    StatusCode.CANCELLED: Unreachable,
    StatusCode.UNAUTHENTICATED: Unauthenticated,
    StatusCode.UNIMPLEMENTED: Unsupported,
    StatusCode.INVALID_ARGUMENT: BadArgument,
    StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    StatusCode.RESOURCE_EXHAUSTED: TooLarge,
    StatusCode.DATA_LOSS: SessionLost,
    StatusCode.INTERNAL: ServerBug,
}


def from_status(status: status_pb2.Status) -> StarpodError:
    """The exception for a google.rpc.Status, as a Reply of the Stream carries it."""
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    for detail in status.details:
        for message in (info, retry, bad_request):
            if detail.Is(message.DESCRIPTOR):
                with contextlib.suppress(DecodeError):  # then the code alone says what it is
                    detail.Unpack(message)
    code = _CODES.get(status.code, StatusCode.UNKNOWN)
    kind = _BY_REASON.get(info.reason.removeprefix("ERROR_REASON_")) or _BY_CODE.get(code, StarpodError)
    return kind(
        status.message or code.name,
        code=code,
        reason=info.reason.removeprefix("ERROR_REASON_"),
        metadata=info.metadata,
        retry_after=float(retry.retry_delay.seconds) + retry.retry_delay.nanos / 1e9,
        violations=[(violation.field, violation.description) for violation in bad_request.field_violations],
    )


def from_rpc(error: grpc.RpcError) -> StarpodError:
    """The exception for a failed unary call or a broken stream, with its rich details where it has any."""
    code: StatusCode = error.code()
    message: str = error.details() or code.name
    trailer: Any = error.trailing_metadata() or ()
    for key, value in trailer:
        if key == "grpc-status-details-bin":
            try:
                return from_status(status_pb2.Status.FromString(value))
            except DecodeError:
                break
    return _BY_CODE.get(code, StarpodError)(message, code=code)
