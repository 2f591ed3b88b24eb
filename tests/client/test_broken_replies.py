"""Invalid replies of a server: each fails only its own call, in time, and no invalid number is trained on."""

import asyncio
import itertools
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, struct_pb2
from google.rpc import status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from starpod.client import Fleet, ServerBug, StarpodError
from starpod.client.errors import from_status
from starpod.client.transport import FORKED, RISKY_FORK
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import MAX_REWARD
from tests.client.fake_server import FakeServer
from tests.client.test_fleet import give_patience
from tests.support import ServerProcess

Change = Callable[[Any], object]


class BrokenServer(FakeServer):
    """Changes the replies to calls of one kind before they are sent."""

    kind = ""
    change: Change = staticmethod(lambda response: None)

    async def call(self, kind: str, request: Any) -> Any:
        response = type(sent := await super().call(kind, request))()
        response.CopyFrom(sent)
        if kind == self.kind:
            self.change(response)
        return response


async def opened(server: FakeServer) -> Fleet:
    fleet = Fleet(server.address, timeout=0.5, grace=0.1)
    await fleet.start()
    return fleet


def nested(depth: int) -> struct_pb2.Struct:
    value = struct_pb2.Struct()
    inner = value
    for _ in range(depth):
        inner = inner.fields["a"].struct_value
    inner.fields["a"].number_value = 1
    return value


STEPS: dict[str, Change] = {
    "NaN": lambda t: setattr(t, "reward", math.nan),
    "infinite": lambda t: setattr(t, "reward", math.inf),
    "beyond what can be trained": lambda t: setattr(t, "reward", 1e38),
    "outcomes of another length": lambda t: t.outcomes.add(executed=True),
    "no outcome": lambda t: t.ClearField("outcomes"),
    "NaN outcome": lambda t: setattr(t.outcomes[0], "reward", math.nan),
}
MESSAGES: dict[str, Change] = {
    **STEPS,
    "NaN part": lambda t: t.reward_parts.update({"a": math.nan}),
    "NaN score": lambda t: setattr(t.observation, "score", math.nan),
    "NaN in info": lambda t: t.info.update({"a": [1.0, {"b": math.nan}]}),
    "deep info": lambda t: t.info.CopyFrom(nested(28)),
    "both ends": lambda t: (setattr(t, "terminated", True), setattr(t, "truncated", True)),
    "an end without a reason": lambda t: setattr(t, "terminated", True),
    "an unknown end": lambda t: (setattr(t, "end_reason", 77), setattr(t, "truncated", True)),
}
"""What a changed transition says. Columns can say only the first ones."""


@pytest.mark.parametrize("name", MESSAGES)
async def test_a_step_whose_reply_breaks_the_contract_fails_alone(name: str) -> None:
    for columns in (True, False) if name in STEPS else (False,):
        async with FakeServer(columns=columns) as server:
            fleet = await opened(server)
            async with fleet:
                wrong, other = [(await fleet.open("walk-v1", seed=seed))[0] for seed in (1, 2)]
                changes = iter([MESSAGES[name]])  # the first turn is that of `wrong`
                server.alter = lambda t, changes=changes: [change(t) for change in itertools.islice(changes, 1)]
                failed, fine = await fleet.step_many([wrong, other], ["left", "left"], return_exceptions=True)
                assert isinstance(failed, ServerBug) and server.address in str(failed), failed
                assert math.isfinite(fine.reward)
                server.alter = lambda t: None
                assert await other.step("right")


OPENS: dict[str, Change] = {
    "5,000 sessions": lambda r: r.sessions.extend([r.sessions[0]] * 5000),
    "none": lambda r: r.ClearField("sessions"),
    "no id": lambda r: setattr(r.sessions[0], "session_id", ""),
    "another version": lambda r: setattr(r, "environment_version", "2.0.0"),
    "no version": lambda r: setattr(r, "environment_version", "new"),
    "another seed": lambda r: setattr(r.sessions[0], "seed", 5),
    "another dynamics seed": lambda r: setattr(r.sessions[0], "dynamics_seed", 5),
    "an infinite score": lambda r: setattr(r.sessions[0].observation, "score", math.inf),
}


@pytest.mark.parametrize("name", OPENS)
async def test_an_open_is_compared_with_what_was_asked(name: str) -> None:
    async with BrokenServer() as server:
        server.kind, server.change = "open", OPENS[name]
        fleet = await opened(server)
        async with fleet:
            with pytest.raises(ServerBug, match=server.address):
                await fleet.open("walk-v1", seed=1, dynamics_seed=2, version=">=1,<2")
            server.kind = ""
            assert await fleet.open("walk-v1", seed=1)


