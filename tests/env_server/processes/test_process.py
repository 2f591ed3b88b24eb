"""Class `process`: a dying environment only loses its own session, and the cause is reported."""

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from starpod.env_server.operation.config import ServerLimits
from starpod.env_server.processes.child_process import ChildProcess
from starpod.env_server.processes.process_host import ProcessHost
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Serve, text_of
from tests.env_server.troublesome import Uncopied
from tests.waiting import eventually


async def test_an_environment_that_was_paused_with_its_server_is_not_hung(client: Client) -> None:
    session = await client.open("fragile-v1")
    host = client.table[session.session_id].host
    assert isinstance(host, ProcessHost) and host._child._process is not None
    host._child._timeout = 1.0
    os.kill(host._child._process.pid, signal.SIGSTOP)
    step = asyncio.create_task(client.step(session, 0, "fine"))
    await client.pending(session, 1)
    await asyncio.sleep(0.1)  # it waits for its environment
    time.sleep(1.2)
    await asyncio.sleep(0.05)  # by now the server has seen that the time is up
    os.kill(host._child._process.pid, signal.SIGCONT)
    await step


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("exit", "exited with status 7"),
        ("segfault", "was killed by SIGSEGV"),
        ("hang", "hung: no answer to turn within 0.5 s, so it was killed"),
        ("", "was killed by SIGKILL"),
    ],
)
async def test_a_death_costs_its_own_session_alone(client: Client, action: str, cause: str) -> None:
    doomed, *others = await client.group("fragile-v1", 3, seed=2)
    host = client.table[doomed.session_id].host
    assert isinstance(host, ProcessHost) and host._child._process is not None
    if action == "hang":
        host._child._timeout = 0.5
    if not action:
        os.kill(host._child._process.pid, signal.SIGKILL)  # from outside
    failing = asyncio.create_task(client.fails(client.step(doomed, 0, action or "fine")))
    turns = [await client.step(other, index, "fine") for other in others for index in range(3)]
    failure = await failing
    assert (failure.code, failure.reason) == ("DATA_LOSS", "SESSION_LOST")
    assert failure.metadata == {"cause": f"its environment process {cause}", "advice": "reopen"}
    assert (await client.fails(client.step(doomed, 0, "fine"))).metadata == failure.metadata
    again = await client.open("fragile-v1", seed=2, dynamics_seed=others[0].dynamics_seed)
    assert [await client.step(again, index, "fine") for index in range(3)] == turns[:3]


async def test_processes_are_bounded_and_end_with_their_sessions(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_processes=2))
    first, second = [await client.open("fragile-v1") for _ in range(2)]
    pid = int((await client.step(first, 0, "pid")).info["pid"])
    assert pid != os.getpid()
    for call in (client.open("fragile-v1"), client.fork(second)):
        assert (await client.fails(call)).limit == ("OVERLOADED", "max_processes")
    await client.open("walk-v1")
    await client.close(first)
    await eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    assert ChildProcess.alive == 1
    await client.open("fragile-v1")


async def test_calls_at_once_cannot_exceed_the_limit_of_processes(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_processes=3))
    opened = await asyncio.gather(*(client.open("fragile-v1") for _ in range(5)), return_exceptions=True)
    sessions = [each for each in opened if isinstance(each, pb.Session)]
    assert len(sessions) == ChildProcess.alive == 3
    await client.close(sessions.pop())
    forks = await asyncio.gather(*map(client.fork, sessions), return_exceptions=True)
    assert sum(not isinstance(each, BaseException) for each in forks) == 1
    assert ChildProcess.alive == 3


async def test_process_and_reset(client: Client) -> None:
    session = await client.open("fragile-v1", seed=5)
    first = await client.step(session, 0, "fine")
    again = (await client.ask("Reset", session, epoch=1, seed=5, dynamics_seed=session.dynamics_seed)).session
    assert text_of(again) == text_of(session)
    assert await client.step(again, 0, "fine", epoch=2) == first
    assert (await client.ask("Render", session)).data.decode() == text_of(first)


@pytest.mark.parametrize(
    ("dies", "cause"),
    [
        ("made", "exited with status 3"),
        ("hung", "hung: no answer to load within 1.5 s, so it was killed"),
        ("shown", "exited with status 4"),
    ],
)
async def test_a_copy_that_dies_leaves_its_original_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch, dies: str, cause: str
) -> None:
    session = await client.open("uncopied-v1", options={"dies": dies})
    await client.step(session, 0, "fine")
    if dies == "hung":
        monkeypatch.setattr(Uncopied, "spec", replace(Uncopied.spec, step_timeout=1.5))  # for the copy alone
    failure = await client.fails(client.fork(session, 1))
    assert (failure.reason, failure.metadata["session"]) == ("ENVIRONMENT_BUG", "intact")
    assert f"the copy's process {cause}" in failure.message
    assert (await client.step(session, 1, "fine")).reward == 1.0
    assert ChildProcess.alive == 1


async def test_a_state_too_large_to_leave_its_process_costs_nothing(client: Client) -> None:
    session = await client.open("fragile-v1")
    await client.step(session, 0, "grow")
    for call in (client.snapshot(session), client.fork(session, 1)):
        failure = await client.fails(call)
        assert failure.limit == ("TOO_LARGE", "max_snapshot_bytes")
        assert "at most 67108863 leave an environment's process" in failure.message
    await client.step(session, 1, "fine")
