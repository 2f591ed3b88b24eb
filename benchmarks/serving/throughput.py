"""Steps per second and latency of one lake in process, over Starpod, and over other servers.

    python -m benchmarks.serving.throughput [--sessions 1,16,64,256,1024,10000] [--rounds 3] [--way NAME ...]

Each server is a separate process on this machine; the client is this process. A server of one process and the client
have one core each; other ways use all cores. All ways take turns in each round, so that a slow minute of the machine
affects all of them. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import uvloop
from rich.console import Console

from benchmarks.machine import CLIENT_CORE, SERVER_CORE, Usage, only_on
from benchmarks.results import write_result
from benchmarks.serving.lake import ENDLESS_SERVER, TASK
from benchmarks.serving.measure import Measurement
from benchmarks.serving.report import Result, print_results, write_plot
from benchmarks.serving.ways import WAYS, SteppingMethod
from starpod.load.processes import tune_garbage_collection
from tests.support import ROOT, ServerProcess

WARM_UP_SECONDS = 0.3
COMMANDS = {
    "starpod": ["-m", "starpod.cli.main", "serve", *TASK.serve, "--max-sessions", "20000"],
    "starpod_2": ["-m", "starpod.cli.main", "serve", *TASK.serve, "--max-sessions", "20000", "--workers", "2"],
    "starpod_endless": ["-m", "starpod.cli.main", "serve", *ENDLESS_SERVER],
    "openenv": ["-m", "benchmarks.peers.openenv_server"],
    "openenv_tuned": ["-m", "benchmarks.peers.openenv_server", "--tuned"],
    "dm_env_rpc": ["-m", "benchmarks.peers.dm_env_rpc_server"],
}

SEVERAL = ("starpod_2",)
"""Servers of several processes. They share all cores with the client."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="1,16,64,256,1024,10000", help="numbers of sessions, comma-separated")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", action="append", choices=[way.name for way in WAYS], help="only this way; repeatable")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "throughput.json")
    parser.add_argument("--no-report", action="store_true", help="print the table only, write nothing")
    arguments = parser.parse_args()
    ways = [way for way in WAYS if not arguments.way or way.name in arguments.way]
    counts = [int(count) for count in arguments.sessions.split(",")]
    tune_garbage_collection()  # as in `starpod serve` and `starpod load`
    # The clients of all ways run on uvloop, like the servers.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(measure(ways, counts, arguments.seconds, arguments.rounds))
    print_results(results)
    if not arguments.no_report:
        write_result(arguments.json, {"results": [asdict(result) for result in results]})
        write_plot(arguments.json.with_suffix(".svg"), results)


async def measure(ways: list[SteppingMethod], counts: list[int], seconds: float, rounds: int) -> list[Result]:
    """Measure all ways with all numbers of sessions, `rounds` times. Returns medians."""
    measurements: dict[tuple[str, int], list[Measurement]] = defaultdict(list)
    console = Console(stderr=True)
    with ExitStack() as stack:
        addresses = {"none": ""}
        for name in {way.server for way in ways} - {"none"}:
            with nullcontext() if name in SEVERAL else only_on(SERVER_CORE):
                server = ServerProcess([sys.executable, *COMMANDS[name]])
            stack.callback(server.close)
            addresses[name] = server.address
        for number in range(rounds):
            for count in counts:
                for way in ways:
                    if count > way.most:
                        continue
                    pinning = nullcontext() if way.server in (*SEVERAL, "none") else only_on(CLIENT_CORE)
                    status = console.status(f"round {number + 1} of {rounds}: {way.name}, {count} sessions")
                    with pinning, status:
                        async with way.open(addresses[way.server], count) as run:
                            await run(WARM_UP_SECONDS)
                            before = Usage.now()
                            measurement = await run(seconds)
                            usage = Usage.now() - before
                            if not measurement.client_cpu:  # not measured by the way itself
                                measurement = replace(
                                    measurement, client_cpu=usage.own, server_cpu=usage.descendants, wire=usage.wire
                                )
                            measurements[way.name, count].append(measurement)
    return [
        Result(
            way=name,
            sessions=count,
            steps_per_second=median(entry.rate for entry in entries),
            p50_seconds=median(entry.p50 for entry in entries),
            p99_seconds=median(entry.p99 for entry in entries),
            client_cpu_seconds=median(entry.client_cpu / entry.steps for entry in entries),
            server_cpu_seconds=median(entry.server_cpu / entry.steps for entry in entries),
            wire_bytes=median(entry.wire / entry.steps for entry in entries),
            rounds=[entry.rate for entry in entries],
        )
        for (name, count), entries in measurements.items()
    ]


if __name__ == "__main__":
    main()