async def test_a_message_that_cannot_be_read_is_an_error_of_its_call() -> None:
    fake = FakeServer()

    async def stream(requests: Any, context: Any) -> Any:
        async for _ in requests:
            yield b"\xff"

    async def step(request: pb.StepRequest, context: Any) -> Any:
        return b"\xff" if request.actions[0].text == "left" else await fake.Step(request, context)

    def serialized(reply: Any) -> bytes:
        return reply if isinstance(reply, bytes) else bytes(reply.SerializeToString())

    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(getattr(fake, name), request.FromString, serialized)
        for name, request in (("Describe", pb.DescribeRequest), ("Open", pb.OpenRequest), ("Close", pb.CloseRequest))
    }
    handlers["Step"] = grpc.unary_unary_rpc_method_handler(step, pb.StepRequest.FromString, serialized)
    handlers["Stream"] = grpc.stream_stream_rpc_method_handler(stream, pb.StreamRequest.FromString, serialized)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("starpod.v1.EnvironmentService", handlers),))
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        fleet = await opened(fake)
        async with fleet, asyncio.timeout(60):
            wrong, other = [(await fleet.open("walk-v1", seed=seed))[0] for seed in (1, 2)]
            with pytest.raises(ServerBug):
                await wrong.step("left")
            assert await other.step("right")
    finally:
        await server.stop(None)


async def test_limits_that_let_nothing_through_refuse_the_call() -> None:
    async with FakeServer() as server:
        server.limits.max_message_bytes = 1
        fleet = await opened(server)
        async with fleet, asyncio.timeout(60):
            with pytest.raises(StarpodError, match="send less"):
                await fleet.open("walk-v1", seed=1)


def test_details_that_cannot_be_read_leave_the_code() -> None:
    names = ("ErrorInfo", "RetryInfo", "BadRequest")
    details = [any_pb2.Any(type_url=f"type.googleapis.com/google.rpc.{name}", value=b"\xff\xff") for name in names]
    error = from_status(status_pb2.Status(code=13, message="oh", details=details))
    assert type(error) is ServerBug and str(error) == "oh"


def scramble(message: Any, luck: random.Random) -> None:
    """Sets some fields of a message, and of those in it, to other values of their types: well-formed, and wrong."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if luck.random() > 0.15:
            if field.message_type and not field.is_repeated and message.HasField(field.name):
                scramble(value, luck)
            continue
        if field.is_repeated:
            if field.message_type and field.message_type.GetOptions().map_entry:
                continue
            kept = list(value)[: luck.randrange(3)]
            del value[:]
            value.extend(kept * luck.choice((0, 1, 3)))
        elif field.message_type:
            message.ClearField(field.name)
        else:
            choices: dict[str, list[Any]] = {
                "float": [math.nan, -math.inf, 1e300, -0.0],
                "int": [0, 1, 7, 2**31 - 1],
                "bool": [True, False],
                "str": ["", "x", "\u2028", "9.9.9"],
                "bytes": [b"", b"\xff"],
            }
            kind = type(value).__name__
            setattr(message, field.name, luck.choice(choices[kind]))


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.sampled_from(["open", "step", "reset", "fork", "snapshot", "restore", "renew"]))
def test_random_replies_end_in_an_answer_or_an_error(number: int, kind: str) -> None:
    luck = random.Random(number)

    async def play() -> None:
        async with BrokenServer(columns=luck.random() < 0.5) as server:
            server.change = lambda response: scramble(response, luck)
            # As rows, replies to steps are changed in the table above: the fake cannot make rows of everything.
            server.alter = lambda t: None if server.capabilities.step_columns else scramble(t, luck)
            fleet = await opened(server)
            async with fleet, asyncio.timeout(120):
                (session,) = await fleet.open("walk-v1", seed=1)
                give_patience(fleet, 1.0)
                server.kind = kind
                for call in (
                    lambda: fleet.open("walk-v1", seed=2, count=2),
                    lambda: session.step("left"),
                    lambda: session.reset(seed=3),
                    lambda: session.fork(2),
                    session.snapshot,
                    lambda: session.step("right"),
                ):
                    try:
                        result = await call()
                    except (StarpodError, RuntimeError):
                        continue
                    if isinstance(result, tuple | list):
                        assert len(result) == 2
                    elif hasattr(result, "reward"):
                        assert abs(result.reward) <= MAX_REWARD and len(result.outcomes) == 1

    asyncio.run(play())


FORKING = """
import os, sys
from starpod.client import SyncFleet

address = sys.argv[1]
with SyncFleet(address) as fleet:
    (session,) = fleet.open("bandit-v1", seed=1)
    if os.fork() == 0:
        for call in (lambda: session.step("Phoenix"), lambda: SyncFleet(address), fleet.close):
            try:
                print(call(), flush=True)
            except RuntimeError as error:
                print(error, flush=True)
        os._exit(0)
    os.wait()
    session.step("Phoenix")
"""


@pytest.mark.parametrize(("imports", "warning"), [("", ""), ("import grpc\n", RISKY_FORK)])
def test_a_forked_process_is_told_instead_of_hanging_or_crashing(
    server: ServerProcess, imports: str, warning: str
) -> None:
    command = [sys.executable, "-c", imports + FORKING, server.address]
    env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True, env=env)
    if warning:  # gRPC's own handlers of forks are in use, which the new process may not survive
        assert warning in done.stderr
    else:
        assert (done.stdout, done.stderr) == (f"{FORKED}\n{FORKED}\nNone\n", "")
