"""Reads requests, measured before they are read: what a request costs in time and memory is bounded by its size.

A request of a few megabytes can hold millions of fields, each of which becomes an object. So a large one is walked over
as it came, field by field and up to a bound, before protobuf makes messages of it. One that is small cannot hold more
than the bound, and is not walked.
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

from starpod.env_server.config import ServerLimits
from starpod.env_server.convert import INEXACT
from starpod.env_server.environment import Environment, EnvironmentOptions
from starpod.env_server.errors import MAX_VIOLATIONS, CallError, bad_argument
from starpod.v1 import environment_pb2 as pb

M = TypeVar("M", bound=Message)

MAX_FIELDS = 2**18
"""Of one request, those of the messages in it included; eight bytes of packed numbers count as one."""
LARGE_BYTES = 65_536
"""A request that has more leaves holes in memory."""
OTHER_BYTES = 65_536
"""Of a unary request, beside what has a limit of its own."""
_CREATING = (pb.OpenRequest, pb.ForkRequest, pb.RestoreRequest)
_ID_BYTES = 68
"""Of a session's id, with what tells that it is one."""
_LEAST_BYTES = 2
"""Of a field on the wire."""
_BYTES_OF_A_CHARACTER = 4
"""At most, in UTF-8."""
_CHUNK = 2**14
"""Characters of a JSON text that are looked at before it is asked whether these are enough."""
_SLICE = 2**14
"""Fields that are looked at before others have the event loop."""
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""One without an end goes to the end of the text: else each quotation mark in it would begin another search."""


def check_size(kind: type[Message], size: int, limits: ServerLimits) -> None:
    """Raises BAD_ARGUMENT or TOO_LARGE if a unary request has more bytes than what it may hold can have."""
    if size <= OTHER_BYTES:
        return
    most, field = OTHER_BYTES, "request"
    if kind is pb.StepRequest:
        most, field = most + limits.max_step_bytes, "actions"
    elif kind in (pb.OpenRequest, pb.ResetRequest):
        most, field = most + limits.max_options_bytes, "options"
    elif kind is pb.RestoreRequest:
        most += limits.max_snapshot_bytes
    elif kind in (pb.RenewRequest, pb.CloseRequest):
        most, field = most + limits.max_sessions * _ID_BYTES, "session_ids"
    if size > most:
        if kind is pb.RestoreRequest:
            raise snapshot_too_large(size, limits)
        raise bad_argument(field, f"the request has {size} bytes; this server takes at most {most} of it")


def snapshot_too_large(size: int, limits: ServerLimits) -> CallError:
    return CallError(
        "TOO_LARGE",
        f"the snapshot has {size} bytes; this server allows {limits.max_snapshot_bytes}",
        {"limit": "max_snapshot_bytes"},
    )


def parse(kind: type[M], data: bytes) -> M:
    """The request. Raises BAD_ARGUMENT for bytes that are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        problem = f"is no {kind.DESCRIPTOR.full_name}: its bytes cannot be read"
    raise bad_argument("request", problem)


def is_large(data: bytes) -> bool:
    """Whether the request must be measured before it is parsed."""
    return len(data) > MAX_FIELDS * _LEAST_BYTES


def measure(kind: type[Message], data: bytes) -> Iterator[None]:
    """Walks over a large request, with pauses. Raises BAD_ARGUMENT if it holds more than MAX_FIELDS fields."""
    left = MAX_FIELDS
    pause = left - _SLICE
    spans = [(0, len(data), _fields(kind.DESCRIPTOR))]
    while spans:
        place, end, fields = spans.pop()
        while place < end:
            left -= 1
            if left < pause:
                if left < 0:
                    raise bad_argument("request", f"holds more than {MAX_FIELDS} fields; send less at once")
                pause = left - _SLICE
                yield
            tag = data[place]
            place += 1
            if tag >= 128:
                tag, place = _varint(data, place - 1, end)
            match tag & 7:
                case 2:
                    length = data[place] if place < end else 0
                    place += 1
                    if length >= 128:
                        length, place = _varint(data, place - 1, end)
                    inside = fields.get(tag >> 3)
                    if inside is _PACKED:
                        left -= length // 8
                    elif inside is not None and length:
                        spans.append((place, min(place + length, end), _fields(inside)))
                    place += length
                case 0:
                    _, place = _varint(data, place, end)
                case 1:
                    place += 8
                case 5:
                    place += 4
                case _:
                    return  # groups, which no message of ours has: protobuf refuses them


_PACKED = object()


@functools.cache
def _fields(descriptor: Descriptor) -> dict[int, Any]:
    """The fields of a message that hold more than one value, by number: the message's descriptor, or _PACKED."""
    known: dict[int, Any] = {}
    for field in descriptor.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            known[field.number] = field.message_type
        elif field.is_repeated and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            known[field.number] = _PACKED
    return known


def _varint(data: bytes, place: int, end: int) -> tuple[int, int]:
    """A number and the place after it. What is cut short, or too long, is left to protobuf to refuse."""
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
    """How many sessions more than one an Open, Fork or Restore makes; none for all else."""
    return max(0, request.count - 1) if type(request) in _CREATING else 0  # type: ignore[attr-defined]


