"""Measurement of a client of many servers: its CPU time and memory, and the balance of sessions. Uses no network.

    python -m benchmarks.fleet.placement [--servers 10 100 1000] [--sessions 100000] [--clients 8] [--candidates 4]

All servers have one name, as behind a headless service. One client finds them, opens the sessions in groups, loses a
tenth of the servers, recovers their sessions, and finds as many new servers. Then several clients fill the servers at
once. They learn about each other's sessions only from the loads that servers report every few seconds.

CPU is that of the whole process, including the simulated servers, which do next to nothing. The cost of gRPC is not
included. Memory is the growth of the resident set. Balance is the fullest server's number of sessions divided by the
mean.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet.simulated import ENVIRONMENT, NAME, PORT, Cluster, Server, balance
from benchmarks.machine import resident_bytes
from benchmarks.results import picture, print_table, write_result
from starpod.client import Fleet, Session
from starpod.client.pool import placement
from tests.support import ROOT

AT_ONCE = 64
"""Number of groups that a client opens at a time."""
CHOICES = 2_000
PLOT = ROOT / "docs" / "benchmarks" / "placement.svg"


@dataclass(slots=True)
class Part:
    """Measurement of one part. what: name of an item, such as "session". cpu: seconds. bytes: memory per item."""

    name: str
    what: str
    items: int = 0
    cpu: float = 0.0
    bytes: float | None = None
    balance: float | None = None

    @property
    def microseconds(self) -> float:
        return self.cpu / self.items * 1e6 if self.items else 0.0


@dataclass(slots=True)
class Result:
    servers: int
    sessions: int
    group: int
    clients: int
    health_seconds: float = 5.0
    upkeep_seconds: float = 10.0
    parts: list[Part] = field(default_factory=list)
    counts: dict[str, list[int]] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str, what: str, items: int) -> Iterator[Part]:
        """Measure what is done within the context."""
        part = Part(name, what, items)
        gc.collect()
        memory, cpu = resident_bytes(os.getpid()), time.process_time()
        yield part
        part.cpu = time.process_time() - cpu
        gc.collect()
        part.bytes = (resident_bytes(os.getpid()) - memory) / max(1, items)
        self.parts.append(part)


def make_fleet(cluster: Cluster, health_seconds: float) -> Fleet:
    """Return a fleet of the cluster's servers. The running event loop then resolves no other name."""
    loop = asyncio.get_running_loop()
    loop.getaddrinfo = cluster.resolve  # type: ignore[method-assign, assignment]
    fleet = Fleet(f"dns:///{NAME}:{PORT}", health_seconds=health_seconds)
    fleet.pool.transport = cluster  # type: ignore[assignment]
    return fleet


