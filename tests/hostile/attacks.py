"""Attacks of one hostile client on the work and memory of a server, and what each costs the server and everybody else.

    python -m tests.hostile.attacks [NAME ...]

In the tests all run against one server process, from here against one each. Another tenant's client, in a process of
its own, plays one turn every 20 ms over unary calls all the while.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from google.protobuf import struct_pb2

from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.hostile.conftest import (
    GAMES,
    MEBIBYTE,
    VILLAIN,
    WITNESS,
    bearer,
    guarded_server,
    http_url,
    kept_memory,
    loop_seconds,
    memory_of,
)
from tests.support import ROOT, ServerProcess

_PERIOD = 0.02


class Attacker:
    """The holder of a token who continues whatever the server refuses."""

    def __init__(self, address: str, url: str = "") -> None:
        self.url = url
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self.stub = EnvironmentServiceStub(grpc.insecure_channel(address, options=options))
        self.metadata = bearer(VILLAIN)

    def call(self, method: str, request: Any) -> Any:
        """Return the reply, or None if the server refuses."""
        with contextlib.suppress(grpc.RpcError):
            return getattr(self.stub, method)(request, metadata=self.metadata, timeout=300)

    def together(self, method: str, requests: list[Any]) -> None:
        """Make the calls at once."""
        futures = [getattr(self.stub, method).future(each, metadata=self.metadata, timeout=300) for each in requests]
        for future in futures:
            future.exception()

    def stream(self, *requests: pb.StreamRequest) -> None:
        with contextlib.suppress(grpc.RpcError):
            for _ in self.stub.Stream(iter(requests), metadata=self.metadata, timeout=300):
                pass

    def open(self, environment: str = "anything-v1") -> str:
        """Return the id of a new session."""
        reply = self.call("Open", pb.OpenRequest(environment_id=environment, seed=1))
        assert reply is not None, "the server refuses an ordinary Open"
        return str(reply.sessions[0].session_id)

    def open_and_close(self, request: pb.OpenRequest) -> None:
        if (reply := self.call("Open", request)) is not None:
            self.call("Close", pb.CloseRequest(session_ids=[each.session_id for each in reply.sessions]))

    def step(self, environment: str = "anything-v1", index: int = 0, **action: str) -> pb.StepRequest:
        """Return a step of a new session."""
        session_id = self.open(environment)
        return pb.StepRequest(session_id=session_id, epoch=1, step_index=index, actions=[pb.Action(**action)])


def nulls(count: int) -> pb.OpenRequest:
    """An Open whose options hold a list of nulls: four bytes each."""
    values = [struct_pb2.Value(null_value=struct_pb2.NULL_VALUE)] * count
    request = pb.OpenRequest(environment_id="frozen_lake-v1", seed=1)
    request.options.fields["map"].list_value.values.extend(values)
    return request


def nested_json(size: int, depth: int = 99) -> str:
    """Return nested JSON lists of about `size` bytes."""
    unit = "[" * (depth - 1) + "]" * (depth - 1)
    return "[" + ",".join([unit] * (size // (len(unit) + 1))) + "]"


def pictures(count: int) -> pb.OpenRequest:
    """An Open of a group whose observations are pictures."""
    request = pb.OpenRequest(environment_id="frozen_lake-v1", seed=1, count=count, want=pb.Want(image=True))
    request.options["size"] = 16
    return request


def columns(session_ids: list[str], action: str = "") -> pb.StreamRequest:
    """The first step of each session."""
    ones, zeros = [1] * len(session_ids), [0] * len(session_ids)
    actions = [action] * len(session_ids)
    steps = pb.StepColumns(
        call_ids=range(len(ones)), session_ids=session_ids, epochs=ones, step_indices=zeros, actions=actions
    )
    return pb.StreamRequest(steps=steps)


def options_of_nulls(attacker: Attacker) -> None:
    attacker.together("Open", [nulls(262_000)] * 20)


def steps_out_of_order(attacker: Attacker) -> None:
    step = attacker.step(index=9, json=nested_json(900_000))
    for _ in range(40):
        attacker.call("Step", step)


def nested_json_held(attacker: Attacker) -> None:
    for _ in range(4):
        attacker.call("Step", attacker.step(json=nested_json(8 * MEBIBYTE)))


def json_string_without_an_end(attacker: Attacker) -> None:
    attacker.call("Step", attacker.step(json='"' + "," * 10_000 + '\\"' * MEBIBYTE))


def group_with_pictures(attacker: Attacker) -> None:
    attacker.call("Open", pictures(256))


def groups_one_after_another(attacker: Attacker) -> None:
    for _ in range(4):
        attacker.open_and_close(pb.OpenRequest(environment_id="frozen_lake-v1", seed=1, count=4096))


def steps_with_pictures(attacker: Attacker) -> None:
    reply = attacker.call("Open", pictures(64))
    attacker.stream(columns([each.session_id for each in reply.sessions], "Up"))


def rows_without_end(attacker: Attacker) -> None:
    attacker.stream(*[columns(["x"] * 65_536)] * 10)


def many_heavy_calls_at_once(attacker: Attacker) -> None:
    attacker.together("Step", [attacker.step(index=9, json=nested_json(400_000))] * 200)


def largest_requests(attacker: Attacker) -> None:
    """Send requests of the largest size that gRPC accepts, first one after another and then at once."""
    step = attacker.step(text="x" * (20 * MEBIBYTE - 100))
    for _ in range(20):
        attacker.call("Step", step)
    attacker.together("Step", [step] * 5)


def everything_at_once(attacker: Attacker) -> None:
    """Run all other attacks for five seconds, each in its own thread."""
    step = attacker.step(index=9, json=nested_json(3 * MEBIBYTE))
    calls: tuple[Callable[[], None], ...] = (
        lambda: attacker.together("Open", [nulls(5_000)] * 20),
        lambda: attacker.together("Step", [step] * 10),
        lambda: attacker.open_and_close(pictures(64)),
        lambda: attacker.open_and_close(pb.OpenRequest(environment_id="sokoban-v1", count=16)),
        lambda: attacker.open_and_close(pb.OpenRequest(environment_id="frozen_lake-v1", count=2_000)),
        lambda: attacker.stream(*[columns(["x"] * 4_096)] * 4),
        lambda: attacker.stream(*[pb.StreamRequest(calls=[pb.Call()] * 4_096)] * 4),
    )
    until = time.monotonic() + 5

    def again(call: Callable[[], None]) -> None:
        while time.monotonic() < until:
            call()

    with ThreadPoolExecutor(len(calls)) as pool:
        list(pool.map(again, calls))


def docs_over_64_connections(attacker: Attacker) -> None:
    """Ask for the page without a token, for five seconds."""
    until = time.monotonic() + 5

    def ask(_: int) -> None:
        with httpx.Client(base_url=attacker.url, trust_env=False) as client:
            while time.monotonic() < until:
                with contextlib.suppress(httpx.HTTPError):
                    client.get("/docs")

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(ask, range(64)))


def calls_without_a_token(attacker: Attacker) -> None:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        for future in [attacker.stub.Step.future(pb.StepRequest(), timeout=300) for _ in range(500)]:
            future.exception()


ATTACKS: dict[str, Callable[[Attacker], None]] = {
    attack.__name__: attack
    for attack in (
        options_of_nulls,
        steps_out_of_order,
        nested_json_held,
        json_string_without_an_end,
        group_with_pictures,
        groups_one_after_another,
        steps_with_pictures,
        rows_without_end,
        many_heavy_calls_at_once,
        largest_requests,
        everything_at_once,
        docs_over_64_connections,
        calls_without_a_token,
    )
}


@dataclass(frozen=True)
class Cost:
    """The cost of an attack for others.

    kept: MiB of memory that the server uses afterwards, in addition to its use before. p99_work: seconds of CPU time
    that the server's event loop spent while a turn of the other tenant waited for it (0.99 quantile), as if each turn
    had been sent on time. The tenant would wait that long if nobody else used the machine. p50_wait, p99_wait: seconds
    that these turns took in fact, on a machine that the attacker uses as well.
    """

    kept: float
    p99_work: float
    p50_wait: float
    p99_wait: float


class Bystander:
    """Another tenant's client, in a separate process."""

    def __init__(self, server: ServerProcess) -> None:
        command = [sys.executable, "-m", "tests.hostile.attacks", "--bystander", server.address, str(server.pid)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self._process.stdout.readline()

    def end(self) -> tuple[list[float], list[float]]:
        """Return the event loop's CPU seconds during each turn and the seconds that each turn took, both sorted."""
        work, waits = zip(*json.loads(self._process.communicate("", timeout=300)[0]), strict=True)
        return sorted(work), sorted(waits)


def play_on(address: str, pid: int) -> None:
    """The bystander's program: one turn every 20 ms until standard input closes."""
    stub, metadata = EnvironmentServiceStub(grpc.insecure_channel(address)), bearer(WITNESS)
    session = stub.Open(pb.OpenRequest(environment_id="walk-v1", seed=11), metadata=metadata).sessions[0]
    turns: list[tuple[float, float]] = []
    step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="Left")])
    while True:
        started, worked = time.perf_counter(), loop_seconds(pid)
        stub.Step(step, metadata=metadata)
        waited, worked = time.perf_counter() - started, loop_seconds(pid) - worked
        # Turns that were due while this one waited have waited, too.
        shares = (1 - missed * _PERIOD / waited for missed in range(max(1, int(waited / _PERIOD))))
        turns += [(share * worked, share * waited) for share in shares]
        step.step_index += 1
        if step.step_index == 25:
            print("ready", flush=True)
            turns = []
        if select.select([sys.stdin], [], [], _PERIOD)[0]:
            break
    print(json.dumps(turns))