# --- values ------------------------------------------------------------------------------------------------------


def check_options(options: struct_pb2.Struct, limits: ServerLimits) -> None:
    """Raises BAD_ARGUMENT if options hold more bytes or values than the server takes, before they are converted."""
    size = options.ByteSize()
    if size > limits.max_options_bytes:
        raise bad_argument("options", f"have {size} bytes; this server takes at most {limits.max_options_bytes}")
    if size <= limits.max_values * _LEAST_BYTES:
        return
    left = limits.max_values
    level: list[struct_pb2.Value] = list(options.fields.values())
    while level:
        left -= len(level)
        if left < 0:
            raise bad_argument("options", f"hold more than the {limits.max_values} values that this server takes")
        below: list[struct_pb2.Value] = []
        for value in level:
            match value.WhichOneof("kind"):
                case "struct_value":
                    below += value.struct_value.fields.values()
                case "list_value":
                    below += value.list_value.values
        level = below


def parse_options(environment: type[Environment], values: dict[str, Any]) -> EnvironmentOptions:
    """Return the options of an environment.

    Raises BAD_ARGUMENT that names each wrong option, and lists the options that there are if one is unknown.
    """
    if not values:
        return _default_options(environment)
    try:
        options = environment.Options.model_validate(values)
        rounded = [name for name, value in values.items() if _is_rounded(value, getattr(options, name, None))]
        if rounded:
            raise bad_argument(f"options.{rounded[0]}", INEXACT)
        return options
    except ValidationError as error:
        known = ", ".join(environment.Options.model_fields) or "none"
        violations = []
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        more = len(problems) - MAX_VIOLATIONS
        for problem in problems[:MAX_VIOLATIONS]:
            path = "options." + ".".join(map(str, problem["loc"])) if problem["loc"] else "options"
            text = problem["msg"]
            if problem["type"] == "extra_forbidden":
                text = f"is not an option of {environment.spec.id}; it has: {known}"
            violations.append((path, text))
    message = "; ".join(f"{path}: {text}" for path, text in violations)
    if more > 0:
        message = f"{message}; and {more} more"
    raise CallError("BAD_ARGUMENT", message, violations=violations)


def _is_rounded(given: Any, taken: Any) -> bool:
    """Return whether a double that may stand for several whole numbers was taken for one."""
    if isinstance(given, list) and isinstance(taken, list | tuple):
        return any(map(_is_rounded, given, taken))
    return isinstance(given, float) and isinstance(taken, int)


@functools.cache
def _default_options(environment: type[Environment]) -> EnvironmentOptions:
    return environment.Options()


def check_actions(actions: Sequence[pb.Action], limits: ServerLimits) -> None:
    """Raises BAD_ARGUMENT if a Step's actions are more, or larger, than the server takes, before they are converted."""
    # Not the bytes of more than may be: to measure them takes as long as to read them.
    size = sum(action.ByteSize() for action in actions[: limits.max_step_actions])
    _check_sizes(len(actions), size, limits)
    if size <= limits.max_values:
        return
    left = limits.max_values
    for action in actions:
        match action.WhichOneof("kind"):
            case "json":
                left -= count_json(action.json, left)
            case "tool_call":
                left -= count_json(action.tool_call.arguments_json, left)
        if left < 0:
            raise bad_argument("actions", f"hold more than the {limits.max_values} JSON values that this server takes")


def check_texts(texts: Sequence[str], limits: ServerLimits) -> None:
    """The same for the texts of a row of columns."""
    _check_sizes(len(texts), count_bytes(texts, limits.max_step_bytes), limits)


def count_bytes(texts: Sequence[str], limit: int) -> int:
    """Return the bytes of the texts in UTF-8, or only a lower bound if that is enough to tell on which side of `limit`
    they are."""
    characters = sum(map(len, texts))
    if characters > limit or characters * _BYTES_OF_A_CHARACTER <= limit:
        return characters
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def _check_sizes(count: int, size: int, limits: ServerLimits) -> None:
    if count > limits.max_step_actions:
        raise bad_argument("actions", f"has {count} entries; this server takes at most {limits.max_step_actions}")
    if size > limits.max_step_bytes:
        raise bad_argument("actions", f"have {size} bytes; this server takes at most {limits.max_step_bytes} in a Step")


def count_json(text: str, most: int) -> int:
    """How many values a JSON text holds at most, keys included. Stops to count beyond `most`."""
    if (count := _marks(text, 0, len(text), most)) < most:
        return 1 + count
    # Not those in strings, then. There are no more strings than values, or it is not JSON.
    count = place = 0
    for strings, string in enumerate(_STRING.finditer(text)):
        count += _marks(text, place, string.start(), most)
        place = string.end()
        if count >= most or strings > most:
            return most + 1
    return 1 + count + _marks(text, place, len(text), most)


def _marks(text: str, first: int, last: int, most: int) -> int:
    """How many characters there are with each of which a value begins, but for the first. Stops beyond `most`."""
    count = 0
    for start in range(first, last, _CHUNK):
        stop = min(start + _CHUNK, last)
        count += sum(text.count(mark, start, stop) for mark in ",:[{")
        if count > most:
            break
    return count
