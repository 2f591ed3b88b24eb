"""Cost of a step by size of the observation, and by number of replicas. Linux only.

    python -m benchmarks.serving.growth [--seconds 1.5] [--rounds 3]

By size: Fleet.step_many steps 64 sessions on one server, whose observations are texts or pictures of 100 B to 1 MB, and
OpenEnv steps the same texts in the same run. By number of replicas: 256 coroutines step a session of the lake each, on
1 to 8 servers of one process. Figures are medians over rounds in which all variants take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.machine import Usage, origin
from benchmarks.serving.lake import ENVIRONMENT, OPTIONS
from benchmarks.serving.measure import drive
from benchmarks.serving.ways import SessionPlayer
from starpod.client import Fleet, Limits
from tests.support import ROOT, ServerProcess, start_server

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
PICTURES = (10_000, 100_000, 1_000_000)
REPLICAS = (1, 2, 4, 8)
SESSIONS, PLAYERS = 64, 256
MESSAGE_BYTES = 128 * 2**20
UNLIMITED = Limits(max_turns=0, max_actions_per_turn=0, max_actions=0)
Count = Callable[[float], Awaitable[int]]
"""Function that steps for a number of seconds and returns the number of steps."""


@dataclass(frozen=True, slots=True)
class Point:
    """Cost of one step. size: bytes of an observation, or number of replicas."""

    way: str
    size: int
    steps_per_second: float
    client_cpu: float
    server_cpu: float
    wire_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/growth.json")
    arguments = parser.parse_args()
    sizes, replicas = uvloop.run(measure(arguments.seconds, arguments.rounds))
    print_table("Observation", "bytes", sizes)
    print_table("Replicas", "replicas", replicas)
    content = {
        **origin(),
        "sizes": [asdict(point) for point in sizes],
        "replicas": [asdict(point) for point in replicas],
    }
    arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    write_plot(arguments.json.with_suffix(".svg"), sizes, replicas)


async def measure(seconds: float, rounds: int) -> tuple[list[Point], list[Point]]:
    """Return the points by size, and the points by number of replicas."""
    console = Console(stderr=True)
    with ExitStack() as stack:
        payload = stack.enter_context(
            start_server(
                "--environment-module",
                "benchmarks/serving/environments.py",
                "payload-v1",
                "--max-message-bytes",
                str(MESSAGE_BYTES),
            )
        )
        peer = ServerProcess([sys.executable, "-m", "benchmarks.peers.openenv_payload"])
        stack.callback(peer.close)
        lakes = [stack.enter_context(start_server("frozen_lake")).address for _ in range(max(REPLICAS))]
        cases: list[tuple[str, int, AbstractAsyncContextManager[Count]]] = []
        points_by_case: defaultdict[tuple[str, int], list[Point]] = defaultdict(list)
        for number in range(rounds):
            cases = [("starpod, text", size, open_payload(payload.address, size, "text")) for size in SIZES]
            cases += [("starpod, image", size, open_payload(payload.address, size, "image")) for size in PICTURES]
            cases += [("OpenEnv, text", size, open_peer(peer.address, size)) for size in SIZES]
            cases += [("replicas", count, open_lakes(lakes[:count])) for count in REPLICAS]
            for way, size, opening in cases:
                with console.status(f"round {number + 1} of {rounds}: {way}, {size:,}"):
                    async with opening as count:
                        await count(0.3)
                        before, start = Usage.now(), perf_counter()
                        steps = await count(seconds)
                        elapsed, usage = perf_counter() - start, Usage.now() - before
                points_by_case[way, size].append(
                    Point(way, size, steps / elapsed, usage.own / steps, usage.descendants / steps, usage.wire / steps)
                )
    points = [
        Point(way, size, *(median(getattr(point, name) for point in group) for name in Point.__slots__[2:]))
        for (way, size), group in points_by_case.items()
    ]
    return [each for each in points if each.way != "replicas"], [each for each in points if each.way == "replicas"]


@contextlib.asynccontextmanager
async def open_payload(address: str, size: int, kind: str) -> AsyncIterator[Count]:
    """Open at most SESSIONS sessions in two groups, fewer if their observations would exceed 32 MB."""
    sessions = max(2, min(SESSIONS, 32_000_000 // size))
    async with Fleet(address, max_message_bytes=MESSAGE_BYTES) as fleet:
        options = {"size": size, "kind": kind}
        opened_sessions = await fleet.open("payload-v1", count=sessions, seed=0, options=options, limits=UNLIMITED)
        groups = [opened_sessions[: sessions // 2], opened_sessions[sessions // 2 :]]

        async def count(seconds: float) -> int:
            end = perf_counter() + seconds

            async def march(group: list[Any]) -> int:
                steps = 0
                while not steps or perf_counter() < end:
                    transitions = await fleet.step_many(group, ["next"] * len(group))
                    steps += len(transitions)
                observation = transitions[-1].observation
                length = len(observation.text) if kind == "text" else len(observation.image.data)
                if length != size:
                    raise RuntimeError(f"an observation of {size} bytes came with {length}")
                return steps

            return sum(await asyncio.gather(*map(march, groups)))

        yield count


@contextlib.asynccontextmanager
async def open_peer(address: str, size: int) -> AsyncIterator[Count]:
    """Open sessions with the same texts over OpenEnv, one WebSocket each."""
    from openenv.core.generic_client import GenericEnvClient  # needs the peers' packages

    sessions = max(2, min(SESSIONS, 32_000_000 // size))
    clients = [GenericEnvClient(base_url=f"http://{address}") for _ in range(sessions)]
    for client in clients:
        await client.connect()
        await client.reset(size=size)

    async def count(seconds: float) -> int:
        end = perf_counter() + seconds

        async def play(client: Any) -> int:
            steps = 0
            while not steps or perf_counter() < end:
                result = await client.step({"name": "next"})
                steps += 1
            if len(result.observation["text"]) != size:
                raise RuntimeError(f"an observation of {size} bytes came with {len(result.observation['text'])}")
            return steps

        return sum(await asyncio.gather(*map(play, clients)))

    yield count
    for client in clients:
        await client.close()


@contextlib.asynccontextmanager
async def open_lakes(addresses: list[str]) -> AsyncIterator[Count]:
    """Open sessions of the lake on several servers, with one coroutine per session."""
    async with Fleet(addresses) as fleet:
        sessions = [
            session
            for _ in range(PLAYERS)
            for session in await fleet.open(ENVIRONMENT, seed=0, options=OPTIONS, limits=UNLIMITED)
        ]
        players = [SessionPlayer(session) for session in sessions]

        async def count(seconds: float) -> int:
            return (await drive(players, seconds)).steps

        yield count


def print_table(title: str, unit: str, points: list[Point]) -> None:
    table = Table("Way", title=title)
    for heading in (unit, "Steps/s", "CPU client", "CPU server", "Bytes on the wire"):
        table.add_column(heading, justify="right")
    for point in points:
        table.add_row(
            point.way,
            f"{point.size:,}",
            f"{point.steps_per_second:,.0f}",
            f"{point.client_cpu * 1e6:,.1f} µs",
            f"{point.server_cpu * 1e6:,.1f} µs",
            f"{point.wire_bytes:,.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def write_plot(path: Path, sizes: list[Point], replicas: list[Point]) -> None:
    """Plot the CPU time of a step over sizes (client and server together) and over replicas."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "starpod"  # equal figures give equal files
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for way in dict.fromkeys(point.way for point in sizes):
        points = [(each.size, (each.client_cpu + each.server_cpu) * 1e6) for each in sizes if each.way == way]
        left.plot(*zip(*points, strict=True), "--" if way.startswith("OpenEnv") else "-", marker="o", label=way)
    left.set(xscale="log", yscale="log", xlabel="bytes of an observation", ylabel="CPU µs per step, both sides")
    left.legend(frameon=False)
    for name, label in (("client_cpu", "client"), ("server_cpu", "servers")):
        right.plot(
            [point.size for point in replicas], [getattr(point, name) * 1e6 for point in replicas], "o-", label=label
        )
    right.set(xlabel="replicas, 256 sessions in all", ylabel="CPU µs per step", ylim=(0, None), xticks=REPLICAS)
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
