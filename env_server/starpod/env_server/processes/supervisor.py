"""`--workers N`: one process per port; a crashed one is started again on its port, and the others never notice."""

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
"""First and longest pause before a crashed worker is started again; a worker that lived for a minute starts anew."""
_MERCY_SECONDS = 10.0
"""How much longer than it should a worker may take to end."""
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
        """The worker's one line; empty if it ended instead."""
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
    """Runs the workers until a signal; returns the exit status.

    arguments: the command line after the program's name, which the workers get too, each with its own port.
    """
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(_ports(host, port, workers))
        http_ports = [] if http_port is None else stack.enter_context(_ports(host, http_port, workers))
        shown = f"[{host}]" if ":" in host else host
        endpoints, http_endpoints = (",".join(f"{shown}:{each}" for each in found) for found in (ports, http_ports))
        shared = _without(arguments, _OVERRIDDEN)
        group = [
            _Worker(
                [
                    *(sys.executable, "-P", "-m", "starpod.env_server", *shared, "--end-with-stdin"),
                    *("--port", str(each), "--endpoints", endpoints),
                    *("--metrics-port", str(metrics_port and metrics_port + place)),
                    *("--health-port", str(health_port and health_port + place)),
                    *(("--http", str(http_ports[place]), "--http-endpoints", http_endpoints) if http_ports else ()),
                ],
                f"worker {place}",
            )
            for place, each in enumerate(ports)
        ]
        return _run(group, f"with {workers} workers on {shown}:{ports[0]}", drain_seconds)


def _run(group: Sequence[_Worker], title: str, drain_seconds: float) -> int:
    """Runs the workers until a signal; returns the exit status."""
    signals: SimpleQueue[int] = SimpleQueue()  # which a signal handler may fill, unlike what waits on a lock
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: signals.put(number))
    first: int = signal.SIGTERM
    try:
        line = ""
        # The first alone: what is wrong for all is then said once, and what is built on first use is built once.
        for workers_now in (group[:1], group[1:]):
            for worker in workers_now:
                worker.start()
            for worker in workers_now:
                ready = worker.wait_until_ready()
                if not ready and worker.process is not None:
                    return worker.process.wait() or 1
                line = line or ready
        print(f"{line.rpartition(' on ')[0]} {title}", flush=True)
        first = _watch(group, signals)
    finally:
        _end(group, first, signals, drain_seconds)
    return 0


def _next(signals: SimpleQueue[int], seconds: float) -> int | None:
    """The next signal, if there is one within so many seconds."""
    with contextlib.suppress(Empty):
        return signals.get(timeout=seconds)
    return None


def _watch(group: Sequence[_Worker], signals: SimpleQueue[int]) -> int:
    """Starts again what crashes until there is a signal; returns it."""
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
    """Passes the first signal on, and those that follow: SIGTERM drains the workers, any other ends them at once."""
    running = [worker.process for worker in group if worker.process is not None]
    deadline = _pass_on(first, running, drain_seconds)
    while any(process.poll() is None for process in running) and time.monotonic() < deadline:
        if _next(signals, 0.05) is not None:
            # Not once more the same: a second SIGTERM is lost on a worker that has not looked at the first.
            deadline = _pass_on(signal.SIGINT, running, 0.0)
    for process in running:
        process.kill()


def _pass_on(number: int, processes: Sequence[subprocess.Popen[str]], seconds: float) -> float:
    """Sends a signal to all; returns when those are to be killed that needed longer than so many seconds."""
    for process in processes:
        process.send_signal(number)
    return time.monotonic() + seconds + _MERCY_SECONDS


@contextlib.contextmanager
def _ports(host: str, port: int, workers: int) -> Iterator[list[int]]:
    """Consecutive ports from `port` on; without one, from a free one on, and then nobody else is given them while the
    workers are down: a socket that does not listen holds each, and as it may be reused, gRPC can listen on its port."""
    if port:
        yield list(range(port, port + workers))
        return
    # Consecutive, so that whoever starts a supervisor again at its first port has all of them again.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for tries_left in reversed(range(100)):
        first = 0
        with contextlib.ExitStack() as sockets:
            try:
                for place in range(workers):
                    each = sockets.enter_context(socket.socket(family))
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    each.bind((host, first and first + place))
                    first = first or each.getsockname()[1]
            except (OSError, OverflowError):
                if not (first and tries_left):
                    raise
                continue
            yield list(range(first, first + workers))
            return


def _without(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """The arguments less the given options and their values; and less the subcommand's name."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, _ = argument.partition("=")
        if name in options:
            if not equals:
                next(rest, None)
        else:
            kept.append(argument)
    return kept[kept.index("serve") + 1 :] if "serve" in kept else kept