async def open_groups(fleet: Fleet, sessions: int, group: int) -> list[Session]:
    """Open sessions in groups, AT_ONCE groups at a time, and return them.

    Args:
        fleet: the fleet to measure.
        sessions: number of sessions.
        group: number of sessions per group; the last group may be smaller.
    """
    opened_sessions: list[Session] = []
    counts = [group] * (sessions // group) + ([sessions % group] if sessions % group else [])
    queue = iter(counts)

    async def work() -> None:
        for count in queue:
            opened_sessions.extend(await fleet.open(ENVIRONMENT, seed=1, count=count))

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return opened_sessions


async def connected_to(fleet: Fleet, servers: Iterable[Server]) -> None:
    """Wait until the fleet is connected to exactly these servers."""
    addresses = {server.address for server in servers}
    while {replica.address for replica in fleet.replicas if replica.ready} != addresses:
        await asyncio.sleep(0.2)


async def one_client(result: Result) -> None:
    """Measure one client that finds servers, opens sessions, recovers lost ones and finds new servers."""
    cluster = Cluster(result.servers)
    with result.part("find the servers", "server", result.servers):
        fleet = make_fleet(cluster, result.health_seconds)
        await fleet.start()
        await connected_to(fleet, cluster.living)
    try:
        with result.part(f"open groups of {result.group}", "session", result.sessions) as part:
            sessions = await open_groups(fleet, result.sessions, result.group)
        part.balance = balance(cluster.living)
        result.counts["filled"] = counts(cluster)
        with result.part("choose a server", "choice", CHOICES) as part:
            for _ in range(CHOICES):
                replica, _ = await fleet.pool.choose(ENVIRONMENT, "", 0.0)
                replica.placing += 1
        for replica in fleet.replicas:
            replica.placing = 0
        part.bytes = None

        lost_servers = random.Random(1).sample(cluster.living, result.servers // 10)
        orphans = [session for session in sessions if session.address in {server.address for server in lost_servers}]
        with result.part("bring back what a tenth of them held", "session", len(orphans)) as part:
            for server in lost_servers:
                server.kill()
            await fleet.step_many(orphans, ["left"] * len(orphans))
        part.balance = balance(cluster.living)
        result.counts["a tenth lost"] = counts(cluster)
        cluster.start(len(lost_servers))
        with result.part("find as many new ones", "server", len(lost_servers)):
            await connected_to(fleet, cluster.living)
        new_count = result.sessions // 5
        with result.part(f"open {new_count:,} more", "session", new_count) as part:
            sessions += await open_groups(fleet, new_count, result.group)
        part.balance = balance(cluster.living)
        result.counts["a tenth new, a fifth more sessions"] = counts(cluster)
    finally:
        await fleet.close()


async def upkeep(result: Result) -> None:
    """Measure the cost of idle servers and sessions: health checks and lease renewals at the fleet's own pace."""
    cluster = Cluster(result.servers)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(make_fleet(cluster, result.health_seconds))
        await open_groups(fleet, result.sessions, result.group)
        with result.part("keep them, idle", "second", max(1, int(result.upkeep_seconds))) as part:
            await asyncio.sleep(result.upkeep_seconds)
        part.bytes = None


async def many_clients(result: Result) -> None:
    """Measure several clients at once. They learn about each other only from the loads that servers report."""
    cluster = Cluster(result.servers)
    async with AsyncExitStack() as stack:
        fleets = [make_fleet(cluster, result.health_seconds) for _ in range(result.clients)]
        for fleet in fleets:
            await stack.enter_async_context(fleet)
        share = result.sessions // result.clients
        with result.part(f"{result.clients} clients at once", "session", share * result.clients) as part:
            await asyncio.gather(*(open_groups(fleet, share, result.group) for fleet in fleets))
        part.balance = balance(cluster.living)
        result.counts[f"{result.clients} clients"] = counts(cluster)


def counts(cluster: Cluster) -> list[int]:
    return sorted(len(server.sessions) for server in cluster.living)


async def measure(result: Result) -> Result:
    await one_client(result)
    await upkeep(result)
    await many_clients(result)
    return result


def run(servers: int, sessions: int, group: int, clients: int, candidates: int) -> dict[str, Any]:
    """Measure in this process. Return a Result's fields, which another process can read without this module."""
    placement.CANDIDATES = candidates
    return asdict(asyncio.run(measure(Result(servers, sessions, group, clients))))


def show(results: list[Result]) -> None:
    for result in results:
        title = f"{result.servers:,} servers, {result.sessions:,} sessions"
        rows = [
            [
                part.name,
                f"{part.cpu:.2f}",
                f"{part.microseconds:,.0f}",
                part.what,
                "" if part.bytes is None or part.bytes < 1024 else f"{part.bytes / 1024:.1f}",
                "" if part.balance is None else f"{part.balance:.3f}",
            ]
            for part in result.parts
        ]
        print_table(["What", "CPU s", "µs", "of each", "KiB", "Balance"], rows, title)


def plot(result: Result, path: Path) -> None:
    """Plot the number of sessions of each server, from the emptiest to the fullest."""
    with picture(path, figsize=(7, 3.5)) as (_, axes):
        for name, values in result.counts.items():
            mean = sum(values) / len(values)
            shares = [index / max(1, len(values) - 1) for index in range(len(values))]
            axes.plot(shares, [value / mean for value in values], label=name)
        axes.set_xlabel("servers, from the emptiest to the fullest")
        axes.set_ylabel("sessions over the mean")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.grid(alpha=0.3)
        axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--candidates",
        type=int,
        default=placement.CANDIDATES,
        help="servers that a placement looks at; a large number: all",
    )
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "placement.json")
    parser.add_argument("--plot", type=Path, default=PLOT)
    arguments = parser.parse_args()
    results = []
    for servers in arguments.servers:
        task = (servers, arguments.sessions, arguments.group, arguments.clients, arguments.candidates)
        # Use one process per run, because reused memory from an earlier run would not show as growth.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            values = process.submit(run, *task).result()
        results.append(Result(**{**values, "parts": [Part(**part) for part in values["parts"]]}))
    show(results)
    rows = [{key: value for key, value in asdict(result).items() if key != "counts"} for result in results]
    write_result(arguments.json, {"results": rows})
    plot(results[-1], arguments.plot)


if __name__ == "__main__":
    main()
