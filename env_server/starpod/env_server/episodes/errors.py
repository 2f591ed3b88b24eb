"""Failed calls: a gRPC code, a reason from the protocol's table, and google.rpc details with advice."""

from __future__ import annotations

import importlib
import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pydantic
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from starpod.env_server.authoring.environment import BadResult, Environment
from starpod.v1 import environment_pb2 as pb
from starpod.v1.statuses import DOMAIN

Advice = Literal["retry", "reopen", "give_up"]

_TABLE: dict[str, tuple[int, Advice]] = {
    "BAD_ARGUMENT": (code_pb2.INVALID_ARGUMENT, "give_up"),
    "UNKNOWN_ENVIRONMENT": (code_pb2.NOT_FOUND, "give_up"),
    "UNKNOWN_VERSION": (code_pb2.NOT_FOUND, "give_up"),
    "UNKNOWN_SESSION": (code_pb2.NOT_FOUND, "reopen"),
    "OUT_OF_ORDER": (code_pb2.FAILED_PRECONDITION, "give_up"),
    "EPISODE_OVER": (code_pb2.FAILED_PRECONDITION, "give_up"),
    "KEY_REUSED": (code_pb2.FAILED_PRECONDITION, "give_up"),
    "INCOMPATIBLE_SNAPSHOT": (code_pb2.FAILED_PRECONDITION, "give_up"),
    "UNSUPPORTED": (code_pb2.UNIMPLEMENTED, "give_up"),
    "OVERLOADED": (code_pb2.RESOURCE_EXHAUSTED, "retry"),
    "TOO_LARGE": (code_pb2.RESOURCE_EXHAUSTED, "give_up"),
    "DRAINING": (code_pb2.UNAVAILABLE, "reopen"),
    "SESSION_LOST": (code_pb2.DATA_LOSS, "reopen"),
    "ENVIRONMENT_BUG": (code_pb2.INTERNAL, "give_up"),
    "UNAUTHENTICATED": (code_pb2.UNAUTHENTICATED, "give_up"),
    "DEADLINE": (code_pb2.DEADLINE_EXCEEDED, "retry"),
    "SERVER_BUG": (code_pb2.INTERNAL, "give_up"),
}
assert {f"ERROR_REASON_{name}" for name in _TABLE} == set(pb.ErrorReason.keys()[1:])


# gRPC drops a trailer above 8 KiB, and the whole error with it.
_MAX_MESSAGE = 1_500
_MAX_VALUE = 512
MAX_VIOLATIONS = 20
"""Maximum number of violations that a BAD_ARGUMENT lists. Fewer are listed if they do not fit."""
_VIOLATIONS_BYTES = 3_072


@dataclass(eq=False)
class CallError(Exception):
    """A call that failed."""

    reason: str
    """Name of the protocol's ErrorReason, without its prefix. It determines the gRPC code and the advice."""
    message: str
    """One sentence that says what was wrong and how to fix it."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Values of the keys that the protocol defines for the reason."""
    retry_after: float | None = None
    """Seconds after which to retry, for OVERLOADED."""
    violations: Sequence[tuple[str, str]] = ()
    """Pairs of field path and problem, for BAD_ARGUMENT."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    @property
    def code(self) -> int:
        """The gRPC status code."""
        return _TABLE[self.reason][0]

    def status(self) -> status_pb2.Status:
        """Return the error as a google.rpc.Status."""
        metadata = {name: shorten(value, _MAX_VALUE) for name, value in self.metadata.items()}
        details = [
            error_details_pb2.ErrorInfo(
                reason=self.reason, domain=DOMAIN, metadata={**metadata, "advice": _TABLE[self.reason][1]}
            )
        ]
        packed_details = [_pack(details[0])]
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(round(self.retry_after * 1000))
            packed_details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
        if self.violations:
            bad_request = error_details_pb2.BadRequest()
            for path, text in self.violations[:MAX_VIOLATIONS]:
                path, text = shorten(path, _MAX_VALUE // 4), shorten(text, _MAX_VALUE // 2)
                bad_request.field_violations.add(field=path, description=text)
                if bad_request.ByteSize() > _VIOLATIONS_BYTES:
                    del bad_request.field_violations[-1]
                    break
            packed_details.append(_pack(bad_request))
        return status_pb2.Status(code=self.code, message=shorten(self.message, _MAX_MESSAGE), details=packed_details)


def shorten(text: str, limit: int) -> str:
    """Shorten a text that others wrote, for use in an error. Errors are sent as headers, whose size is limited.

    `limit` counts bytes in HTTP/2, which sends three for each byte that is not printable ASCII.
    """
    text = text[:limit].encode(errors="replace").decode()
    budget = limit
    for index, character in enumerate(text):
        budget -= 1 if " " <= character <= "~" else 3 * len(character.encode())
        if budget < 0:
            return text[: max(index - 3, 0)] + "..."
    return text


def _pack(
    message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo | error_details_pb2.BadRequest,
) -> any_pb2.Any:
    detail = any_pb2.Any()
    detail.Pack(message)
    return detail


def release(error: BaseException) -> None:
    """Free an exception's frames once its error was sent. The frames refer to the request and form reference cycles."""
    exception: BaseException | None = error
    while exception is not None:
        traceback.clear_frames(exception.__traceback__)
        next_exception = exception.__cause__ or exception.__context__
        exception.__traceback__ = exception.__cause__ = exception.__context__ = None
        exception = next_exception


