"""Searches for requests that cost a server much: event-loop time, and memory that it keeps, per byte of request.

Requests are made from the contract's descriptors, on the wire: a request that would be served, and somewhere in it a
field or a message repeated, or a long value, up to a size. What costs most is changed further.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from starpod.v1 import environment_pb2 as pb
from tests.hostile.conftest import MEASUREMENTS, SERVICE, VILLAIN, bearer, units_allowed, units_worked

ALPHABETS = (
    "a",
    "Ü",
    " ",
    "9",
    "[",
    "[]",
    "{},",
    '"",',
    "1,",
    "\\",
    '{"a":',
    "(1+1)",
    "[[[[]]]],",
    "\x00",
    "-",
    "<a>",
    "1.0,",
)
ENVIRONMENTS = ("anything-v1", "walk-v1", "frozen_lake-v1", "sokoban-v1", "countdown-v1", "sudoku-v1", "waiting-v1")
_DEEPEST = 12


@dataclass(frozen=True)
class Shape:
    """The shape of a large request.

    path: fields from the request inwards. level: which of them is repeated; -1: none, the value at the end is long.
    alphabet: of texts. size: bytes, about.
    """

    method: str
    environment: str
    path: tuple[int, ...]
    level: int
    alphabet: str
    size: int


@dataclass(frozen=True)
class Cost:
    """Units of work of the event loop's thread, and the request's bytes."""

    shape: Shape
    work: float
    size: int
    calls: int
    reason: str

    @property
    def excess(self) -> float:
        """The work as a share of what is allowed."""
        return self.work / units_allowed(self.size, self.calls)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, body: bytes) -> bytes:
    """A field of a message, with its length before it."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def _fields(descriptor: Descriptor, path: tuple[int, ...]) -> list[FieldDescriptor]:
    found = []
    for number in path:
        found.append(descriptor.fields_by_number[number])
        descriptor = found[-1].message_type
    return found


