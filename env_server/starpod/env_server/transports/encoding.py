"""Requests and replies as JSON (ProtoJSON). Requests that would take too long to parse are refused first."""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar

from google.protobuf import json_format, struct_pb2
from google.protobuf.message import Message

from starpod.env_server.episodes.convert import EXACT, INEXACT
from starpod.env_server.episodes.errors import CallError, bad_argument
from starpod.env_server.operation.config import ServerLimits
from starpod.env_server.sessions.requests import check_size, count_json
from starpod.v1 import environment_pb2 as pb

M = TypeVar("M", bound=Message)

_VALUES_OF_AN_ACTION = 4
_OTHER_VALUES = 1_024
_LONG_NUMBER = re.compile(r"[0-9]{16}")
"""Pattern that occurs in every integer of at least 2^53."""
STREAM_VALUES = 32_768
"""Maximum number of JSON values in one batch."""
_ESCAPED = 2
"""Maximum ratio of a text's bytes in JSON to its bytes in the message, because of escapes and base64."""


def max_bytes(kind: type[Message], limits: ServerLimits) -> int:
    """Return the maximum bytes of a request's body; 0 means no limit. Restore gets a third more, for base64."""
    return limits.max_message_bytes * 4 // 3 if kind is pb.RestoreRequest else limits.max_message_bytes


def body_too_large(size: int, max_bytes: int) -> CallError:
    return CallError(
        "TOO_LARGE", f"the body has {size} bytes; this server takes at most {max_bytes}", {"limit": "max_message_bytes"}
    )


def read_json(kind: type[M], data: bytes, limits: ServerLimits) -> M:
    """Parse the JSON (UTF-8) of a request. Raises BAD_ARGUMENT, or TOO_LARGE for a snapshot above its limit."""
    if kind is not pb.StreamRequest:
        check_size(kind, len(data) // _ESCAPED, limits)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise bad_argument("request", f"is not UTF-8: {error}") from error
    check_values(text, _max_values(kind, limits))
    try:
        request = json_format.Parse(text, kind(), ignore_unknown_fields=True)
    except (ValueError, RecursionError, json_format.Error) as error:
        problem = str(error) or "it is nested too deeply"
    else:
        if kind is not pb.StreamRequest:
            check_size(kind, request.ByteSize(), limits)
        if kind is pb.ForkRequest or (kind is pb.StreamRequest and '"randomness"' in text):
            _check_enum(text, kind)
        if _LONG_NUMBER.search(text):
            _check_options(json.loads(text))
        return request
    raise bad_argument("request", f"is no {kind.DESCRIPTOR.full_name} in JSON: {problem}")


def check_values(text: str, max_values: int = STREAM_VALUES) -> None:
    """Raise BAD_ARGUMENT if a JSON text holds more than `max_values` values."""
    if count_json(text, max_values) > max_values:
        raise bad_argument("request", f"holds more than {max_values} JSON values; send less at once")


def write_json(message: Message) -> bytes:
    """Return a message as JSON with the proto's field names, including fields with default values."""
    try:
        value = _to_dict(message)
    except (ValueError, json_format.Error):  # a Struct holds a number that JSON cannot express
        copy = type(message)()
        copy.CopyFrom(message)
        _spell_numbers(copy)
        value = _to_dict(copy)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _to_dict(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _max_values(kind: type[Message], limits: ServerLimits) -> int:
    if kind is pb.StreamRequest:
        return STREAM_VALUES
    if kind in (pb.RenewRequest, pb.CloseRequest):
        return limits.max_sessions + _OTHER_VALUES
    return limits.max_values + _VALUES_OF_AN_ACTION * limits.max_step_actions + _OTHER_VALUES


def _check_enum(text: str, kind: type[Message]) -> None:
    """Raise BAD_ARGUMENT for an unknown `randomness`.

    A parser that ignores unknown fields also ignores unknown enum names, and would create other copies than requested.
    """
    document = json.loads(text)
    forks = [document] if kind is pb.ForkRequest else [call.get("fork") for call in document.get("calls") or ()]
    for fork in forks:
        randomness = fork and fork.get("randomness")
        if isinstance(randomness, str) and randomness not in pb.ForkRandomness.keys():  # noqa: SIM118 - no mapping
            names = " or ".join(pb.ForkRandomness.keys()[1:])
            raise bad_argument("randomness", f"is {randomness!r}; use {names}")


def _check_options(value: Any, inside: bool = False) -> None:
    """Raise BAD_ARGUMENT for a whole number within `options` that a double cannot represent."""
    if inside and isinstance(value, int) and abs(value) >= EXACT:
        raise bad_argument("options", f"{value} {INEXACT}")
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for name, item in value.items():
            _check_options(item, inside or name == "options")


def _spell_numbers(message: Message) -> None:
    """Replace infinities and NaN in Structs by the strings that ProtoJSON uses for other fields."""
    if isinstance(message, struct_pb2.Value) and not math.isfinite(number := message.number_value):
        message.string_value = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            children = value.values() if field.message_type.fields_by_name["value"].message_type else ()
        else:
            children = value if field.is_repeated else (value,)
        for child in children:
            _spell_numbers(child)
