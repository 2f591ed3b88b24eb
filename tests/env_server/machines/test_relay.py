"""The relay of connections between a process that listens and one that connects, without a machine between them."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from starpod.env_server.machines import relay

SECONDS = 20.0


def listen() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(SECONDS)
    return listener


@contextmanager
def relayed(target: int) -> Iterator[int]:
    """Relay to a port, and yield the port to connect to."""
    with listen() as unused:
        port = unused.getsockname()[1]
    command = [sys.executable, "-I", "-S", relay.__file__, str(port)]
    ours, its = socket.socketpair()
    with ours, its, subprocess.Popen(command, stdin=its, stdout=its) as process:
        assert ours.recv(100) == relay.READY
        side = relay.Relay(lambda: ours.recv(100_000), ours.sendall)
        thread = threading.Thread(target=side.run, args=(lambda: dial(target),))
        thread.start()
        yield port
        ours.shutdown(socket.SHUT_RDWR)
        assert process.wait(SECONDS) == 0
        thread.join(SECONDS)
        assert not thread.is_alive()


def dial(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), SECONDS)
    connection.settimeout(SECONDS)
    return connection


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def test_large_bodies_pass_both_ways_at_a_time_and_then_the_end() -> None:
    sent, back = os.urandom(20_000_000), os.urandom(20_000_000)
    received: list[bytes] = []
    with listen() as target, relayed(target.getsockname()[1]) as port, dial(port) as near:
        writer = threading.Thread(target=near.sendall, args=(sent,))
        writer.start()
        far = target.accept()[0]
        reader = threading.Thread(target=lambda: received.append(far.recv(len(sent), socket.MSG_WAITALL)))
        reader.start()
        answer = threading.Thread(target=lambda: (far.sendall(back), reader.join(), far.close()))
        answer.start()
        assert read_all(near) == back
        for thread in (writer, reader, answer):
            thread.join(SECONDS)
    assert received == [sent]


def test_a_slow_reader_delays_no_other_connection_and_an_end_arrives() -> None:
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(listen())
        port = stack.enter_context(relayed(target.getsockname()[1]))
        slow = stack.enter_context(dial(port))
        slow.sendall(b"slow")
        far_slow = target.accept()[0]
        quick = stack.enter_context(dial(port))
        far_slow.settimeout(1.0)
        with pytest.raises(TimeoutError):
            far_slow.sendall(bytes(50_000_000))
        quick.sendall(b"ping")
        far = target.accept()[0]
        for _ in range(100):
            assert far.recv(100) == b"ping"
            far.sendall(b"pong")
            assert quick.recv(100) == b"pong"
            quick.sendall(b"ping")
        quick.close()
        far.settimeout(SECONDS)
        assert far.recv(100) == b"ping"
        assert far.recv(100) == b"", "the target learns that its client has left"


def test_a_target_that_refuses_closes_and_the_next_connection_is_tried() -> None:
    with listen() as target:
        number = target.getsockname()[1]
    with relayed(number) as port:
        with dial(port) as connection:
            connection.sendall(b"hello")
            assert connection.recv(100) == b""
        with socket.create_server(("127.0.0.1", number)) as target, dial(port) as connection:
            connection.sendall(b"hello")
            assert target.accept()[0].recv(100) == b"hello"


HEADER = struct.Struct(">II")
HELLO = HEADER.pack(1, 5) + b"hello"


@pytest.mark.parametrize(
    "frames",
    [
        HEADER.pack(1, 2**31) + bytes(200_000),
        HELLO * 100,
        b"".join(HEADER.pack(number, 1) + b"x" for number in range(1, 1000)),
    ],
    ids=["a frame too large", "no wait for acknowledgements", "too many connections"],
)
def test_frames_that_break_the_rules_end_the_relay(frames: bytes) -> None:
    """A program that is root in the machine may write anything."""
    wait, reads = threading.Event(), iter([frames])

    def read() -> bytes:
        data = next(reads, b"")
        if not data:
            wait.wait(SECONDS)
        return data

    def connect() -> socket.socket:
        wait.wait(SECONDS)
        raise OSError

    side = relay.Relay(read, lambda data: None)
    thread = threading.Thread(target=side.run, args=(connect,))
    thread.start()
    thread.join(SECONDS / 2)
    ended = not thread.is_alive()
    wait.set()
    assert ended
