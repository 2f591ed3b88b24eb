"""Cost of the contract for a server in each language: CPU time per Step on a Stream, without the environment.

    python -m benchmarks.serving.languages [--sessions 256] [--messages 400] [--rounds 3]

Each Step has an unknown action, so that the server does everything that the contract requires without playing. `calls`:
one message per Step. `columns`: StepColumns, if the server supports them. The servers take turns in each round, and
figures are medians over the rounds. examples/cpp must be built in build/examples-cpp, and examples/typescript in its
folder; a server that is not built is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import grpc
from rich.console import Console
from rich.table import Table

from benchmarks.machine import cpu_seconds
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import ROOT, ServerProcess

SERVERS = {
    "Python, starpod serve": (
        [sys.executable, "-m", "starpod.cli.main", "serve", "frozen_lake"],
        Path(sys.executable),
    ),
    "C++, examples/cpp": ([str(path := ROOT / "build/examples-cpp/key_door_server")], path),
    "TypeScript, examples/typescript": (["node", str(path := ROOT / "examples/typescript/dist/main.js")], path),
}
"""Servers by name: command, and the file that must exist."""
UNKNOWN = "no such action"
UNLIMITED = pb.LimitOverrides(max_turns=0, max_actions_per_turn=0, max_actions=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=256, help="each is stepped once by every message")
    parser.add_argument("--messages", type=int, default=400, help="in one measurement")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(closing(ServerProcess(command)))
            for name, (command, binary) in SERVERS.items()
            if binary.exists()
        }
        for _ in range(arguments.rounds):
            for name, server in servers.items():
                for wire, microseconds in measure(server, arguments.sessions, arguments.messages):
                    times[name, wire].append(microseconds)
    table = Table("Server", "Wire", "CPU of the server, µs per step")
    for (name, wire), values in times.items():
        table.add_row(name, wire, f"{median(values):.2f}")
    Console().print(table)


def measure(server: ServerProcess, sessions: int, messages: int) -> Iterator[tuple[str, float]]:
    """Yield each wire format that the server supports, with microseconds of its CPU per Step."""
    with grpc.insecure_channel(server.address) as channel:
        stub = EnvironmentServiceStub(channel)
        description = stub.Describe(pb.DescribeRequest())
        for wire in ("calls", "columns") if description.capabilities.step_columns else ("calls",):
            request = pb.OpenRequest(environment_id=description.environments[0].id, count=sessions, limits=UNLIMITED)
            ids = [session.session_id for session in stub.Open(request).sessions]
            fill = _calls if wire == "calls" else _columns
            requests = [fill(ids, index) for index in range(messages)]
            before = cpu_seconds(server.pid)
            reply_count = 0
            for response in stub.Stream(iter(requests)):
                reply_count += len(response.replies) + len(response.transitions.call_ids)
                assert not any(reply.HasField("error") for reply in response.replies)
            assert reply_count == sessions * messages
            yield wire, (cpu_seconds(server.pid) - before) / reply_count * 1e6
            stub.Close(pb.CloseRequest(session_ids=ids))


def _calls(ids: list[str], index: int) -> pb.StreamRequest:
    actions = [pb.Action(text=UNKNOWN)]
    steps = (pb.StepRequest(session_id=each, epoch=1, step_index=index, actions=actions) for each in ids)
    return pb.StreamRequest(calls=[pb.Call(call_id=index << 32 | row, step=step) for row, step in enumerate(steps)])


def _columns(ids: list[str], index: int) -> pb.StreamRequest:
    count = len(ids)
    columns = pb.StepColumns(
        call_ids=[index << 32 | row for row in range(count)],
        session_ids=ids,
        epochs=[1] * count,
        step_indices=[index] * count,
        actions=[UNKNOWN] * count,
    )
    return pb.StreamRequest(steps=columns)


if __name__ == "__main__":
    main()
