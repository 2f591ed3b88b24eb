"""Floods, slow readers and slow writers: refused or waited for, with the memory bounded and the witness undisturbed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.hostile.conftest import MEBIBYTE, Target, reason_of, status_class, target_server, until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"


@pytest.fixture(scope="module")
def small() -> Iterator[Target]:
    """A server with little room for connections and streams."""
    with target_server("--max-connections", "40", "--max-streams", "30", "--max-sessions", "300") as attacked:
        yield attacked


def test_opens_beyond_the_limit(small: Target) -> None:
    opening = pb.OpenRequest(environment_id="walk-v1", seed=1, count=64)
    opened: list[str] = []
    with small.unharmed():
        while True:
            try:
                opened += [s.session_id for s in small.stub.Open(opening, metadata=small.metadata).sessions]
            except grpc.RpcError as error:
                assert status_class(error) == "OVERLOADED"
                break
        assert 200 < len(opened) <= 300
        small.close(*opened)
    assert small.open().session_id


def test_opens_and_closes_without_end_leave_nothing_behind(small: Target) -> None:
    opening = pb.OpenRequest(environment_id="walk-v1", seed=1, count=64)
    with small.unharmed(memory=16 * MEBIBYTE):
        for _ in range(60):
            small.close(*(s.session_id for s in small.stub.Open(opening, metadata=small.metadata).sessions))


def test_streams_beyond_the_limit(small: Target) -> None:
    ended = threading.Event()

    def idle() -> Iterator[pb.StreamRequest]:
        yield pb.StreamRequest(calls=[pb.Call(call_id=1)])
        ended.wait(250)

    with small.unharmed():
        streams = [small.stub.Stream(idle(), metadata=small.metadata) for _ in range(60)]
        refused = 0
        for stream in streams:
            try:
                assert reason_of(next(stream).replies[0].error) == "BAD_ARGUMENT"
            except grpc.RpcError as error:
                assert status_class(error) == "OVERLOADED"
                refused += 1
        assert refused == 30
        ended.set()
        for stream in streams:
            with contextlib.suppress(grpc.RpcError):
                list(stream)


def test_connections_beyond_the_limit(small: Target) -> None:
    """Connections beyond the limit are closed at once. Older ones continue, and closed ones make room."""
    with small.unharmed():
        flood = [socket.create_connection(("127.0.0.1", small.server.port)) for _ in range(200)]
        for connection in flood:
            with contextlib.suppress(OSError):
                connection.sendall(PREFACE + SETTINGS)
        small.witness.look()
        closed = sum(_is_closed(connection) for connection in flood)
        assert closed >= 160
        for connection in flood:
            connection.close()

    def room() -> bool:
        with grpc.insecure_channel(small.server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                EnvironmentServiceStub(channel).Describe(pb.DescribeRequest(), metadata=small.metadata, timeout=20)
            except grpc.RpcError:
                return False
        return True

    until(room)


def _is_closed(connection: socket.socket) -> bool:
    connection.settimeout(60)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_connections_that_never_become_one(small: Target) -> None:
    """Slow loris: half a greeting, a byte at a time. Others connect meanwhile."""
    with small.unharmed():
        loris = [socket.create_connection(("127.0.0.1", small.server.port)) for _ in range(20)]
        for place in range(8):
            for connection in loris:
                with contextlib.suppress(OSError):
                    connection.sendall(PREFACE[place : place + 1])
            with grpc.insecure_channel(
                small.server.address, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                describe = EnvironmentServiceStub(channel).Describe
                # Connections of the test before may still take up room: who is sent away comes again.
                answer = describe(pb.DescribeRequest(), metadata=small.metadata, timeout=60, wait_for_ready=True)
                assert answer.instance_id
        for connection in loris:
            connection.close()


def test_frames_that_are_no_http2(small: Target) -> None:
    frames = [
        b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 10_000,  # DATA of 16 MiB, on no stream
        b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\xff\xff\xff\xff",  # a window beyond 2^31
        b"\x00\x00\x00\x09\x04\x00\x00\x00\x01" * 1000,  # CONTINUATION of nothing
        b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08" * 1000,  # RST_STREAM of nothing
        b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x04\xff\xff\xff\xff" * 1000,  # SETTINGS that cannot be
        b"\x00\x00\x08\x06\x00\x00\x00\x00\x00pingpong" * 5000,  # PINGs without end
    ]
    with small.unharmed():
        for frame in frames:
            with socket.create_connection(("127.0.0.1", small.server.port)) as connection:
                with contextlib.suppress(OSError):
                    connection.sendall(PREFACE + SETTINGS + frame)
                connection.settimeout(0.2)
                with contextlib.suppress(OSError):
                    connection.recv(10_000)


def test_huge_metadata(small: Target) -> None:
    with small.unharmed():
        for metadata in (
            (("x-large", "x" * 100_000),),
            tuple((f"x-{number}", "y" * 100) for number in range(1000)),
            (("traceparent", "z" * 5000),),
        ):
            with contextlib.suppress(grpc.RpcError):
                small.stub.Describe(pb.DescribeRequest(), metadata=(*small.metadata, *metadata))
        with pytest.raises(grpc.RpcError) as caught:
            small.stub.Describe(pb.DescribeRequest(), metadata=(*small.metadata, ("x-large", "x" * 100_000)))
        assert status_class(caught.value) == "RESOURCE_EXHAUSTED"


class SlowReader:
    """A stream that is written to and never read: its window is full after 64 KiB."""

    def __init__(self, target: Target) -> None:
        # No bandwidth probing, which would widen the window.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        self._channel = grpc.insecure_channel(target.server.address, options=options)
        self._metadata = target.metadata
        self._ended = threading.Event()
        self.written = 0

    def send(self, requests: list[pb.StreamRequest]) -> None:
        def write() -> Iterator[pb.StreamRequest]:
            for request in requests:
                yield request
                self.written += 1
            self._ended.wait(120)

        self._stream = EnvironmentServiceStub(self._channel).Stream(write(), metadata=self._metadata)

    def close(self) -> None:
        self._ended.set()
        self._stream.cancel()
        self._channel.close()


@pytest.mark.parametrize(
    ("environment", "large"), [("anything-v1", "x" * MEBIBYTE), ("waiting-v1", "0" + " " * MEBIBYTE)]
)
def test_a_caller_who_never_reads(target: Target, environment: str, large: str) -> None:
    """400 pictures of a MiB are asked for and never read: in the event loop, and on threads, which go on meanwhile.

    They wait with him who asked, not in the server.
    """
    session = target.open(environment)
    step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text=large)])
    target.stub.Step(step, metadata=target.metadata)
    render = pb.Call(call_id=1, render=pb.RenderRequest(session_id=session.session_id))
    reader = SlowReader(target)
    with target.unharmed(memory=96 * MEBIBYTE):
        reader.send([pb.StreamRequest(calls=[render] * 100)] * 4)
        time.sleep(1.0)
        for _ in range(10):
            target.witness.look()
    reader.close()
    # What he left undone harms nobody: his session is there.
    assert target.stub.Render(render.render, metadata=target.metadata).data
    target.close(session.session_id)


def test_keys_that_are_never_used_again_are_bounded(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys outlive their sessions by a lease: opened and closed for ever, they need a bound of their own."""
    from starpod.env_server.sessions import table as module

    table = module.SessionTable()
    assert module._REMEMBERED_BYTES == 256 * MEBIBYTE
    monkeypatch.setattr(module, "_REMEMBERED_BYTES", 10_000)

    async def open_with(key: str) -> pb.OpenResponse:
        async def create(_: object, request: pb.OpenRequest) -> pb.OpenResponse:
            return pb.OpenResponse(instructions="x" * 500)

        return await table.once(pb.OpenRequest(key=key), pb.OpenResponse, create)

    async def flood() -> int:
        for number in range(1000):
            try:
                await open_with(str(number))
            except Exception as error:
                assert "keys" in str(error)
                return number
        raise AssertionError("no bound")

    import asyncio

    assert asyncio.run(flood()) == 7
    # Known keys are still answered, and forgotten ones make room for new ones.
    assert asyncio.run(open_with("3")).instructions
    table._swept = 0
    table.forget_reservations(time.monotonic() + 1000)
    assert asyncio.run(open_with("new")).instructions
