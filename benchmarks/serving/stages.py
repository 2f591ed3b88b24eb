"""Time of a step by stage of the server, for batches of steps in columns, in this process and without a socket.

    python -m benchmarks.serving.stages [--rows 128,512] [--batches 300]

Figures are microseconds per step, as a median over the batches. `turn` is the environment with its limits, the only
stage of an in-process step. The last line is the cost of a message: a batch echoed over a gRPC stream between two
processes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from statistics import median
from time import perf_counter

import grpc
import uvloop

from benchmarks.machine import child_process
from benchmarks.results import print_table
from benchmarks.serving.lake import ENVIRONMENT, OPTIONS, WALK
from starpod.env_server.episodes.live_episode import Want
from starpod.env_server.operation.config import ServerLimits
from starpod.env_server.operation.metrics import Metrics
from starpod.env_server.processes.host_factory import HostFactory
from starpod.env_server.registry import Registry
from starpod.env_server.sessions.calls import Calls
from starpod.env_server.sessions.columns import Answers, StepRows, step_rows
from starpod.env_server.sessions.table import SessionTable
from starpod.env_server.sessions.worker import Worker
from starpod.v1 import environment_pb2 as pb

STAGES = ("decode", "columns to rows", "turn", "session, order, cache, message", "encode")
ECHO = """
import asyncio, grpc, uvloop
async def echo(_, context):
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)
async def main():
    server = grpc.aio.server()
    method = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Echo": method}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()
uvloop.run(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="128,512", help="steps in one message, comma-separated")
    parser.add_argument("--batches", type=int, default=300)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.rows.split(",")]
    results = {count: uvloop.run(measure(count, arguments.batches)) for count in counts}
    rows = [[stage, *(f"{results[count][stage]:.2f}" for count in counts)] for stage in next(iter(results.values()))]
    print_table(["Stage", *(f"{count} rows" for count in counts)], rows, "Microseconds per step, median")


async def measure(rows: int, batches: int) -> dict[str, float]:
    """Return the microseconds per step by stage."""
    seconds_by_stage: defaultdict[str, list[float]] = defaultdict(list)
    limits = ServerLimits()
    calls = Calls(Worker(Registry.installed(), limits, Metrics(), HostFactory(limits, threads=1)))
    table = SessionTable()
    opening = pb.OpenRequest(
        environment_id=ENVIRONMENT,
        seed=0,
        count=rows,
        want=pb.Want(state_key=True),
        limits=pb.LimitOverrides(max_turns=0, max_actions_per_turn=0, max_actions=0),
    )
    opening.options.update(OPTIONS)
    ids = [session.session_id for session in (await calls.open(table, opening)).sessions]
    size = 0
    for batch in range(batches):
        action, epoch, index = WALK[batch % len(WALK)], 1 + batch // len(WALK), batch % len(WALK)
        if index == 0 and batch:
            for session_id in ids:
                await calls.reset(table, pb.ResetRequest(session_id=session_id, epoch=epoch - 1, seed=0))
        copies = [table[session_id].host.episode.fork(None) for session_id in ids]  # type: ignore[union-attr]
        columns = pb.StepColumns(
            call_ids=range(rows), session_ids=ids, epochs=[epoch] * rows, step_indices=[index] * rows
        )
        columns.actions.extend([action] * rows)
        data = pb.StreamRequest(steps=columns).SerializeToString()
        want, turn_actions = Want(state_key=True), (action,)
        marks = [perf_counter()]
        for copy_ in copies:
            copy_.turn(turn_actions, want)
        marks.append(perf_counter())
        request = pb.StreamRequest.FromString(data)
        marks.append(perf_counter())
        read_rows = StepRows(request.steps)
        marks.append(perf_counter())
        transitions = Answers()
        start = 0
        while start < rows:  # step_rows handles a slice per call, as in the service
            others, broken, start = step_rows(read_rows, start, rows, table, 1, calls.worker.metrics, transitions)
            assert not others and not broken, "every row was stepped"
        marks.append(perf_counter())
        size = len(transitions.message.SerializeToString())
        marks.append(perf_counter())
        turn, decode, to_rows, stepped, encode = (end - start for start, end in pairwise(marks))
        for stage, seconds in zip(STAGES, (decode, to_rows, turn, stepped - turn, encode), strict=True):
            seconds_by_stage[stage].append(seconds)
    medians = {stage: median(seconds) / rows * 1e6 for stage, seconds in seconds_by_stage.items()}
    medians["all of it"] = sum(medians.values())
    medians["gRPC, per message over rows"] = await echo(bytes(size), 1.0) / rows * 1e6
    return medians


async def echo(data: bytes, seconds: float) -> float:
    """Return the seconds per message of an echoing stream, with two messages in flight, as in the fleet."""
    with child_process([sys.executable, "-c", ECHO], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.stdout.readline().strip()}") as channel:
            stream = channel.stream_stream("/bench.Echo/Echo")()
            for _ in range(2):
                await stream.write(data)
            count, start = 0, perf_counter()
            while perf_counter() - start < seconds:
                await stream.read()
                await stream.write(data)
                count += 1
            elapsed = perf_counter() - start
    return elapsed / count


if __name__ == "__main__":
    main()
