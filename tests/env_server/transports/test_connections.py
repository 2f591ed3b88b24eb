"""An address keeps its oldest connections, and listing them needs no file descriptor."""

import contextlib
import os
import resource
import socket

from starpod.env_server.transports.connections import Connections


def is_open(connection: socket.socket) -> bool:
    connection.settimeout(0.2)
    try:
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def test_the_newest_connections_are_shut_though_their_descriptors_are_low() -> None:
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        port, connections = listener.getsockname()[1], Connections()

        def connect() -> tuple[socket.socket, socket.socket]:
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            return client, listener.accept()[0]

        first, *older = [connect() for _ in range(3)]
        assert connections.shut_excess([port], 3, frozenset()) == 0
        for end in first:
            end.close()  # the next connection gets its descriptors, the lowest
        newest = connect()
        assert newest[1].fileno() < older[0][1].fileno()
        assert connections.shut_excess([port], 2, frozenset()) == 1
        assert [is_open(client) for client, _ in (newest, *older)] == [False, True, True]
        for _, server in (newest, *older):
            server.close()


def test_it_works_without_a_free_descriptor() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, connections = listener.getsockname()[1], Connections()
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0]:
            taken = os.open(os.devnull, os.O_RDONLY)
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, hard))
                held = []
                with contextlib.suppress(OSError):
                    while True:
                        held.append(os.open(os.devnull, os.O_RDONLY))
                assert connections.shut_excess([port], 0, frozenset()) >= 1
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for descriptor in (taken, *held):
                    os.close(descriptor)
            assert not is_open(client)