_NOT_AUTHORS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    *(f"{os.path.dirname(file)}{os.sep}" for file in (importlib.__file__, pydantic.__file__)),
    "<",
)
"""Beginnings of the names of files that call an author's code."""


def place_of(error: BaseException) -> str:
    """Return file and line of the author's code that raised, such as `vault.py, line 9`; empty if only our code did."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}, line {error.lineno}"
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    author_calls = [call for call in calls if not call[0].startswith(_NOT_AUTHORS)]
    if not author_calls:
        return ""
    file = author_calls[0][0]  # not a file of functions that it called, such as the standard library's
    return f"{os.path.basename(file)}, line {[line for name, line in author_calls if name == file][-1]}"


def place_of_function(function: Callable[..., object]) -> str:
    """Return file and line where a function is defined, such as `vault.py, line 9`; empty if it is not Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{os.path.basename(code.co_filename)}, line {code.co_firstlineno}" if code else ""


def bad_argument(path: str, problem: str) -> CallError:
    """Return BAD_ARGUMENT about one field of the request."""
    return CallError("BAD_ARGUMENT", f"{path}: {problem}", violations=[(path, problem)])


def overloaded(limit: str, message: str, retry_after: float) -> CallError:
    """Return the error for a call that a full server refuses now and may take later.

    Args:
        limit: name of the limit that is reached, such as "max_sessions".
        message: what is full, and what the caller can do.
        retry_after: seconds after which to retry.
    """
    return CallError("OVERLOADED", message, {"limit": limit}, retry_after=retry_after)


def unsupported(environment: type[Environment], capability: str, problem: str) -> CallError:
    """Return UNSUPPORTED for a capability that the environment lacks.

    Args:
        environment: the class, whose id and version begin the message.
        capability: name of the capability, such as "snapshot".
        problem: the rest of the message, such as "has no state that could be saved".
    """
    spec = environment.spec
    return CallError("UNSUPPORTED", f"{spec.id} {spec.version} {problem}", {"capability": capability})


class EnvironmentRaised(Exception):
    """The environment's code raised an exception. `intact` says whether the session can continue."""

    def __init__(self, exception: str, message: str, *, intact: bool) -> None:
        super().__init__(f"{exception}: {message}")
        self.exception = exception
        self.message = message
        self.intact = intact

    @classmethod
    def from_exception(cls, environment: type[Environment], error: BaseException, *, intact: bool) -> EnvironmentRaised:
        """Return the error for an exception of an environment's code, with the file and line that raised it.

        Args:
            error: the exception. For BadResult, the place is the definition of its method.
            intact: whether the episode is unchanged, so that the session can continue.
        """
        text, location = str(error), place_of(error)
        if isinstance(error, BadResult):  # its method has returned, so the traceback does not show it
            by_default = error.method == "observe" and environment.observe is Environment.observe
            method = getattr(environment, "render" if by_default else error.method)
            text, location = (
                f"{environment.__name__}.{method.__name__} returned {error.problem}",
                place_of_function(method),
            )
        return cls(type(error).__name__, f"{text} ({location})" if location else text, intact=intact)

    @classmethod
    def of_copy(cls, death: Exception) -> EnvironmentRaised:
        """Return the error for a fork in which the copy's process died. The original session can continue."""
        return cls(type(death).__name__, f"the copy's process {death}", intact=True)
