"""Soak test: checks that a server and its client do not grow during half an hour of churn. Linux only.

    python -m benchmarks.soak --minutes 30 --load 0.7

It first measures the peak, the highest step rate of server and client together. Then it runs at `--load` times that
rate for the given minutes, while sessions are opened, reset, forked, restored, closed and abandoned. Memory, file
descriptors, threads, processes, sessions and tasks are sampled, and a line is fitted to each after the warm-up. The
exit status is 1 if one of them grows, or if a call failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import grpc

from benchmarks.machine import descendants, origin, resident_bytes
from benchmarks.results import picture, print_table
from benchmarks.soak.trend import Tolerance, Trend, trend
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import ROOT, start_server

MEBIBYTE = 2**20
SAMPLES = 600
LONGEST_PAUSE = 5.0
SETTLING_SECONDS = 3.0
ISOLATED = ROOT / "benchmarks" / "serving" / "environments.py"
ENVIRONMENTS = ("frozen_lake-v1", "sokoban-v1", "bandit-v1", "countdown-v1", "sudoku-v1", "isolated_lake-v1")

TOLERANCES = {
    "memory": Tolerance(2 * MEBIBYTE, 0.03),
    "descriptors": Tolerance(10, 0.2),
    "threads": Tolerance(2, 0.0),
    "processes": Tolerance(4, 0.25),
    "sessions": Tolerance(20, 0.15),
    "tasks": Tolerance(20, 0.15),
}
"""Tolerated growth by the second word of a series' name. Memory is in bytes, and the other series are counts."""


class Client:
    """The process that generates the load."""

    def __init__(self, address: str, environments: list[str], players: int) -> None:
        command = [sys.executable, "-m", "benchmarks.soak.churn", address, "--players", str(players)]
        command += [word for environment in environments for word in ("--environment", environment)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.counts: dict[str, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def pace(self, steps_per_second: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps_per_second}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=30)
        self._process.kill()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # closed
            for line in self._process.stdout:
                self.counts = json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", type=float, default=0.7, help="share of the peak rate")
    parser.add_argument("--peak-seconds", type=float, default=20.0, help="how long the peak is measured")
    parser.add_argument("--players", type=int, default=64)
    parser.add_argument("--environment", action="append", help="repeatable; default: " + ", ".join(ENVIRONMENTS))
    parser.add_argument("--file", action="append", default=[], metavar="FILE.py", help="environments to serve, too")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "soak.json")
    parser.add_argument("--plot", type=Path, help="default: beside the JSON; needs matplotlib (extra bench)")
    arguments = parser.parse_args()
    environments = arguments.environment or list(ENVIRONMENTS)
    problems = [*arguments.file, *([] if arguments.environment else [str(ISOLATED)])]
    with start_server(*environments, *problems) as server, running(server.address, environments, arguments) as client:
        peak = measure_peak(client, arguments.peak_seconds)
        client.pace(arguments.load * peak)
        before = dict(client.counts)
        seconds, series = watch(server.pid, server.address, client, 60 * arguments.minutes)
        counts = {kind: count - before.get(kind, 0) for kind, count in client.counts.items() if kind != "tasks"}
    trends = {name: trend(seconds, values, TOLERANCES[name.split()[1]]) for name, values in series.items()}
    print_trends(trends, peak, counts, seconds)
    content: dict[str, Any] = {"peak_steps_per_second": round(peak)}
    content |= {"done": counts, "seconds": round(seconds[-1], 1)}
    content |= {"trends": {name: asdict(result) for name, result in trends.items()}}
    content |= {"samples": {"seconds": [round(second, 1) for second in seconds], **series}}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({**origin(), **content}) + "\n")
    with suppress(ModuleNotFoundError):
        plot(arguments.plot or arguments.json.with_suffix(".svg"), seconds, series)
    errors = {kind: count for kind, count in counts.items() if kind.startswith("error")}
    growths = [name for name, result in trends.items() if result.grows]
    if errors or growths:
        problems = [f"{name} grows" for name in growths] + [f"{count} times {kind}" for kind, count in errors.items()]
        sys.exit("soak: " + "; ".join(problems))


