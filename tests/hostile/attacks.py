"""Attacks of one hostile client on the work and memory of a server, and what each costs the server and everybody else.

    python -m tests.hostile.attacks [NAME ...]

Each runs against a server process of its own. The attacker has a token and a process of its own; another tenant's
client, in a third process, plays one turn every 20 ms over unary calls all the while.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import struct_pb2

from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.hostile.conftest import MEBIBYTE, VILLAIN, WITNESS, bearer
from tests.support import ROOT, ServerProcess, start_server

_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_PERIOD = 0.02
_TICK = os.sysconf("SC_CLK_TCK")


class Attacker:
    """A token holder. What the server refuses is counted in `refused`, by code."""

    def __init__(self, address: str) -> None:
        self.stub = EnvironmentServiceStub(grpc.insecure_channel(address, options=_UNLIMITED))
        self.metadata = bearer(VILLAIN)
        self.calls = 0
        self.refused = 0

    def call(self, method: str, request: Any) -> Any:
        """The reply, or None if the server refuses."""
        self.calls += 1
        try:
            return getattr(self.stub, method)(request, metadata=self.metadata, timeout=300)
        except grpc.RpcError:
            self.refused += 1
            return None

    def together(self, method: str, requests: list[Any]) -> None:
        """The calls at once."""
        self.calls += len(requests)
        futures = [getattr(self.stub, method).future(each, metadata=self.metadata, timeout=300) for each in requests]
        for future in futures:
            self.refused += future.exception() is not None

    def stream(self, *requests: pb.StreamRequest) -> None:
        self.calls += len(requests)
        try:
            for response in self.stub.Stream(iter(requests), metadata=self.metadata, timeout=300):
                self.refused += sum(reply.HasField("error") for reply in response.replies)
        except grpc.RpcError:
            self.refused += 1

    def open(self, environment: str = "anything-v1", **fields: Any) -> pb.Session:
        reply = self.call("Open", pb.OpenRequest(environment_id=environment, seed=1, **fields))
        assert reply is not None, "the server refuses an ordinary Open"
        return reply.sessions[0]


def nulls(count: int) -> pb.OpenRequest:
    """An Open whose options hold a list of nulls: four bytes each."""
    values = [struct_pb2.Value(null_value=struct_pb2.NULL_VALUE)] * count
    request = pb.OpenRequest(environment_id="frozen_lake-v1", seed=1)
    request.options.fields["map"].list_value.values.extend(values)
    return request


def nested_json(size: int, depth: int = 99) -> str:
    """Lists within lists, about so many bytes of them."""
    unit = "[" * (depth - 1) + "]" * (depth - 1)
    return "[" + ",".join([unit] * (size // (len(unit) + 1))) + "]"


def options_of_nulls(attacker: Attacker) -> None:
    attacker.together("Open", [nulls(262_000)] * 20)


def one_open_of_46_mebibytes(attacker: Attacker) -> None:
    attacker.call("Open", nulls(46 * MEBIBYTE // 4))


def steps_out_of_order(attacker: Attacker) -> None:
    session = attacker.open()
    action = pb.Action(json=nested_json(900_000))
    for _ in range(40):
        attacker.call("Step", pb.StepRequest(session_id=session.session_id, epoch=1, step_index=9, actions=[action]))


def nested_json_held(attacker: Attacker) -> None:
    for _ in range(4):
        session = attacker.open()
        action = pb.Action(json=nested_json(8 * MEBIBYTE))
        attacker.call("Step", pb.StepRequest(session_id=session.session_id, epoch=1, actions=[action]))


def json_string_without_an_end(attacker: Attacker) -> None:
    action = pb.Action(json='"' + "," * 10_000 + '\\"' * MEBIBYTE)
    session = attacker.open()
    attacker.call("Step", pb.StepRequest(session_id=session.session_id, epoch=1, actions=[action]))


def json_of_57_mebibytes(attacker: Attacker) -> None:
    session = attacker.open()
    action = pb.Action(json=nested_json(57 * MEBIBYTE))
    attacker.call("Step", pb.StepRequest(session_id=session.session_id, epoch=1, actions=[action]))


def empty_texts(attacker: Attacker) -> None:
    session = attacker.open()
    request = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="")] * 8_000_000)
    attacker.call("Step", request)


def group_with_pictures(attacker: Attacker) -> None:
    request = pb.OpenRequest(environment_id="frozen_lake-v1", seed=1, count=256, want=pb.Want(image=True))
    request.options["size"] = 16
    attacker.call("Open", request)


def groups_one_after_another(attacker: Attacker) -> None:
    request = pb.OpenRequest(environment_id="frozen_lake-v1", seed=1, count=4096)
    for _ in range(4):
        reply = attacker.call("Open", request)
        if reply is not None:
            attacker.call("Close", pb.CloseRequest(session_ids=[each.session_id for each in reply.sessions]))


def steps_with_pictures(attacker: Attacker) -> None:
    request = pb.OpenRequest(environment_id="frozen_lake-v1", seed=1, count=64, want=pb.Want(image=True))
    request.options["size"] = 16
    reply = attacker.call("Open", request)
    sessions = [each.session_id for each in reply.sessions]
    count = len(sessions)
    columns = pb.StepColumns(
        call_ids=range(count),
        session_ids=sessions,
        epochs=[1] * count,
        step_indices=[0] * count,
        actions=["Up"] * count,
    )
    attacker.stream(pb.StreamRequest(steps=columns))


def rows_without_end(attacker: Attacker) -> None:
    count = 65_536
    columns = pb.StepColumns(
        call_ids=range(count),
        session_ids=["x"] * count,
        epochs=[1] * count,
        step_indices=[0] * count,
        actions=[""] * count,
    )
    attacker.stream(*[pb.StreamRequest(steps=columns)] * 10)


def many_heavy_calls_at_once(attacker: Attacker) -> None:
    session = attacker.open()
    action = pb.Action(json=nested_json(400_000))
    step = pb.StepRequest(session_id=session.session_id, epoch=1, step_index=9, actions=[action])
    attacker.together("Step", [step] * 200)


def largest_requests(attacker: Attacker) -> None:
    """As large as gRPC lets them in, one after another and at once."""
    session = attacker.open()
    text = "x" * (20 * MEBIBYTE - 100)
    step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text=text)])
    for _ in range(20):
        attacker.call("Step", step)
    attacker.together("Step", [step] * 5)


def long_texts(attacker: Attacker) -> None:
    session = attacker.open("frozen_lake-v1")
    step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="Ü" * (25 * MEBIBYTE))])
    for index in range(4):
        step.step_index = index
        attacker.call("Step", step)


def everything_at_once(attacker: Attacker) -> None:
    """For ten seconds, each from a thread of its own."""
    session = attacker.open()
    step = pb.StepRequest(session_id=session.session_id, epoch=1, step_index=9)
    step.actions.add(json=nested_json(3 * MEBIBYTE))
    group = pb.OpenRequest(environment_id="frozen_lake-v1", seed=1, count=64, want=pb.Want(image=True))
    group.options["size"] = 16
    search = pb.OpenRequest(environment_id="sokoban-v1", count=16)
    columns = pb.StepColumns(call_ids=[1], session_ids=["x"], epochs=[1], step_indices=[0], actions=[""])
    for _ in range(12):
        columns.MergeFrom(columns)
    until = time.monotonic() + 10

    def again(call: Callable[[], Any]) -> None:
        while time.monotonic() < until:
            call()

    def groups(request: pb.OpenRequest) -> None:
        reply = attacker.call("Open", request)
        if reply is not None:
            attacker.call("Close", pb.CloseRequest(session_ids=[each.session_id for each in reply.sessions]))

    threads = [
        threading.Thread(target=again, args=(call,))
        for call in (
            lambda: attacker.together("Open", [nulls(5_000)] * 20),
            lambda: attacker.together("Step", [step] * 10),
            lambda: groups(group),
            lambda: groups(search),
            lambda: groups(pb.OpenRequest(environment_id="frozen_lake-v1", count=2_000)),
            lambda: attacker.stream(*[pb.StreamRequest(steps=columns)] * 4),
            lambda: attacker.stream(*[pb.StreamRequest(calls=[pb.Call()] * 4_096)] * 4),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


ATTACKS: dict[str, Callable[[Attacker], None]] = {
    attack.__name__: attack
    for attack in (
        options_of_nulls,
        one_open_of_46_mebibytes,
        steps_out_of_order,
        nested_json_held,
        json_string_without_an_end,
        json_of_57_mebibytes,
        empty_texts,
        group_with_pictures,
        groups_one_after_another,
        steps_with_pictures,
        rows_without_end,
        many_heavy_calls_at_once,
        largest_requests,
        long_texts,
        everything_at_once,
    )
}


@dataclass(frozen=True)
class Cost:
    """What an attack cost. Seconds and MiB.

    cpu: of the server, all threads. peak, kept: resident memory at its highest and a few seconds later, beyond what it
        was before.
    p99, worst: of the other tenant's turns, as if each had come when it was due.
    p99_work: the same, of what the server's event loop worked (CPU time) while a turn waited for it: as p99 would be if
        nobody else used the machine.
    """

    calls: int
    refused: int
    seconds: float
    cpu: float
    peak: float
    kept: float
    p99: float
    worst: float
    p99_work: float


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def memory(pid: int, field: str = "VmRSS") -> float:
    """MiB of a process, by a field of its status."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1024


