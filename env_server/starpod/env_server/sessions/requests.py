"""Read requests whose size was checked first, so that a request's time and memory are bounded by its bytes.

A request of a few megabytes can hold millions of fields, and protobuf makes an object of each. A large request is
therefore scanned field by field, up to a limit, before protobuf parses it. A small request cannot exceed the limit and
is parsed at once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from google.protobuf import struct_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from pydantic import ValidationError

from starpod.env_server.authoring.environment import Environment, EnvironmentOptions
from starpod.env_server.episodes.convert import INEXACT, spec_to, want_from
from starpod.env_server.episodes.errors import MAX_VIOLATIONS, CallError, EnvironmentRaised, bad_argument, unsupported
from starpod.env_server.operation.config import ServerLimits
from starpod.serving.user_code import is_ctrl_c
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import Want

M = TypeVar("M", bound=Message)

MAX_FIELDS = 2**18
"""Maximum number of fields of a request and its nested messages. Eight bytes of packed numbers count as a field."""
LARGE_BYTES = 65_536
"""Requests above this many bytes fragment the heap."""
OTHER_BYTES = 65_536
"""Maximum size in bytes of a unary request, not counting fields with their own limit."""
_CREATING = (pb.OpenRequest, pb.ForkRequest, pb.RestoreRequest)
_ID_BYTES = 68
"""Bytes of one session id in a message, including its tag and length."""
_LEAST_BYTES = 2
"""Minimum bytes of a field on the wire."""
_BYTES_OF_A_CHARACTER = 4
"""Maximum bytes of a character in UTF-8."""
_CHUNK = 2**14
"""Number of characters of a JSON text that are scanned between two checks of the limit."""
_SLICE = 2**14
"""Number of fields that are scanned before the event loop serves other calls."""
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""Pattern of a JSON string. An unterminated string matches up to the end of the text, because otherwise each later
quotation mark would start another scan."""


def check_size(kind: type[Message], size: int, limits: ServerLimits) -> None:
    """Raise BAD_ARGUMENT or TOO_LARGE if a unary request has more bytes than its fields' limits allow.

    Args:
        size: bytes of the request as protobuf, or a lower bound.
    """
    if size <= OTHER_BYTES:
        return
    size_limit, field = OTHER_BYTES, "request"
    if kind is pb.StepRequest:
        size_limit, field = size_limit + limits.max_step_bytes, "actions"
    elif kind in (pb.OpenRequest, pb.ResetRequest):
        size_limit, field = size_limit + limits.max_options_bytes, "options"
    elif kind is pb.RestoreRequest:
        size_limit += limits.max_snapshot_bytes
    elif kind in (pb.RenewRequest, pb.CloseRequest):
        size_limit, field = size_limit + limits.max_sessions * _ID_BYTES, "session_ids"
    if size > size_limit:
        if kind is pb.RestoreRequest:
            raise snapshot_too_large(size, limits)
        raise bad_argument(field, f"the request has {size} bytes; this server takes at most {size_limit} of it")


def snapshot_too_large(size: int, limits: ServerLimits) -> CallError:
    return CallError(
        "TOO_LARGE",
        f"the snapshot has {size} bytes; this server allows {limits.max_snapshot_bytes}",
        {"limit": "max_snapshot_bytes"},
    )