@contextmanager
def running(address: str, environments: list[str], arguments: argparse.Namespace) -> Iterator[Client]:
    client = Client(address, environments, arguments.players)
    try:
        yield client
    finally:
        client.close()


def measure_peak(client: Client, seconds: float) -> float:
    """Return the steps per second at full speed, after SETTLING_SECONDS."""
    while not client.counts.get("steps"):
        if not client.alive:
            sys.exit("soak: the client ended before it began")
        sleep(0.1)
    sleep(SETTLING_SECONDS)
    before, start = client.counts["steps"], monotonic()
    sleep(seconds)
    return (client.counts["steps"] - before) / (monotonic() - start)


def watch(server: int, address: str, client: Client, seconds: float) -> tuple[list[float], dict[str, list[float]]]:
    """Sample both processes for `seconds`. Returns the times, and the values of each series."""
    times: list[float] = []
    series: dict[str, list[float]] = {}
    pause = min(LONGEST_PAUSE, max(0.1, seconds / SAMPLES))
    start = monotonic()
    with grpc.insecure_channel(address) as channel:
        stub = EnvironmentServiceStub(channel)
        while (elapsed := monotonic() - start) < seconds:
            if not client.alive:
                sys.exit("soak: the client ended too early")
            row = {f"server {name}": value for name, value in facts(server).items()}
            row |= {f"client {name}": value for name, value in facts(client.pid).items()}
            row["server processes"] = float(len(descendants(server)))
            row["server sessions"] = float(stub.Describe(pb.DescribeRequest(), timeout=30).live_sessions)
            row["client tasks"] = float(client.counts.get("tasks", 0))
            times.append(elapsed)
            for name, value in row.items():
                series.setdefault(name, []).append(value)
            sleep(pause)
    return times, series


def facts(pid: int) -> dict[str, float]:
    """Return the resident bytes, open file descriptors and threads of a process."""
    folder = Path(f"/proc/{pid}")
    return {
        "memory": float(resident_bytes(pid)),
        "descriptors": float(len(os.listdir(folder / "fd"))),
        "threads": float(len(os.listdir(folder / "task"))),
    }


def print_trends(trends: dict[str, Trend], peak: float, counts: dict[str, int], seconds: list[float]) -> None:
    minutes = seconds[-1] / 60
    rate = counts.get("steps", 0) / seconds[-1]
    title = f"{minutes:.1f} minutes at {rate:,.0f} of at most {peak:,.0f} steps/s; "
    rows = []
    for name, result in trends.items():
        cells = [written(name, value) for value in (result.mean, result.slope, result.rise, result.tolerance)]
        rows.append([name, *cells, "grows" if result.grows else "steady"])
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    print_table(["Series", "Mean", "Slope per hour", "Rise", "Allowed", ""], rows, title + kinds)


def written(name: str, value: float) -> str:
    return f"{value / MEBIBYTE:,.1f} MiB" if name.endswith("memory") else f"{value:,.1f}"


def plot(path: Path, seconds: list[float], series: dict[str, list[float]]) -> None:
    """Plot all series over time, memory in MiB."""
    kinds = list(dict.fromkeys(name.split()[1] for name in series))
    minutes = [second / 60 for second in seconds]
    with picture(path, len(kinds), figsize=(8, 1.7 * len(kinds)), sharex=True) as (_, grid):
        for axes, kind in zip(grid, kinds, strict=True):
            for name, values in series.items():
                if name.split()[1] == kind:
                    scale = MEBIBYTE if kind == "memory" else 1
                    axes.plot(minutes, [value / scale for value in values], linewidth=1, label=name.split()[0])
            axes.set_ylabel("memory, MiB" if kind == "memory" else kind)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.legend(loc="lower right", frameon=False, ncols=2)
        grid[-1].set_xlabel("minutes")


if __name__ == "__main__":
    main()