@contextlib.contextmanager
def attacked_server(*arguments: str) -> Iterator[ServerProcess]:
    """A server with default limits, and a token for the attacker and for the other tenant."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens")
        tokens.write_text(f"{VILLAIN} name=villain\n{WITNESS} name=witness\n")
        module = ROOT / "tests/env_server/troublesome.py"
        names = ("frozen_lake", "sokoban", "countdown", "sudoku", "bandit")
        files = ("--environment-module", str(module), "--token-file", str(tokens))
        with start_server(*names, *files, *arguments) as server:
            yield server


class Bystander:
    """Another tenant's client in a process of its own; `latencies` once it has ended."""

    def __init__(self, server: ServerProcess) -> None:
        command = [sys.executable, "-m", "tests.hostile.attacks", "--bystander", server.address, str(server.pid)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self._process.stdout.readline()

    def end(self) -> tuple[list[float], list[float]]:
        """Seconds of each turn, and of the event loop's work meanwhile; both sorted."""
        output, _ = self._process.communicate("", timeout=300)
        latencies, work = json.loads(output)
        return sorted(latencies), sorted(work)


def loop_seconds(pid: int) -> float:
    """CPU time of the thread that runs a server's event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def play_on(address: str, pid: int) -> None:
    """The bystander's program: one turn every 20 ms until standard input closes."""
    import select

    channel = grpc.insecure_channel(address)
    stub, metadata = EnvironmentServiceStub(channel), bearer(WITNESS)
    session = stub.Open(pb.OpenRequest(environment_id="walk-v1", seed=11), metadata=metadata).sessions[0]
    latencies: list[float] = []
    work: list[float] = []
    step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="Left")])
    while True:
        started, worked = time.perf_counter(), loop_seconds(pid)
        stub.Step(step, metadata=metadata)
        waited, worked = time.perf_counter() - started, loop_seconds(pid) - worked
        # Those that would have come while this one waited have waited too.
        parts = [1.0, *(1 - missed * _PERIOD / waited for missed in range(1, int(waited / _PERIOD)))]
        latencies += [part * waited for part in parts]
        work += [part * worked for part in parts]
        step.step_index += 1
        if step.step_index == 25:
            print("ready", flush=True)
            latencies, work = [], []
        if select.select([sys.stdin], [], [], _PERIOD)[0]:
            break
    print(json.dumps([latencies, work]))


