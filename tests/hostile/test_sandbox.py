"""What an environment of class `process` cannot do, though it tries; and that it could without the sandbox."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from starpod.env_server.hosts import HostDied
from starpod.env_server.process_host import ProcessHost
from starpod.env_server.sandbox import Sandbox
from starpod.v1 import environment_pb2 as pb
from tests.hostile import villain
from tests.hostile.conftest import MEBIBYTE, Target, target_server
from tests.support import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp and Landlock are Linux's")

MODULE = str(Path(villain.__file__))


@pytest.fixture(scope="module")
def unconfined() -> Iterator[Target]:
    """The control: what the same crimes do without a sandbox."""
    with target_server("--sandbox", "off") as attacked:
        yield attacked


def commit(target: Target, crime: str, environment: str = "villain-v1", **options: object) -> str:
    """How far a crime came."""
    request = pb.OpenRequest(environment_id=environment, seed=1)
    request.options.update(options)
    session = target.stub.Open(request, metadata=target.metadata, timeout=60).sessions[0]
    step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text=crime)])
    try:
        transition = target.stub.Step(step, metadata=target.metadata, timeout=60).transition
    finally:
        target.close(session.session_id)
    return str(transition.info["result"])


REFUSED = {
    "connect": "PermissionError",
    "datagram": "PermissionError",
    "local_socket": "PermissionError",
    "ring": "Operation not permitted",
    "kill_parent": "PermissionError",
    "kill_server": "PermissionError",
    "kill_everybody": "PermissionError",
    "read_server": "PermissionError",
    "trace_server": "Operation not permitted",
    "starve_server": "PermissionError",
    "read_file": "PermissionError",
    "write_file": "PermissionError",
    "write_temporary": "PermissionError",
    "list_root": "PermissionError",
    "fork_bomb": "PermissionError",
    "program": "PermissionError",
    "become_program": "PermissionError",
    "memory_bomb": "MemoryError",
    "thread_bomb": "bounded",
    "raise_limits": "ValueError",
    "print_on": "printed",
    "secrets": "nothing",
}


@pytest.mark.parametrize(("crime", "result"), REFUSED.items())
def test_a_crime_is_refused_and_the_session_goes_on(target: Target, tmp_path: Path, crime: str, result: str) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret")
    logged = len(target.server.log)
    with target.unharmed():
        assert commit(target, crime, path=str(tokens), port=target.server.port, pid=target.server.pid) == result
    assert tokens.read_text() == "secret"
    assert "noise" not in target.server.log[logged:]


@pytest.mark.minutes
def test_the_crimes_would_succeed_without_a_sandbox(unconfined: Target, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret")
    listener = socket.create_server(("127.0.0.1", 0))
    options = {"path": str(tokens), "port": listener.getsockname()[1], "pid": unconfined.server.pid}
    with listener:
        assert commit(unconfined, "connect", **options) == "connected"
    assert commit(unconfined, "read_file", **options) == "secret"
    assert commit(unconfined, "write_file", **options) == "written"
    assert commit(unconfined, "fork_bomb", **options) == "forked"
    assert commit(unconfined, "program", **options) == "true"


def test_only_the_standard_descriptors_and_its_line_are_open(target: Target) -> None:
    assert sorted(commit(target, "descriptors").split(",")) == ["/dev/null", "/dev/null", "/dev/null", "socket"]


def test_rights_are_gone(target: Target) -> None:
    status = commit(target, "status")
    for line in ("CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
        assert line in status


LIES = {
    "huge_frame": r"sent a bad reply: it says to have 4294967295 bytes",
    "endless_output": r"sent a bad reply: it says to have 4294967295 bytes",
    "nested_state": r"sent a bad reply: its bytes are no reply",
    "nested_error": r"sent a bad reply: its bytes cannot be read",
    "wrong_types": r"sent a bad reply",
    "no_transition": r"sent no Transition",
    "text_for_transition": r"sent no Transition",
    "infinite_reward": r"sent a reward of inf",
    "endless_wait": r"sent an unknown kind of reply",
    "endless_replies": r"sent no Transition",
}


@pytest.mark.parametrize(("lie", "cause"), LIES.items())
def test_a_lie_costs_the_liar_his_session_alone(target: Target, lie: str, cause: str) -> None:
    logged = len(target.server.log)
    with target.unharmed():
        session = target.open("villain-v1")
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text=lie)])
        assert target.fails("Step", step) == "SESSION_LOST"
        target.close(session.session_id)
    assert re.search(cause, target.server.log[logged:]), target.server.log[logged:]


def test_an_error_without_end_is_cut_and_carries_no_escapes_into_the_log(target: Target) -> None:
    logged = len(target.server.log)
    with target.unharmed():
        session = target.open("boastful-v1")
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="haha")])
        with pytest.raises(Exception, match="boastful-v1 raised RuntimeError") as caught:
            target.stub.Step(step, metadata=target.metadata)
        assert len(caught.value.details()) <= 2000  # type: ignore[attr-defined]
    assert "\x1b" not in target.server.log[logged:]


def test_what_was_applied_is_logged(target: Target) -> None:
    commit(target, "status")
    line = next(line for line in target.server.log.splitlines() if "sandbox of villain-v1" in line)
    for layer in ("environment variables", "no capabilities", "memory", "files", "signals", "network", "processes"):
        assert re.search(rf"applied: .*\b{layer}\b.*; missing", line), line


async def test_what_the_system_lacks_is_a_warning_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await ProcessHost(villain.WithoutLandlock, Sandbox("best-effort")).try_out()
    assert "missing: " in caplog.text
    assert "files (Landlock: Function not implemented)" in caplog.text
    with pytest.raises(HostDied, match=r"--sandbox require asks: .*files \(Landlock: Function not implemented\)"):
        await ProcessHost(villain.WithoutLandlock, Sandbox("require")).try_out()


@pytest.mark.minutes
def test_a_server_that_cannot_confine_as_required_does_not_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "starpod.cli.main", "serve", "without_landlock", "--port", "0"]
    result = subprocess.run(
        [*command, "--environment-module", MODULE, "--sandbox", "require"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "cannot be confined as --sandbox require asks" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_server_of_root_gives_each_process_a_user_of_its_own(target: Target) -> None:
    uids = {re.search(r"Uid:\t(\d+)\t", commit(target, "status", "own_user-v1"))[1] for _ in range(2)}  # type: ignore[index]
    assert len(uids) == 2
    assert min(map(int, uids)) >= 1_000_000_000


async def test_closing_ends_a_confined_process() -> None:
    host = ProcessHost(villain.OwnUser, Sandbox())
    await host._start()
    assert host._process is not None
    pid = host._process.pid
    host.close()
    for _ in range(1500):
        if not Path(f"/proc/{pid}").exists():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it lives on")


def test_memory_that_a_liar_can_take_of_the_server_is_bounded(target: Target) -> None:
    """Replies as large as they may be, in many sessions: each is gone once its session is."""
    with target.unharmed(memory=96 * MEBIBYTE):
        for _ in range(5):
            session = target.open("villain-v1")
            step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="endless_replies")])
            target.fails("Step", step)
            target.close(session.session_id)
