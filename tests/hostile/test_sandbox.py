"""Attacks by an environment of class `process`: the sandbox prevents them, and without it they succeed."""

from __future__ import annotations

import logging
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
import pytest

from starpod.env_server.processes.child_process import ChildProcess
from starpod.env_server.processes.hosts import HostDied
from starpod.env_server.sandbox.sandbox import Sandbox
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.hostile import deprived, villain
from tests.hostile.conftest import HARMFUL, MEBIBYTE, VILLAIN, Target, bearer, starpod, target_server
from tests.support import ROOT, ServerProcess, gone, start_server
from tests.waiting import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp and Landlock are Linux's")

MODULE = str(Path(villain.__file__))
BELOW_TMP = any(os.path.abspath(path).startswith("/tmp/") for path in (sys.prefix, sys.base_prefix, MODULE, *sys.path))


@pytest.fixture(scope="module")
def unconfined() -> Iterator[Target]:
    """The control: what the same crimes do without a sandbox."""
    with target_server("--sandbox", "off", modules=HARMFUL) as attacked:
        yield attacked


def begin(stub: EnvironmentServiceStub, environment: str = "villain-v1", **options: object) -> str:
    request = pb.OpenRequest(environment_id=environment, seed=1, limits=pb.LimitOverrides(max_turns=0, max_actions=0))
    request.options.update(options)
    return str(stub.Open(request, metadata=bearer(VILLAIN), timeout=60).sessions[0].session_id)


def step(session: str, crime: str, index: int = 0) -> pb.StepRequest:
    return pb.StepRequest(session_id=session, epoch=1, step_index=index, actions=[pb.Action(text=crime)])


def act(stub: EnvironmentServiceStub, session: str, crime: str, index: int = 0) -> str:
    transition = stub.Step(step(session, crime, index), metadata=bearer(VILLAIN), timeout=60).transition
    return str(transition.info["result"])


def commit(stub: EnvironmentServiceStub, *crimes: str, environment: str = "villain-v1", **options: object) -> list[str]:
    """Return how far each crime succeeded, all in one session."""
    session = begin(stub, environment, **options)
    results = [act(stub, session, crime, index) for index, crime in enumerate(crimes)]
    stub.Close(pb.CloseRequest(session_ids=[session]), metadata=bearer(VILLAIN))
    return results


def user_of(stub: EnvironmentServiceStub, environment: str = "villain-v1") -> int:
    (status,) = commit(stub, "status", environment=environment)
    return int(re.search(r"Uid:\t(\d+)\t", status)[1])  # type: ignore[index]


def lose_session(target: Target, action: str) -> None:
    session = target.open("villain-v1").session_id
    assert target.fails("Step", step(session, action)) == "SESSION_LOST"
    target.close(session)


NO_RIGHT, NO_FILE = "PermissionError", "FileNotFoundError"
REFUSED = {
    "connect": [NO_RIGHT],
    "datagram": [NO_RIGHT],
    "local_socket": [NO_RIGHT],
    "ring": ["Operation not permitted"],
    "kill_parent": [NO_RIGHT],
    "kill_server": [NO_RIGHT],
    "kill_everybody": [NO_RIGHT],
    "read_server": [NO_RIGHT, NO_FILE],
    "trace_server": ["Operation not permitted"],
    "use_objects": ["Operation not permitted, Permission denied"],
    "starve_server": [NO_RIGHT],
    "move_server": [NO_RIGHT],
    "read_file": [NO_RIGHT, NO_FILE],
    "write_file": [NO_RIGHT, NO_FILE],
    # A separate root has a read-only /tmp only if Python or the module is in it.
    "write_temporary": [NO_RIGHT, "EROFS" if BELOW_TMP else NO_FILE],
    "list_root": [NO_RIGHT],
    "change_mode": [NO_RIGHT],
    "change_open_file": [NO_RIGHT],
    "change_owner": [NO_RIGHT],
    "change_times": [NO_RIGHT],
    "change_attributes": [NO_RIGHT],
    "list_attributes": [NO_RIGHT],
    "change_flags": [NO_RIGHT],
    "watch_files": ["Operation not permitted"],
    "watch_folder": [NO_RIGHT],
    "truncate": [NO_RIGHT],
    "change_by_new_calls": ["EPERM EPERM EPERM ENOSYS"],
    "fork_bomb": [NO_RIGHT],
    "program": [NO_RIGHT],
    "become_program": [NO_RIGHT],
    "memory_bomb": ["MemoryError"],
    "thread_bomb": ["bounded"],
    "raise_limits": ["ValueError"],
    "print_on": ["printed"],
    "secrets": ["nothing", NO_RIGHT],
}
if platform.machine() == "x86_64":
    REFUSED["change_by_other_numbers"] = ["Operation not permitted"]


