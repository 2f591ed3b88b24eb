"""A relay through which programs in a machine without network reach one address outside, such as a gateway.

A process in the machine listens on 127.0.0.1 and passes the connections to the server through its standard streams. The
server connects them to the address. Both sides run this file, so it imports nothing but Python's standard library.

A frame has a connection's number, a size, and that many bytes. Size 0 closes the connection. A frame of bytes is
acknowledged when it was passed on, and the next one waits for that, so a slow reader delays only its own connection.
New connections are announced, in the order of their numbers, by a frame that is otherwise an acknowledgement.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_HEADER = struct.Struct(">II")
_CHUNK = 65_536
_ACKNOWLEDGEMENT = 2**32 - 1
"""Size in the header of a frame that acknowledges one."""
READY = _HEADER.pack(0, _ACKNOWLEDGEMENT)
"""First frame of the process in the machine: it listens."""
MAX_CONNECTIONS = 64
"""Maximum number of open connections of a machine; others wait."""


class _Connection:
    """One end of a relayed connection."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        # Bytes and then the end may come without an acknowledgement in between.
        self.received: queue.Queue[bytes] = queue.Queue(maxsize=2)
        self.acknowledged = threading.Semaphore(0)

    def close(self) -> None:
        if self.socket:
            with suppress(OSError):  # closing alone would not wake a thread that waits for the socket
                self.socket.shutdown(socket.SHUT_RDWR)
            self.socket.close()
        with suppress(queue.Full):  # its thread then fails to write what is left
            self.received.put_nowait(b"")
        self.acknowledged.release()


class Relay:
    """One side of a channel that carries connections.

    Args:
        read: returns the next bytes of the channel, or nothing at its end.
        write: writes bytes to the channel. It raises OSError.
    """

    def __init__(self, read: Callable[[], bytes], write: Callable[[bytes], object]) -> None:
        self._read = read
        self._unread = b""
        self._write = write
        self._writing = threading.Lock()
        self._connections: dict[int, _Connection] = {}

    def run(self, connect: Callable[[], socket.socket] | None = None) -> None:
        """Pass frames to their connections until the channel ends or its other side breaks the rules.

        connect: returns a socket for a connection that the other side accepted, or raises OSError.
        """
        newest = 0
        with suppress(OSError, queue.Full):
            while len(header := self._receive(_HEADER.size)) == _HEADER.size:
                number, size = _HEADER.unpack(header)
                data = self._receive(size) if size <= _CHUNK else None
                if _CHUNK < size < _ACKNOWLEDGEMENT or len(self._connections) > 2 * MAX_CONNECTIONS:
                    break
                if connect and number > newest:  # a late frame for a closed connection opens no other
                    newest = number
                    self.open(number, connect)
                elif connection := self._connections.get(number):
                    connection.acknowledged.release() if data is None else connection.received.put_nowait(data)
        for connection in list(self._connections.values()):
            connection.close()

    def accept(self, listener: socket.socket) -> None:
        """Carry each connection that a listening socket accepts."""
        number = 0
        while True:
            accepted, number = listener.accept()[0], number + 1
            self.open(number, lambda accepted=accepted: accepted, announce=True)  # type: ignore[misc]
            while len(self._connections) >= MAX_CONNECTIONS:
                time.sleep(0.05)

    def open(self, number: int, connect: Callable[[], socket.socket], *, announce: bool = False) -> None:
        """Carry a connection with two threads, until either side closes it."""
        self._connections[number] = _Connection()
        if announce:  # a refusal must find the connection, and its bytes must follow
            self._send(number, None)
        threading.Thread(target=self._to_socket, args=(number, connect), daemon=True).start()

    def _to_socket(self, number: int, connect: Callable[[], socket.socket]) -> None:
        connection = self._connections[number]
        with suppress(OSError):
            connected = connection.socket = connect()
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._from_socket, args=(number, connection), daemon=True).start()
            while data := connection.received.get():
                connected.sendall(data)
                self._send(number, None)
        del self._connections[number]
        connection.close()
        with suppress(OSError):
            self._send(number, b"")

    def _from_socket(self, number: int, connection: _Connection) -> None:
        with suppress(OSError):
            while connection.socket and (data := connection.socket.recv(_CHUNK)):
                self._send(number, data)
                connection.acknowledged.acquire()
        connection.close()

    def _send(self, number: int, data: bytes | None) -> None:
        size = _ACKNOWLEDGEMENT if data is None else len(data)
        with self._writing:
            self._write(_HEADER.pack(number, size) + (data or b""))

    def _receive(self, size: int) -> bytes:
        """Return this many bytes of the channel, or fewer at its end."""
        while len(self._unread) < size and (more := self._read()):
            self._unread += more
        data, self._unread = self._unread[:size], self._unread[size:]
        return data


def main(port: int) -> None:
    """Relay the connections to a port of this machine until standard input ends."""
    with socket.create_server(("127.0.0.1", port), backlog=MAX_CONNECTIONS) as listener:
        os.write(1, READY)
        relay = Relay(lambda: os.read(0, _CHUNK), lambda data: os.write(1, data))
        threading.Thread(target=relay.accept, args=(listener,), daemon=True).start()
        relay.run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