def measure(attack: Callable[[Attacker], None], *arguments: str) -> Cost:
    """Runs the attack against a fresh server."""
    with attacked_server(*arguments) as server:
        bystander = Bystander(server)
        Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # VmHWM starts from here
        before, cpu, started = memory(server.pid), cpu_seconds(server.pid), time.perf_counter()
        context = multiprocessing.get_context("spawn")
        counts = context.Array("i", 2)
        process = context.Process(target=_attack, args=(attack.__name__, server.address, counts))
        process.start()
        process.join()
        assert process.exitcode == 0, f"{attack.__name__} broke off"
        seconds, used = time.perf_counter() - started, cpu_seconds(server.pid) - cpu
        time.sleep(4)  # the server has time to give memory back
        latencies, work = bystander.end()
        return Cost(
            calls=counts[0],
            refused=counts[1],
            seconds=seconds,
            cpu=used,
            peak=memory(server.pid, "VmHWM") - before,
            kept=memory(server.pid) - before,
            p99=latencies[int(len(latencies) * 0.99)],
            worst=latencies[-1],
            p99_work=work[int(len(work) * 0.99)],
        )


def _attack(name: str, address: str, counts: Any) -> None:
    attacker = Attacker(address)
    ATTACKS[name](attacker)
    counts[0], counts[1] = attacker.calls, attacker.refused


def main() -> None:
    if sys.argv[1:2] == ["--bystander"]:
        play_on(sys.argv[2], int(sys.argv[3]))
        return
    for name in sys.argv[1:] or ATTACKS:
        cost = asdict(measure(ATTACKS[name]))
        print(name, *(f"{key}={value:.3g}" for key, value in cost.items()), flush=True)


if __name__ == "__main__":
    main()