def others_than_refused(crimes: Iterable[str], results: list[str]) -> dict[str, str]:
    return {crime: result for crime, result in zip(crimes, results, strict=True) if result not in REFUSED[crime]}


def test_crimes_are_refused_and_the_session_continues(target: Target, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret")
    logged, before = len(target.server.log), os.stat(MODULE)
    with target.unharmed():
        options = {"path": str(tokens), "port": target.server.port, "pid": target.server.pid}
        assert others_than_refused(REFUSED, commit(target.stub, *REFUSED, **options)) == {}
    assert tokens.read_text() == "secret"
    after = os.stat(MODULE)
    assert (after.st_mode, after.st_mtime, after.st_size) == (before.st_mode, before.st_mtime, before.st_size)
    assert "noise" not in target.server.log[logged:]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 alone has these calls")
def test_a_call_of_another_architecture_ends_the_process(target: Target) -> None:
    with target.unharmed():
        lose_session(target, "change_by_32_bits")


# --- as root and as another user ----------------------------------------------------------------------------------


NOBODY = "--reuid 65534 --regid 65534 --clear-groups"


def by_setpriv(options: str) -> list[str]:
    """Words before a command that run it with other rights, and let every user read Python wherever it is."""
    if os.geteuid() != 0:
        return []
    hidden = [path for path in (Path(sys.base_prefix), *Path(sys.base_prefix).parents) if path.stat().st_mode & 5 != 5]
    script = f'exec setpriv {options} "$@"'
    if hidden:  # each but what leads to Python is covered
        top, base = shlex.quote(str(hidden[-1])), shlex.quote(sys.base_prefix)
        script = (
            f"mount --bind {base} /mnt && mount -t tmpfs -o mode=755 none {top} && mkdir -p {base} && "
            f"mount --bind /mnt {base} && {script}"
        )
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


@pytest.fixture(scope="module", params=["as it is", "as nobody"])
def required(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server that confines in full, run by whoever runs the tests, and by a user without rights."""
    prefix = by_setpriv(NOBODY) if request.param == "as nobody" else []
    arguments = ("villain", MODULE, "--sandbox", "require", "--log-level", "info")
    tried = subprocess.run([*prefix, "unshare", "--user", "--mount", "true"], capture_output=True)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.decode()}")
    with start_server(*arguments, prefix=prefix, environment={"PYTHONDONTWRITEBYTECODE": "1"}) as server:
        yield server


@pytest.fixture
def stub(required: ServerProcess) -> Iterator[EnvironmentServiceStub]:
    with grpc.insecure_channel(required.address) as channel:
        yield EnvironmentServiceStub(channel)


def test_threads_of_a_session_are_bounded(stub: EnvironmentServiceStub) -> None:
    """3,000 could be had; and one session's do not count for another."""
    assert [0 < int(*commit(stub, "small_threads")) < 64 for _ in range(3)] == [True] * 3


def test_other_files_cannot_even_be_looked_at(stub: EnvironmentServiceStub, required: ServerProcess) -> None:
    looks = commit(stub, "look", "look_around", path="/etc/passwd", pid=required.pid)
    assert looks == [NO_FILE, "False"]


def test_metadata_cannot_be_changed_by_whoever_owns_the_files(stub: EnvironmentServiceStub, tmp_path: Path) -> None:
    """A key of mode 0600 became 0666."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.owner() != "root" or folder != Path("/tmp"):
            folder.chmod(0o755)
    key = tmp_path / "key"
    key.write_text("key")
    key.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(key, 65534, 65534)
    crimes = [crime for crime in REFUSED if crime.startswith(("change", "list_a", "watch"))]
    assert others_than_refused(crimes, commit(stub, *crimes, path=str(key))) == {}
    assert key.stat().st_mode & 0o777 == 0o600


def test_nothing_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    """The environment's process spins in native code and ignores signals."""
    arguments = ("villain", MODULE)
    with start_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        stub = EnvironmentServiceStub(channel)
        refused, _, process = act(stub, begin(stub), "outlive").partition(", ")
        assert refused == "Operation not permitted"
        os.kill(server.pid, signal.SIGKILL)  # alone: not its group
        server.process.wait()
        assert gone(int(process))


@pytest.mark.minutes
def test_the_crimes_would_succeed_without_a_sandbox(unconfined: Target, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = {"path": str(tokens), "port": listener.getsockname()[1], "pid": unconfined.server.pid}
        crimes = ("connect", "read_file", "write_file", "fork_bomb", "program")
        results = commit(unconfined.stub, *crimes, **options)
    assert results == ["connected", "secret", "written", "forked", "true"]


def test_only_the_standard_descriptors_and_its_line_are_open_and_rights_are_gone(target: Target) -> None:
    descriptors, status = commit(target.stub, "descriptors", "status")
    assert sorted(descriptors.split(",")) == ["/dev/null", "/dev/null", "/dev/null", "socket"]
    for line in ("CapEff:\t0000000000000000", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
        assert line in status


LIES = {
    "huge_frame": r"sent a bad reply: it says to have 4294967295 bytes",
    "endless_output": r"sent a bad reply: it says to have 4294967295 bytes",
    "nested_state": r"sent a bad reply: its bytes are not a reply",
    "nested_error": r"sent a bad reply: its bytes cannot be read",
    "wrong_types": r"sent a bad reply",
    "no_transition": r"sent no Transition",
    "text_for_transition": r"sent no Transition",
    "infinite_reward": r"sent a reward of inf",
    "endless_wait": r"sent an unknown kind of reply",
    "endless_replies": r"sent no Transition",
}


@pytest.mark.parametrize(("lie", "cause"), LIES.items())
def test_a_lying_environment_loses_only_its_own_session(target: Target, lie: str, cause: str) -> None:
    logged = len(target.server.log)
    with target.unharmed():
        lose_session(target, lie)
    assert re.search(cause, target.server.log[logged:]), target.server.log[logged:]


def test_an_error_without_end_is_cut_and_carries_no_escapes_into_the_log(target: Target) -> None:
    logged = len(target.server.log)
    with target.unharmed():
        session = target.open("boastful-v1").session_id
        with pytest.raises(Exception, match="boastful-v1: Step raised RuntimeError") as caught:
            target.stub.Step(step(session, "haha"), metadata=target.metadata)
        assert len(caught.value.details()) <= 2000  # type: ignore[attr-defined]
    assert "\x1b" not in target.server.log[logged:]


def test_what_was_applied_is_logged(target: Target) -> None:
    commit(target.stub, "status")
    line = next(line for line in target.server.log.splitlines() if "sandbox of villain-v1" in line)
    layers = "environment variables, no capabilities, memory, files, signals, network, processes, threads"
    for layer in layers.split(", "):
        assert re.search(rf"applied: .*\b{layer}\b.*; missing", line), line


def test_describe_reports_the_sandbox(target: Target) -> None:
    """`describe` reports before the first session, with the parts that are missing."""
    response = target.stub.Describe(pb.DescribeRequest(), metadata=target.metadata)
    specs = {spec.id: spec for spec in response.environments}
    villain_, lacking = specs["villain-v1"].confinement, specs["without_landlock-v1"].confinement
    assert (villain_.mode, list(villain_.missing)) == ("best-effort", [])
    assert {"network", "files", "threads", "metadata of files"} <= set(villain_.applied)
    assert list(lacking.missing) == ["files (Landlock: Function not implemented)"]
    assert not specs["walk-v1"].HasField("confinement")


@pytest.mark.minutes
def test_without_a_sandbox_describe_says_so(unconfined: Target) -> None:
    request = pb.DescribeRequest(environment_id="villain-v1")
    spec = unconfined.stub.Describe(request, metadata=unconfined.metadata).environments[0]
    assert (spec.confinement.mode, list(spec.confinement.applied)) == ("off", [])
    assert "sandbox: off" in unconfined.server.log


def test_what_holds_is_shown_by_the_command_line(required: ServerProcess) -> None:
    shown = starpod("describe", required.address, "villain")
    assert re.search(r"Confined\s+require; holds: .*names of\s+files", shown), shown
    assert "villain-v1 runs in its own processes, sandbox require" in starpod("list", required.address)


async def test_what_the_system_lacks_is_a_warning_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        await ChildProcess(deprived.WithoutLandlock, Sandbox("best-effort")).try_out()
    assert "missing: " in caplog.text
    assert "files (Landlock: Function not implemented)" in caplog.text
    with pytest.raises(HostDied, match=r"--sandbox require .*Landlock: Function"):
        await ChildProcess(deprived.WithoutLandlock, Sandbox("require")).try_out()


def refusal(environment: str, module: str, prefix: list[str]) -> str:
    """The error output of a server that refuses to start."""
    command = [*prefix, sys.executable, "-m", "starpod.cli.main", "serve", environment, "--port", "0"]
    result = subprocess.run(
        [*command, module, "--sandbox", "require"],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert "cannot be confined as --sandbox require asks" in result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.minutes
def test_a_server_that_cannot_confine_as_required_does_not_start() -> None:
    refusal("without_landlock", deprived.__file__, [])


# --- as in a container --------------------------------------------------------------------------------------------

CONTAINER_ROOT = "--inh-caps -all --no-new-privs --bounding-set -all"
NO_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --inh-caps -all --ambient-caps -all "$@"'


def test_a_user_of_a_usual_container_is_told_the_way_out() -> None:
    """Nothing limits threads without namespaces and capabilities."""
    prefix = ["unshare", "--user", "--map-user=65534", "--map-group=65534", "--keep-caps", "sh", "-c"]
    prefix += [NO_NAMESPACES, "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr}")
    said = refusal("villain", MODULE, prefix)
    assert re.search(r"threads \(.*; a server of root with CAP_SETUID, CAP_SETGID and CAP_KILL needs none", said), said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up some of its rights")
def test_root_of_a_container_with_three_rights_confines_as_required() -> None:
    """A server with SETUID and SETGID only could not end its processes, and ended itself."""
    assert "own user (without CAP_KILL" in refusal("villain", MODULE, by_setpriv(f"{CONTAINER_ROOT},+setuid,+setgid"))
    prefix = by_setpriv(f"{CONTAINER_ROOT},+setuid,+setgid,+kill")
    arguments = ("villain", MODULE, "--sandbox", "require")
    with (
        start_server(*arguments, prefix=prefix, environment={"PYTHONDONTWRITEBYTECODE": "1"}) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub = EnvironmentServiceStub(channel)
        assert [0 < int(*commit(stub, "small_threads")) < 64 for _ in range(3)] == [True] * 3
        assert user_of(stub) >= 1_000_000_000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_server_of_root_gives_each_process_a_user_of_its_own(target: Target) -> None:
    users = {user_of(target.stub, environment="own_user-v1") for _ in range(2)}
    assert len(users) == 2 and min(users) >= 1_000_000_000


async def test_where_threads_cannot_be_bounded_require_refuses() -> None:
    with pytest.raises(HostDied, match=r"--sandbox require asks: .*threads \("):
        await ChildProcess(deprived.WithoutNamespaces, Sandbox("require")).try_out()


async def test_closing_ends_a_confined_process() -> None:
    host = ChildProcess(deprived.OwnUser, Sandbox())
    await host.start()
    assert host._process is not None
    process = Path(f"/proc/{host._process.pid}")
    host.close()
    await eventually(lambda: not process.exists())


def test_memory_that_a_liar_can_take_of_the_server_is_bounded(target: Target) -> None:
    """Replies as large as they may be, in many sessions: each is gone once its session is."""
    with target.unharmed(memory=96 * MEBIBYTE):
        for _ in range(5):
            lose_session(target, "endless_replies")