def measure(attack: Callable[[Attacker], None], server: ServerProcess) -> Cost:
    bystander = Bystander(server)
    before = memory_of(server.pid)
    attack(Attacker(server.address, http_url(server)))
    work, waits = bystander.end()
    return Cost(kept_memory(server.pid, before), _quantile(work, 0.99), _quantile(waits, 0.5), _quantile(waits, 0.99))


def _quantile(values: list[float], share: float) -> float:
    return values[int(len(values) * share)]


def main() -> None:
    if sys.argv[1:2] == ["--bystander"]:
        play_on(sys.argv[2], int(sys.argv[3]))
        return
    print("| Attack | Before, p50 and p99 in ms | Meanwhile | CPU time of the server, p99 in ms | Memory kept, MiB |")
    print("|---|---|---|---|---|")
    for name in sys.argv[1:] or ATTACKS:
        with guarded_server(*GAMES, "--http", "0") as server:
            calm, cost = measure(lambda _: time.sleep(3), server), measure(ATTACKS[name], server)
        waits = [f"{1e3 * each.p50_wait:.1f}, {1e3 * each.p99_wait:.1f}" for each in (calm, cost)]
        figures = [name.replace("_", " "), *waits, f"{1e3 * cost.p99_work:.1f}", f"{cost.kept:.0f}"]
        print(f"| {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
