"""Class `process`: however an environment dies, it costs its own session alone, and is reported as what it was."""

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from starpod.env_server.config import ServerLimits
from starpod.env_server.process_host import ProcessHost
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Serve, text_of
from tests.env_server.troublesome import Uncopied
from tests.waiting import eventually


def fork_of(session: pb.Session, index: int = 0) -> pb.ForkRequest:
    return pb.ForkRequest(session_id=session.session_id, epoch=1, step_index=index)


async def test_an_environment_that_stood_still_with_its_server_is_not_hung(client: Client) -> None:
    session = await client.open("fragile-v1")
    host = client.table[session.session_id].host
    assert isinstance(host, ProcessHost) and host._process is not None
    host._timeout = 1.0
    os.kill(host._process.pid, signal.SIGSTOP)
    step = asyncio.create_task(client.step(session, 0, "fine"))
    await client.pending(session, 1)
    await asyncio.sleep(0.1)  # it waits for its environment
    time.sleep(1.5)
    os.kill(host._process.pid, signal.SIGCONT)
    await step


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("exit", "its environment process exited with status 7"),
        ("segfault", "its environment process was killed by SIGSEGV"),
        ("hang", "its environment process hung: no answer to turn within 1.5 s, so it was killed"),
    ],
)
async def test_a_death_costs_its_own_session_alone(client: Client, action: str, cause: str) -> None:
    response = await client.stub.Open(pb.OpenRequest(environment_id="fragile-v1", seed=2, count=3))
    doomed, *others = response.sessions
    if action == "hang":
        client.table[doomed.session_id].host._timeout = 1.5
    failing = asyncio.create_task(client.fails(client.step(doomed, 0, action)))
    turns = [await client.step(other, index, "fine") for other in others for index in range(3)]
    failure = await failing
    assert (failure.code, failure.reason, failure.metadata) == (
        "DATA_LOSS",
        "SESSION_LOST",
        {"cause": cause, "advice": "reopen"},
    )
    assert (await client.fails(client.step(doomed, 0, "fine"))).metadata["cause"] == cause
    again = await client.open("fragile-v1", seed=2, dynamics_seed=others[0].dynamics_seed)
    assert [await client.step(again, index, "fine") for index in range(3)] == turns[:3]


@pytest.mark.parametrize(
    ("environment", "action", "exception"),
    [
        ("fragile-v1", "raise", "KeyError"),
        ("vast-v1", "talk", "TooLarge"),  # a text too large to leave its process
    ],
)
async def test_an_exception_is_a_bug_of_the_environment(
    client: Client, environment: str, action: str, exception: str
) -> None:
    session = await client.open(environment)
    failure = await client.fails(client.step(session, 0, action))
    assert (failure.reason, failure.metadata["session"]) == ("ENVIRONMENT_BUG", "lost")
    assert failure.metadata["exception"] == exception


async def test_a_process_killed_from_outside_is_noticed(client: Client) -> None:
    session = await client.open("fragile-v1")
    pid = int((await client.step(session, 0, "pid")).info["pid"])
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)
    failure = await client.fails(client.step(session, 1, "fine"))
    assert failure.metadata["cause"] == "its environment process was killed by SIGKILL"


async def test_closing_ends_the_process(client: Client) -> None:
    session = await client.open("fragile-v1")
    pid = int((await client.step(session, 0, "pid")).info["pid"])
    await client.stub.Close(pb.CloseRequest(session_ids=[session.session_id]))
    await eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    assert ProcessHost.alive == 0


async def test_processes_are_bounded(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_processes=2))
    sessions = [await client.open("fragile-v1") for _ in range(2)]
    failure = await client.fails(client.open("fragile-v1"))
    assert (failure.reason, failure.metadata["limit"]) == ("OVERLOADED", "max_processes")
    assert (await client.fails(client.stub.Fork(fork_of(sessions[0])))).metadata["limit"] == "max_processes"
    await client.open("walk-v1")
    await client.stub.Close(pb.CloseRequest(session_ids=[sessions[0].session_id]))
    await client.open("fragile-v1")


async def test_process_and_reset(client: Client) -> None:
    session = await client.open("fragile-v1", seed=5)
    first = await client.step(session, 0, "fine")
    reset = pb.ResetRequest(session_id=session.session_id, epoch=1, seed=5, dynamics_seed=session.dynamics_seed)
    again = (await client.stub.Reset(reset)).session
    assert text_of(again) == text_of(session)
    assert await client.step(again, 0, "fine", epoch=2) == first
    render = await client.stub.Render(pb.RenderRequest(session_id=session.session_id))
    assert render.data.decode() == text_of(first)


@pytest.mark.parametrize(
    ("dies", "cause"),
    [
        ("made", "the copy's process exited with status 3"),
        ("hung", "the copy's process hung: no answer to load within 1.5 s, so it was killed"),
        ("shown", "the copy's process exited with status 4"),
    ],
)
async def test_a_copy_that_dies_leaves_its_original_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch, dies: str, cause: str
) -> None:
    session = await client.open("uncopied-v1", options={"dies": dies})
    await client.step(session, 0, "fine")
    if dies == "hung":
        monkeypatch.setattr(Uncopied, "spec", replace(Uncopied.spec, step_timeout=1.5))  # for the copy alone
    failure = await client.fails(client.stub.Fork(fork_of(session, 1)))
    assert (failure.reason, failure.metadata["session"]) == ("ENVIRONMENT_BUG", "intact")
    assert cause in failure.message
    assert (await client.step(session, 1, "fine")).reward == 1.0
    assert ProcessHost.alive == 1


async def test_calls_at_once_cannot_exceed_the_limit_of_processes(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_processes=3))
    calls = [client.open("fragile-v1") for _ in range(5)]
    opened = await asyncio.gather(*calls, return_exceptions=True)
    sessions = [each for each in opened if isinstance(each, pb.Session)]
    assert len(sessions) == ProcessHost.alive == 3
    await client.stub.Close(pb.CloseRequest(session_ids=[sessions.pop().session_id]))
    forks = await asyncio.gather(*(client.stub.Fork(fork_of(each)) for each in sessions), return_exceptions=True)
    assert sum(isinstance(each, pb.ForkResponse) for each in forks) == 1
    assert ProcessHost.alive == 3


async def test_a_state_too_large_to_leave_its_process_costs_nothing(client: Client) -> None:
    session = await client.open("vast-v1")
    await client.step(session, 0, "grow")
    for call in (
        client.stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id)),
        client.stub.Fork(fork_of(session, 1)),
    ):
        failure = await client.fails(call)
        assert (failure.reason, failure.metadata["limit"]) == ("TOO_LARGE", "max_snapshot_bytes")
        assert "at most 67108863 leave an environment's process" in failure.message
    assert (await client.step(session, 1, "fine")).reward == 1.0
