"""Cost of a message and of a call in gRPC itself, with and without its thread pool (docs/decisions/0007).

    python -m benchmarks.serving.polling [--seconds 2] [--rounds 3] [--json FILE]

An echo server and a client run in one process each, without any code of Starpod: a stream with two messages of 10,000
bytes in flight, and unary calls of 100 bytes one after another. CPU time is that of both processes, as a median over
the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.machine import child_process, origin
from starpod.cli.polling import SETTING, VARIABLE
from tests.support import ROOT

SERVER = """
import grpc, uvloop
async def stream(_, context):
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)
async def unary(message, context):
    return message
async def main():
    server = grpc.aio.server()
    methods = {
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", methods),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()
uvloop.run(main())
"""
CLIENT = """
import json, os, statistics, sys, time, grpc, uvloop
port, server, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
def cpu():
    fields = open(f"/proc/{server}/stat").read().rsplit(")", 1)[1].split()
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
async def measure(kind):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream, unary = channel.stream_stream("/bench.Echo/Stream")(), channel.unary_unary("/bench.Echo/Unary")
        message, waits = bytes(10_000 if kind == "stream" else 100), []
        async def once():
            if kind == "unary":
                await unary(message)
            else:
                await stream.read()
                await stream.write(message)
        if kind == "stream":
            await stream.write(message)
            await stream.write(message)
        for _ in range(200):
            await once()
        started, spent = time.perf_counter(), cpu()
        while (before := time.perf_counter()) - started < seconds:
            await once()
            waits.append(time.perf_counter() - before)
        return {"cpu": (cpu() - spent) / len(waits) * 1e6, "p50": statistics.median(waits) * 1e6}
print(json.dumps({kind: uvloop.run(measure(kind)) for kind in ("stream", "unary")}))
"""
COLUMNS = {"with its pool of threads": "", "polling in the waiting thread": SETTING}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/polling.json")
    arguments = parser.parse_args()
    rounds = [
        {name: echo(setting, arguments.seconds) for name, setting in COLUMNS.items()} for _ in range(arguments.rounds)
    ]
    results = {
        name: {
            "stream, CPU µs per message": median(result[name]["stream"]["cpu"] for result in rounds),
            "unary, CPU µs per call": median(result[name]["unary"]["cpu"] for result in rounds),
            "unary, median µs per call": median(result[name]["unary"]["p50"] for result in rounds),
        }
        for name in COLUMNS
    }
    table = Table("gRPC alone, there and back", *COLUMNS)
    for row in next(iter(results.values())):
        table.add_row(row, *(f"{results[name][row]:.0f}" for name in COLUMNS))
    Console().print(table)
    arguments.json.write_text(json.dumps({**origin(), "results": results}, indent=2) + "\n")


def echo(setting: str, seconds: float) -> dict[str, dict[str, float]]:
    """Make one measurement with this value of `GRPC_EXPERIMENTS`."""
    environment = {**os.environ, VARIABLE: setting}
    with child_process([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = [sys.executable, "-c", CLIENT, port, str(server.pid), str(seconds)]
        result = subprocess.run(client, capture_output=True, text=True, check=True, env=environment)
    figures: dict[str, dict[str, float]] = json.loads(result.stdout)
    return figures


if __name__ == "__main__":
    main()
