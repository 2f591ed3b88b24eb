"""Cost of ten thousand open sessions on one server: memory per session, and CPU of the lease reaper. Linux only.

    python -m benchmarks.serving.sessions [--sessions 10000] [--environment frozen_lake-v1 ...] [--idle 10]

Each session has a different seed and has taken one step, so that its cached reply counts, too. Memory is the growth of
the server's resident set; CPU is its user and system time, both from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from uuid import uuid4

import grpc

from benchmarks.machine import cpu_seconds, resident_bytes
from benchmarks.results import Columns, cells_of, percent, print_table, write_result
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import ROOT, ServerProcess, start_server

ENVIRONMENTS = {"frozen_lake-v1": "Right", "sokoban-v1": "Up", "sudoku-v1": "1,1,1"}
"""Environments, and the action that is played in each."""
BATCH = 500
SHORT_LEASE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one environment. idle_cpu, empty_cpu: share of one core with and without the open sessions.

    reap_cpu_seconds, reap_seconds: CPU and wall-clock time from the last Open until all leases have expired and all
    sessions are closed. Most of the wall-clock time is the lease itself.
    """

    environment: str
    sessions: int
    bytes_per_session: float
    empty_cpu: float
    idle_cpu: float
    reap_cpu_seconds: float
    reap_seconds: float


COLUMNS: Columns = {
    "Environment": lambda row: row["environment"],
    "Sessions": lambda row: f"{row['sessions']:,}",
    "Memory of each": lambda row: f"{row['bytes_per_session'] / 1024:.1f} KiB",
    "Server's CPU, all idle": lambda row: f"{percent(row['idle_cpu'])} of a core",
    "CPU to reap all": lambda row: f"{row['reap_cpu_seconds']:.2f} s",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--environment", action="append", help="repeatable; default: " + ", ".join(ENVIRONMENTS))
    parser.add_argument("--idle", type=float, default=10.0, help="seconds over which idle CPU is measured")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "sessions.json")
    arguments = parser.parse_args()
    results = [
        asyncio.run(measure(environment, arguments.sessions, arguments.idle))
        for environment in arguments.environment or ENVIRONMENTS
    ]
    rows = [asdict(result) for result in results]
    print_table(list(COLUMNS), cells_of(rows, COLUMNS))
    write_result(arguments.json, {"results": rows})


async def measure(environment: str, sessions: int, idle_seconds: float) -> Result:
    """Measure one environment on its own server."""
    with start_server(environment, "--max-sessions", str(sessions + BATCH)) as server:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = EnvironmentServiceStub(channel)
            warm_ids = await open_and_step(stub, environment, BATCH, lease_seconds=3600)
            await stub.Close(pb.CloseRequest(session_ids=warm_ids))
            empty_cpu = await _cpu_share(server, idle_seconds)
            idle_bytes = resident_bytes(server.pid)
            ids = await open_and_step(stub, environment, sessions, lease_seconds=3600)
            growth = resident_bytes(server.pid) - idle_bytes
            idle_cpu = await _cpu_share(server, idle_seconds)
            for start in range(0, sessions, BATCH):
                await stub.Close(pb.CloseRequest(session_ids=ids[start : start + BATCH]))
            await open_and_step(stub, environment, sessions, lease_seconds=SHORT_LEASE_SECONDS)
            cpu, start_time = cpu_seconds(server.pid), monotonic()
            while (await stub.Describe(pb.DescribeRequest())).live_sessions:
                await asyncio.sleep(0.25)
            return Result(
                environment,
                sessions,
                growth / sessions,
                empty_cpu,
                idle_cpu,
                cpu_seconds(server.pid) - cpu,
                monotonic() - start_time,
            )


async def open_and_step(
    stub: EnvironmentServiceStub, environment: str, sessions: int, lease_seconds: float
) -> list[str]:
    """Open sessions with different seeds and keys, as a fleet does, and play one turn in each. Returns their ids."""
    ids: list[str] = []
    actions = [pb.Action(text=ENVIRONMENTS.get(environment, ""))]
    stream = stub.Stream()
    for start in range(0, sessions, BATCH):
        seeds = range(start, min(start + BATCH, sessions))
        replies = await _exchange(
            stream,
            [
                pb.Call(
                    call_id=seed,
                    open=pb.OpenRequest(
                        environment_id=environment, seed=seed, lease_seconds=lease_seconds, key=uuid4().hex
                    ),
                )
                for seed in seeds
            ],
        )
        batch = [reply.open.sessions[0] for reply in replies]
        await _exchange(
            stream,
            [
                pb.Call(
                    call_id=row,
                    step=pb.StepRequest(session_id=session.session_id, epoch=session.epoch, actions=actions),
                )
                for row, session in enumerate(batch)
            ],
        )
        ids += [session.session_id for session in batch]
    await stream.done_writing()
    return ids


async def _exchange(stream: grpc.aio.StreamStreamCall, calls: list[pb.Call]) -> list[pb.Reply]:
    await stream.write(pb.StreamRequest(calls=calls))
    replies: list[pb.Reply] = []
    while len(replies) < len(calls):
        replies += (await stream.read()).replies
    for reply in replies:
        if reply.HasField("error"):
            raise RuntimeError(reply.error.message)
    return replies


async def _cpu_share(server: ServerProcess, seconds: float) -> float:
    before, start = cpu_seconds(server.pid), monotonic()
    await asyncio.sleep(seconds)
    return (cpu_seconds(server.pid) - before) / (monotonic() - start)


if __name__ == "__main__":
    main()