def parse(kind: type[M], data: bytes) -> M:
    """Parse a request. Raises BAD_ARGUMENT if the bytes are not such a message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        problem = f"is no {kind.DESCRIPTOR.full_name}: its bytes cannot be read"
    raise bad_argument("request", problem)


def is_large(data: bytes) -> bool:
    """Return whether a request must be scanned by `measure` before it is parsed."""
    return len(data) > MAX_FIELDS * _LEAST_BYTES


def measure(kind: type[Message], data: bytes) -> Iterator[None]:
    """Scan a large request, yielding every 16,384 fields. Raises BAD_ARGUMENT if it has more than MAX_FIELDS fields."""
    budget = MAX_FIELDS
    pause = budget - _SLICE
    spans = [(0, len(data), _fields(kind.DESCRIPTOR))]
    while spans:
        position, end, fields = spans.pop()
        while position < end:
            budget -= 1
            if budget < pause:
                if budget < 0:
                    raise bad_argument("request", f"holds more than {MAX_FIELDS} fields; send less at once")
                pause = budget - _SLICE
                yield
            tag = data[position]
            position += 1
            if tag >= 128:
                tag, position = _varint(data, position - 1, end)
            match tag & 7:
                case 2:
                    length = data[position] if position < end else 0
                    position += 1
                    if length >= 128:
                        length, position = _varint(data, position - 1, end)
                    nested = fields.get(tag >> 3)
                    if nested is _PACKED:
                        budget -= length // 8
                    elif nested is not None and length:
                        spans.append((position, min(position + length, end), _fields(nested)))
                    position += length
                case 0:
                    _, position = _varint(data, position, end)
                case 1:
                    position += 8
                case 5:
                    position += 4
                case _:
                    return  # groups are not used by the contract, and protobuf refuses them


_PACKED = object()


@functools.cache
def _fields(descriptor: Descriptor) -> dict[int, Any]:
    """Return the descriptors of nested messages by field number, and _PACKED for repeated numbers."""
    descriptors: dict[int, Any] = {}
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            descriptors[field.number] = field.message_type
        elif field.is_repeated and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            descriptors[field.number] = _PACKED
    return descriptors


def _varint(data: bytes, place: int, end: int) -> tuple[int, int]:
    """Return a number and the offset after it. Truncated or overlong numbers are left for protobuf to refuse."""
    value = shift = 0
    while place < end:
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128 or shift > 63:
            return value, place
        shift += 7
    return value, end


def extra_members(request: Message) -> int:
    """Return how many sessions beyond the first an Open, Fork or Restore creates; 0 for other requests."""
    return max(0, request.count - 1) if type(request) in _CREATING else 0  # type: ignore[attr-defined]


# --- values ------------------------------------------------------------------------------------------------------


def check_options(options: struct_pb2.Struct, limits: ServerLimits) -> None:
    """Raise BAD_ARGUMENT if options have more bytes or values than the server accepts, before they are converted."""
    size = options.ByteSize()
    if size > limits.max_options_bytes:
        raise bad_argument("options", f"have {size} bytes; this server takes at most {limits.max_options_bytes}")
    if size <= limits.max_values * _LEAST_BYTES:
        return
    budget = limits.max_values
    level: list[struct_pb2.Value] = list(options.fields.values())
    while level:
        budget -= len(level)
        if budget < 0:
            raise bad_argument("options", f"hold more than the {limits.max_values} values that this server takes")
        next_level: list[struct_pb2.Value] = []
        for value in level:
            match value.WhichOneof("kind"):
                case "struct_value":
                    next_level += value.struct_value.fields.values()
                case "list_value":
                    next_level += value.list_value.values
        level = next_level


def parse_options(environment: type[Environment], values: dict[str, Any]) -> EnvironmentOptions:
    """Validate the options of an environment.

    Raises:
        CallError: BAD_ARGUMENT. It names each wrong option, and lists the environment's options if one is unknown.
            ENVIRONMENT_BUG if a validator raises anything but ValueError or AssertionError.
    """
    if not values:
        return _default_options(environment)
    try:
        options = environment.Options.model_validate(values)
        rounded_names = [name for name, value in values.items() if _is_rounded(value, getattr(options, name, None))]
        if rounded_names:
            raise bad_argument(f"options.{rounded_names[0]}", INEXACT)
        return options
    except ValidationError as error:
        option_names = ", ".join(environment.Options.model_fields) or "none"
        violations = []
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        extra_count = len(problems) - MAX_VIOLATIONS
        for problem in problems[:MAX_VIOLATIONS]:
            path = "options." + ".".join(map(str, problem["loc"])) if problem["loc"] else "options"
            text = problem["msg"]
            if problem["type"] == "extra_forbidden":
                text = f"is not an option of {environment.spec.id}; it has: {option_names}"
            violations.append((path, text))
    except CallError:
        raise
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        bug = EnvironmentRaised.from_exception(environment, error, intact=True)
        metadata = {"session": "intact", "exception": bug.exception}
        raise CallError("ENVIRONMENT_BUG", f"{environment.spec.id}: its Options raised {bug}", metadata) from error
    message = "; ".join(f"{path}: {text}" for path, text in violations)
    if extra_count > 0:
        message = f"{message}; and {extra_count} more"
    raise CallError("BAD_ARGUMENT", message, violations=violations)


def _is_rounded(value: Any, converted: Any) -> bool:
    """Return whether an integer option was given as a double, which may be a rounded whole number."""
    if isinstance(value, list) and isinstance(converted, list | tuple):
        return any(map(_is_rounded, value, converted))
    return isinstance(value, float) and isinstance(converted, int)


@functools.cache
def _default_options(environment: type[Environment]) -> EnvironmentOptions:
    return environment.Options()


def check_actions(actions: Sequence[pb.Action], limits: ServerLimits) -> None:
    """Raise BAD_ARGUMENT if a Step has more or larger actions than the server accepts, before they are converted."""
    # Measure no more actions than are allowed, because measuring takes as long as reading.
    size = sum(action.ByteSize() for action in actions[: limits.max_step_actions])
    _check_sizes(len(actions), size, limits)
    if size <= limits.max_values:
        return
    budget = limits.max_values
    for action in actions:
        match action.WhichOneof("kind"):
            case "json":
                budget -= count_json(action.json, budget)
            case "tool_call":
                budget -= count_json(action.tool_call.arguments_json, budget)
        if budget < 0:
            raise bad_argument("actions", f"hold more than the {limits.max_values} JSON values that this server takes")


def check_texts(texts: Sequence[str], limits: ServerLimits) -> None:
    """Raise BAD_ARGUMENT if a row of a columnar request has too many actions, or too large ones."""
    _check_sizes(len(texts), count_bytes(texts, limits.max_step_bytes), limits)


def count_bytes(texts: Sequence[str], limit: int) -> int:
    """Return the number of UTF-8 bytes of the texts.

    If the number of characters already shows whether the bytes exceed `limit`, return that instead, which is faster.
    """
    characters = sum(map(len, texts))
    if characters > limit or characters * _BYTES_OF_A_CHARACTER <= limit:
        return characters
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def _check_sizes(count: int, size: int, limits: ServerLimits) -> None:
    if count > limits.max_step_actions:
        raise bad_argument("actions", f"has {count} entries; this server takes at most {limits.max_step_actions}")
    if size > limits.max_step_bytes:
        raise bad_argument("actions", f"have {size} bytes; this server takes at most {limits.max_step_bytes} in a Step")


def count_json(text: str, max_values: int) -> int:
    """Return an upper bound of the number of values in a JSON text, with keys. Counting stops beyond `max_values`."""
    if (count := _marks(text, 0, len(text), max_values)) < max_values:
        return 1 + count
    # Too many marks: count again without those in strings. Valid JSON has no more strings than values.
    count = position = 0
    for strings, string in enumerate(_STRING.finditer(text)):
        count += _marks(text, position, string.start(), max_values)
        position = string.end()
        if count >= max_values or strings > max_values:
            return max_values + 1
    return 1 + count + _marks(text, position, len(text), max_values)


def _marks(text: str, first: int, last: int, limit: int) -> int:
    """Count the commas, colons and opening brackets in text[first:last]. Stop if the count exceeds `limit`."""
    count = 0
    for start in range(first, last, _CHUNK):
        stop = min(start + _CHUNK, last)
        count += sum(text.count(mark, start, stop) for mark in ",:[{")
        if count > limit:
            break
    return count


# --- rules of single fields --------------------------------------------------------------------------------------


def check_ids(ids: Sequence[str], limits: ServerLimits) -> None:
    """Raise BAD_ARGUMENT if a Renew or Close names more sessions than the server can hold."""
    if len(ids) > limits.max_sessions:
        problem = f"has {len(ids)} entries; this server holds at most {limits.max_sessions} sessions"
        raise bad_argument("session_ids", problem)


def members_of(request: pb.OpenRequest | pb.ForkRequest | pb.RestoreRequest, limits: ServerLimits) -> range:
    """Return the indices, within their group, of the sessions to create. Raises BAD_ARGUMENT."""
    count = request.count or 1
    if count > limits.max_group:
        raise bad_argument("count", f"is {count}; this server creates at most {limits.max_group} at a time")
    if request.first_member + count > 2**32:
        raise bad_argument("first_member", f"is {request.first_member}; {count} places from there end beyond 2^32")
    return range(request.first_member, request.first_member + count)


def lease_of(request: pb.OpenRequest | pb.RestoreRequest, limits: ServerLimits) -> float:
    """Return the lease of new sessions in seconds. Raises BAD_ARGUMENT."""
    seconds = request.lease_seconds
    if seconds != seconds or seconds < 0:
        raise bad_argument("lease_seconds", f"is {seconds}; give seconds, or 0 for the server's default")
    return min(seconds or limits.default_lease_seconds, limits.max_lease_seconds)


def wanted(environment: type[Environment], message: pb.Want) -> Want:
    """Return the optional fields that a request asks for. Raises UNSUPPORTED if the environment lacks one."""
    want = want_from(message)
    if want.image and "png" not in environment.spec.render_modes:
        raise unsupported(environment, "image", "does not render png")
    capabilities = spec_to(environment).capabilities
    for name in ("expert_action", "score", "valid_actions"):
        if getattr(want, name) and not getattr(capabilities, name):
            raise unsupported(environment, name, f"has no {name}")
    return want
