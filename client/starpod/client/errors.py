"""Exceptions of the client: one per error reason of the protocol (docs/protocol.md, error table)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import grpc
from google.rpc import status_pb2
from grpc import StatusCode

from starpod.v1.statuses import details_of, status_in

_CODES: dict[int, StatusCode] = {code.value[0]: code for code in StatusCode}
_BY_REASON: dict[str, type[StarpodError]] = {}


class StarpodError(Exception):
    """Base class of all errors: a call failed.

    Attributes:
        message: what was wrong and how to fix it.
        code: the gRPC status code.
        reason: the protocol's ErrorReason without its prefix; "" if the server gave none.
        advice: what to do: "retry" the identical call, "reopen" the session, or "give_up".
        metadata: the details that the protocol defines for the reason.
        retry_after: seconds to wait before a retry; 0 if the server gave none.
        violations: for bad arguments, pairs of a field and what is wrong with it.
    """

    _code: ClassVar[StatusCode] = StatusCode.UNKNOWN
    _reason: ClassVar[str] = ""
    _advice: ClassVar[str] = "give_up"

    def __init_subclass__(cls, *, code: StatusCode | None = None, reason: str = "", advice: str = "") -> None:
        """Set a subclass's default code, reason and advice. Arguments that are left out are inherited."""
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
    """The request is malformed; `violations` names the fields."""

    options_schema: Mapping[str, Any] | None = None
    """JSON Schema of the environment's options, if the error concerns options."""


class UnknownEnvironment(StarpodError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_ENVIRONMENT"):
    """No server hosts this environment; `nearest` lists similar ids."""

    @property
    def nearest(self) -> list[str]:
        return self._list("nearest")


class UnknownVersion(StarpodError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_VERSION"):
    """No hosted version of the environment is in the requested range; `available` lists the hosted versions."""

    @property
    def available(self) -> list[str]:
        return self._list("available")


class UnknownSession(StarpodError, code=StatusCode.NOT_FOUND, reason="UNKNOWN_SESSION", advice="reopen"):
    """The session never existed, was closed, or its lease expired."""


class OutOfOrder(StarpodError, code=StatusCode.FAILED_PRECONDITION, reason="OUT_OF_ORDER"):
    """The server expects another epoch or step index."""

    @property
    def expected_epoch(self) -> int:
        """Epoch that the server expects."""
        return int(self.metadata.get("expected_epoch", 0))

    @property
    def expected_step_index(self) -> int:
        """Step index that the server expects."""
        return int(self.metadata.get("expected_step_index", 0))


class EpisodeOver(OutOfOrder, reason="EPISODE_OVER"):
    """The episode is over: reset first."""


class KeyReused(StarpodError, code=StatusCode.FAILED_PRECONDITION, reason="KEY_REUSED"):
    """The idempotency key of an Open, Fork or Restore was used before, for a different request."""


class IncompatibleSnapshot(StarpodError, code=StatusCode.FAILED_PRECONDITION, reason="INCOMPATIBLE_SNAPSHOT"):
    """No hosted version of the environment can restore this snapshot."""


class Unsupported(StarpodError, code=StatusCode.UNIMPLEMENTED, reason="UNSUPPORTED"):
    """The environment or the server lacks a capability."""


class Overloaded(StarpodError, code=StatusCode.RESOURCE_EXHAUSTED, reason="OVERLOADED", advice="retry"):
    """A limit of the server was reached. Retry after `retry_after` seconds; the fleet has already tried."""


class TooLarge(StarpodError, code=StatusCode.RESOURCE_EXHAUSTED, reason="TOO_LARGE"):
    """A message or snapshot is larger than allowed."""


class Draining(StarpodError, code=StatusCode.UNAVAILABLE, reason="DRAINING", advice="reopen"):
    """The server is shutting down and accepts no new sessions."""


class SessionLost(StarpodError, code=StatusCode.DATA_LOSS, reason="SESSION_LOST", advice="reopen"):
    """The session is gone and could not be recovered."""


class EnvironmentBug(StarpodError, code=StatusCode.INTERNAL, reason="ENVIRONMENT_BUG"):
    """The environment's code raised an exception; `session_lost` says whether that ended the session."""

    @property
    def session_lost(self) -> bool:
        return self.metadata.get("session") == "lost"


class Unauthenticated(StarpodError, code=StatusCode.UNAUTHENTICATED, reason="UNAUTHENTICATED"):
    """The server requires a bearer token or a client certificate, and the call had none that it accepts."""


class DeadlineExceeded(StarpodError, code=StatusCode.DEADLINE_EXCEEDED, reason="DEADLINE", advice="retry"):
    """The call took too long. The server executes it exactly once; repeating the identical call returns its reply."""


class ServerBug(StarpodError, code=StatusCode.INTERNAL, reason="SERVER_BUG"):
    """The server failed because of a bug, or its reply breaks the protocol."""


class Unreachable(StarpodError, code=StatusCode.UNAVAILABLE, advice="reopen"):
    """The server does not answer: it is not running, not reachable, or the connection broke."""


class ReplayDiverged(SessionLost, advice="give_up"):
    """A replay differs from the original episode: the environment is not deterministic, although its spec says so.

    Attributes:
        step: the turn at which the replay differs; 0 is the first observation, 1 the reply to the first turn.
        what: a description of the difference, such as "another state".
        expected_key: state key in the original episode.
        found_key: state key in the replay. Equal to `expected_key` if only other fields differ.
    """

    def __init__(
        self,
        step: int,
        expected_key: bytes,
        found_key: bytes,
        what: str,
        cause: str = "The environment is not deterministic: declare this in its spec, and sessions are recovered from "
        "snapshots.",
    ) -> None:
        keys = (
            "" if expected_key == found_key else f" (state key {expected_key.hex()} became {found_key.hex() or 'none'})"
        )
        super().__init__(f"The replay differs from the episode at step {step}: {what}{keys}. {cause}")
        self.step = step
        self.what = what
        self.expected_key = expected_key
        self.found_key = found_key


# Errors of the transport or a proxy have a code but no reason.
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
    """Return the exception for a google.rpc.Status, the form of an error in a Reply of the Stream."""
    info, violations, retry_after = details_of(status)
    code = _CODES.get(status.code, StatusCode.UNKNOWN)
    reason = info.reason.removeprefix("ERROR_REASON_") if info else ""  # then the code selects the exception
    error_class = _BY_REASON.get(reason) or _BY_CODE.get(code, StarpodError)
    return error_class(
        status.message or code.name,
        code=code,
        reason=reason,
        metadata=info.metadata if info else None,
        retry_after=retry_after or 0.0,
        violations=violations,
    )


def from_rpc(error: grpc.RpcError) -> StarpodError:
    """Return the exception for a failed unary call or a broken stream, with the error's details if it has any."""
    code: StatusCode = error.code()
    message: str = error.details() or code.name
    if (status := status_in(error.trailing_metadata())) is not None:
        return from_status(status)
    return _BY_CODE.get(code, StarpodError)(message, code=code)
