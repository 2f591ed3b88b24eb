"""`--workers N`: one process per port. A crashed worker is restarted on its port without affecting the others."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue

logger = logging.getLogger(__name__)

_RESTART_SECONDS = (0.1, 5.0)
"""First and longest pause before a crashed worker is restarted. The pause is reset once a worker has run for a
minute."""
_MERCY_SECONDS = 10.0
"""Seconds after which a worker that should have ended is killed."""
_OVERRIDDEN = ("--port", "--workers", "--metrics-port", "--health-port", "--http", "--endpoints", "--http-endpoints")


class _Worker:
    def __init__(self, command: Sequence[str], name: str) -> None:
        self.command = command
        self.name = name
        self.pause = _RESTART_SECONDS[0]
        self.started = 0.0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_until_ready(self) -> str:
        """Return the worker's ready line, or an empty string if it ended instead."""
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.readline().strip()


def supervise(
    arguments: Sequence[str],
    workers: int,
    *,
    host: str,
    port: int,
    metrics_port: int,
    health_port: int,
    http_port: int | None,
    drain_seconds: float,
) -> int:
    """Run the workers until a signal arrives, and return the exit status.

    Args:
        arguments: the command line after the program's name. Each worker gets it with its own ports.
        port: gRPC port of the first worker; the others get the next ones. 0 means free ports.
        metrics_port: port for Prometheus metrics of the first worker; 0 means none.
        health_port: port for health checks of the first worker; 0 means none.
        http_port: like `port`, for HTTP; None means none.
        drain_seconds: how long open sessions may continue after SIGTERM.
    """
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(_ports(host, port, workers))
        http_ports = [] if http_port is None else stack.enter_context(_ports(host, http_port, workers))
        url_host = f"[{host}]" if ":" in host else host
        endpoints, http_endpoints = (",".join(f"{url_host}:{port}" for port in found) for found in (ports, http_ports))
        shared_arguments = _without(arguments, _OVERRIDDEN)
        group = [
            _Worker(
                [
                    *(sys.executable, "-P", "-m", "starpod.env_server", *shared_arguments, "--end-with-stdin"),
                    *("--port", str(port), "--endpoints", endpoints),
                    *("--metrics-port", str(metrics_port and metrics_port + index)),
                    *("--health-port", str(health_port and health_port + index)),
                    *(("--http", str(http_ports[index]), "--http-endpoints", http_endpoints) if http_ports else ()),
                ],
                f"worker {index}",
            )
            for index, port in enumerate(ports)
        ]
        return _run(group, f"with {workers} workers on {url_host}:{ports[0]}", drain_seconds)


def _run(group: Sequence[_Worker], title: str, drain_seconds: float) -> int:
    """Run the workers until a signal arrives, and return the exit status."""
    signals: SimpleQueue[int] = SimpleQueue()  # a signal handler may fill it, unlike queues with a lock
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda number, _: signals.put(number))
    first_signal: int = signal.SIGTERM
    try:
        line = ""
        # Start the first worker alone, so that a common error is reported once, and caches are built once.
        for workers_now in (group[:1], group[1:]):
            for worker in workers_now:
                worker.start()
            for worker in workers_now:
                ready_line = worker.wait_until_ready()
                if not ready_line and worker.process is not None:
                    return worker.process.wait() or 1
                line = line or ready_line
        print(f"{line.rpartition(' on ')[0]} {title}", flush=True)
        first_signal = _watch(group, signals)
    finally:
        _end(group, first_signal, signals, drain_seconds)
    return 0


def _next(signals: SimpleQueue[int], seconds: float) -> int | None:
    """Return the next signal, or None if none arrives within `seconds`."""
    with contextlib.suppress(Empty):
        return signals.get(timeout=seconds)
    return None


def _watch(group: Sequence[_Worker], signals: SimpleQueue[int]) -> int:
    """Restart crashed workers until a signal arrives, and return the signal."""
    while (number := _next(signals, 0.05)) is None:
        for worker in group:
            assert worker.process is not None
            if worker.process.poll() is None:
                continue
            if time.monotonic() - worker.started > 60:
                worker.pause = _RESTART_SECONDS[0]
            logger.error(
                "%s ended with status %s; starting it again in %.1f s",
                worker.name,
                worker.process.returncode,
                worker.pause,
            )
            if (number := _next(signals, worker.pause)) is not None:
                return number
            worker.pause = min(worker.pause * 2, _RESTART_SECONDS[1])
            worker.start()
    return number


def _end(group: Sequence[_Worker], first: int, signals: SimpleQueue[int], drain_seconds: float) -> None:
    """Pass on the first signal and later ones. SIGTERM drains the workers, any other signal ends them at once."""
    processes = [worker.process for worker in group if worker.process is not None]
    deadline = _pass_on(first, processes, drain_seconds)
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if _next(signals, 0.05) is not None:
            # Send SIGINT, because a second SIGTERM is lost if a worker has not handled the first.
            deadline = _pass_on(signal.SIGINT, processes, 0.0)
    for process in processes:
        process.kill()


def _pass_on(number: int, processes: Sequence[subprocess.Popen[str]], seconds: float) -> float:
    """Send a signal to all workers, and return the time at which the remaining ones are to be killed."""
    for process in processes:
        process.send_signal(number)
    return time.monotonic() + seconds + _MERCY_SECONDS


@contextlib.contextmanager
def _ports(host: str, port: int, workers: int) -> Iterator[list[int]]:
    """Yield consecutive ports, beginning with `port` or, if it is 0, with a free one.

    Free ports stay reserved while workers are down, because a socket that does not listen holds each port. The socket
    allows reuse, so that gRPC can listen on the same port.
    """
    if port:
        yield list(range(port, port + workers))
        return
    # Consecutive ports let a restarted supervisor get all of them again from its first port.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for tries_left in reversed(range(100)):
        first_port = 0
        with contextlib.ExitStack() as sockets:
            try:
                for index in range(workers):
                    sock = sockets.enter_context(socket.socket(family))
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind((host, first_port and first_port + index))
                    first_port = first_port or sock.getsockname()[1]
            except (OSError, OverflowError):
                if not (first_port and tries_left):
                    raise
                continue
            yield list(range(first_port, first_port + workers))
            return


def _without(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the arguments without the given options, their values, and the subcommand's name."""
    result: list[str] = []
    iterator = iter(arguments)
    for argument in iterator:
        name, equals_sign, _ = argument.partition("=")
        if name in options:
            if not equals_sign:
                next(iterator, None)
        else:
            result.append(argument)
    return result[result.index("serve") + 1 :] if "serve" in result else result