def encode(shape: Shape, descriptor: Descriptor) -> bytes:
    """The part of the request that is large."""
    *outer, last = _fields(descriptor, shape.path)
    long = shape.level < 0
    match last.type:
        case FieldDescriptor.TYPE_MESSAGE:
            body = field(last.number, b"")
        case FieldDescriptor.TYPE_STRING:
            unit = shape.alphabet.encode()
            body = field(last.number, (unit * (shape.size // len(unit))) if long else unit)
        case FieldDescriptor.TYPE_BYTES:
            body = field(last.number, bytes(shape.size if long else 1))
        case FieldDescriptor.TYPE_DOUBLE:
            body = varint(last.number << 3 | 1) + bytes(8)
        case _ if last.is_repeated:
            body = field(last.number, b"\x01" * (shape.size if long else 1))
        case _:
            body = varint(last.number << 3) + b"\x01"
    for place in range(len(shape.path) - 1, -1, -1):
        if place == shape.level or (long and place == 0):
            body *= max(1, shape.size // len(body))
        if place:
            body = field(outer[place - 1].number, body)
    return body


class Search:
    """Sends requests to a server, one at a time, and measures each."""

    def __init__(self, address: str, pid: int, seed: int) -> None:
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        self._metadata = bearer(VILLAIN)
        self._pid = pid
        self._draw = random.Random(seed)
        self.costs: list[Cost] = []

    def run(self, count: int, size: int) -> None:
        """Send `count` requests of up to `size` bytes. Every second one is a change of one of the worst so far."""
        for number in range(count):
            # Of each place in a request the worst, so that one costly place does not hide the others.
            places = {(each.shape.method, each.shape.path): each for each in sorted(self.costs, key=lambda c: c.excess)}
            worst = sorted(places.values(), key=lambda cost: -cost.excess)[:8]
            shape = self._changed(self._draw.choice(worst).shape) if worst and number % 2 else self._drawn(size)
            self.costs.append(self.measure(shape))

    def measure(self, shape: Shape) -> Cost:
        """Return the request's cost; what costs too much is asked again."""
        for _ in range(MEASUREMENTS):
            if (cost := self._ask(shape)).excess <= 1:
                break
        return cost

    def _ask(self, shape: Shape) -> Cost:
        opening = pb.OpenRequest(environment_id=shape.environment, seed=1)
        opened = pb.OpenResponse.FromString(
            self._channel.unary_unary(SERVICE + "Open")(opening.SerializeToString(), metadata=self._metadata)
        )
        session_id = opened.sessions[0].session_id
        kind, base = BASES[shape.method]
        request = base(shape, session_id).SerializeToString() + encode(shape, kind.DESCRIPTOR)
        (reply, reason), work = units_worked(self._pid, lambda: self._reply(shape.method, request))
        closing = pb.CloseRequest(session_ids=[session_id])
        if shape.method in ("Open", "Fork", "Restore") and reply:
            with contextlib.suppress(Exception):
                closing.session_ids.extend(each.session_id for each in pb.OpenResponse.FromString(reply).sessions)
        self._channel.unary_unary(SERVICE + "Close")(closing.SerializeToString(), metadata=self._metadata)
        calls = 1
        if shape.method == "Stream":
            with contextlib.suppress(DecodeError):
                message = pb.StreamRequest.FromString(request)
                calls = len(message.calls) + len(message.steps.call_ids)
        return Cost(shape, work, len(request), calls, reason)

    def _reply(self, method: str, request: bytes) -> tuple[bytes, str]:
        """The last message of the reply, empty if the call failed, and the error's code."""
        try:
            if method == "Stream":
                stream = self._channel.stream_stream(SERVICE + method)
                return [b"", *stream(iter([request]), metadata=self._metadata, timeout=300)][-1], ""
            return self._channel.unary_unary(SERVICE + method)(request, metadata=self._metadata, timeout=300), ""
        except grpc.RpcError as error:
            return b"", error.code().name

    def _drawn(self, size: int) -> Shape:
        draw = self._draw
        method = draw.choice(list(BASES))
        path: list[int] = []
        descriptor: Descriptor | None = BASES[method][0].DESCRIPTOR
        while descriptor is not None and len(path) < _DEEPEST and (fields := descriptor.fields):
            chosen = draw.choice(fields)
            path.append(chosen.number)
            descriptor = chosen.message_type if draw.random() < 0.95 else None
        level = draw.randrange(-1, len(path))
        return Shape(
            method, draw.choice(ENVIRONMENTS), tuple(path), level, draw.choice(ALPHABETS), draw.randrange(size)
        )

    def _changed(self, shape: Shape) -> Shape:
        draw = self._draw
        match draw.randrange(4):
            case 0:
                return replace(shape, level=draw.randrange(-1, len(shape.path)))
            case 1:
                return replace(shape, alphabet=draw.choice(ALPHABETS))
            case 2:
                return replace(shape, environment=draw.choice(ENVIRONMENTS))
        return replace(shape, size=max(1, int(shape.size * draw.uniform(0.3, 2.0))))


def _stream(shape: Shape, session_id: str) -> Message:
    steps = pb.StepColumns(call_ids=[1], session_ids=[session_id], epochs=[1], step_indices=[0], action_counts=[0])
    return pb.StreamRequest(steps=steps) if shape.path[0] == 2 else pb.StreamRequest()


BASES: dict[str, tuple[type[Message], Callable[[Shape, str], Message]]] = {
    "Describe": (pb.DescribeRequest, lambda shape, _: pb.DescribeRequest()),
    "Open": (pb.OpenRequest, lambda shape, _: pb.OpenRequest(environment_id=shape.environment)),
    "Reset": (pb.ResetRequest, lambda _, session_id: pb.ResetRequest(session_id=session_id, epoch=1)),
    "Step": (pb.StepRequest, lambda _, session_id: pb.StepRequest(session_id=session_id, epoch=1)),
    "Render": (pb.RenderRequest, lambda _, session_id: pb.RenderRequest(session_id=session_id)),
    "Fork": (pb.ForkRequest, lambda _, session_id: pb.ForkRequest(session_id=session_id, epoch=1)),
    "Snapshot": (pb.SnapshotRequest, lambda _, session_id: pb.SnapshotRequest(session_id=session_id)),
    "Restore": (pb.RestoreRequest, lambda *_: pb.RestoreRequest()),
    "Renew": (pb.RenewRequest, lambda *_: pb.RenewRequest()),
    "Close": (pb.CloseRequest, lambda *_: pb.CloseRequest()),
    "Stream": (pb.StreamRequest, _stream),
}
