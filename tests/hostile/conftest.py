"""A server with two tenants, one hostile; and what must hold after whatever he did."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from starpod.cli.main import main
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import ROOT, ServerProcess, start_server
from tests.tools.check.refused import TABLE

Result = TypeVar("Result")
VILLAIN, WITNESS = "villain-token-0123456789", "witness-token-0123456789"
SERVICE = "/starpod.v1.EnvironmentService/"
MEBIBYTE = 2**20
KEPT_MIB = 64
"""So much more memory may a server keep after an attack."""
MEASUREMENTS = 3
"""How often work is measured at most. The first measurement within the bounds counts: other programs only add to it."""
PLAIN = ("env_server/troublesome",)
HARMFUL = (*PLAIN, "hostile/villain", "hostile/deprived")
GAMES = ("frozen_lake", "sokoban", "countdown", "sudoku")
WALK = ("Left", "Right", "Right", "report", "Left")

CODES = {reason: code for reason, (code, _) in TABLE.items()}
"""What a caller may be told, by reason. Without a reason, by gRPC itself:"""
WITHOUT_REASON = {"INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}


OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn text around."""


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(2400):
        if condition():
            return
        time.sleep(0.025)
    raise AssertionError("it never came to that")


def memory_of(pid: int, field: str = "VmRSS") -> int:
    """Bytes of memory of a process, by a field of its status."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1024  # type: ignore[index]


def kept_memory(pid: int, before: int) -> float:
    """MiB of memory that a process has beyond `before`, once it had some seconds to give memory back."""
    for _ in range(40):
        if (kept := (memory_of(pid) - before) / MEBIBYTE) <= KEPT_MIB:
            break
        time.sleep(0.2)
    return kept


def loop_seconds(pid: int) -> float:
    """CPU time of the thread that runs a server's event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def work_unit() -> float:
    """CPU seconds that this machine needs now for what takes 1 ms on the machine of docs/operations.md.

    Bounds on work are multiples of it, so that a slower or busier machine has proportionally more time.
    """
    started = time.thread_time()
    json.loads(json.dumps([{"text": str(number), "index": number} for number in range(2_000)]))
    return time.thread_time() - started


def units_worked(pid: int, call: Callable[[], Result]) -> tuple[Result, float]:
    """The call's result, and the work of a server's event loop meanwhile, in units of `work_unit`."""
    unit, before = work_unit(), loop_seconds(pid)
    result = call()
    worked = loop_seconds(pid) - before
    return result, worked / max(unit, work_unit())


def units_allowed(size: int, calls: int) -> float:
    """Return what docs/operations.md allows a request of `size` bytes: so much for itself, each byte and each call."""
    return 50 + size / 1_000 + 0.15 * calls


def http_url(server: ServerProcess) -> str:
    """Return the URL of HTTP in the ready line."""
    return next(word.rstrip(",") for word in server.ready.split() if word.startswith("http"))


def status_class(error: grpc.RpcError) -> str:
    """The error's reason, or the code of one that gRPC made itself. Fails on anything that is not documented."""
    status = rpc_status.from_call(error)
    if status is None:
        code = error.code().name
        assert code in WITHOUT_REASON, error
        assert "Traceback" not in (error.details() or ""), error
        return str(code)
    return reason_of(status)


def reason_of(status: object) -> str:
    """The reason of a google.rpc.Status, checked against the table."""
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info), status  # type: ignore[attr-defined]
    code = next(code.name for code in grpc.StatusCode if code.value[0] == status.code)  # type: ignore[attr-defined]
    assert CODES.get(info.reason) == code, status
    text = str(status)
    assert "Traceback" not in text, text
    assert not re.search(r'File \\?"', text), text
    return info.reason


def starpod(*arguments: str, typed: str = "", status: int = 0) -> str:
    """Return the command's standard output and error. Neither is a terminal: escapes come from environments."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "stdin", io.StringIO(typed))
        patch.setattr(sys, "argv", list(sys.argv))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    assert ended.value.code == status, err.getvalue()
    for stream in (out.getvalue(), err.getvalue()):
        assert not OBEYED.search(stream), repr(OBEYED.search(stream))
        assert "Traceback" not in stream
    return out.getvalue() + err.getvalue()


class Witness:
    """Another tenant's session. Each look plays one more turn, which must be what an undisturbed session has."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = EnvironmentServiceStub(channel)
        self._metadata = bearer(WITNESS)
        self._begin()

    def _begin(self) -> None:
        # The lease outlasts the whole run: on a slow machine minutes may pass between two looks.
        opening = pb.OpenRequest(environment_id="walk-v1", seed=11, dynamics_seed=12, count=2, lease_seconds=80_000)
        opening.want.state_key = True
        twins = self._stub.Open(opening, metadata=self._metadata).sessions
        self.session_id, self._turns = twins[0].session_id, 0
        self._expected = [self._play(twins[1].session_id, turn) for turn in range(100)]

    def _play(self, session_id: str, turn: int) -> pb.Transition:
        action = pb.Action(text=WALK[turn % len(WALK)])
        step = pb.StepRequest(session_id=session_id, epoch=1, step_index=turn, actions=[action])
        return self._stub.Step(step, metadata=self._metadata, timeout=60).transition

    def look(self) -> None:
        assert self._play(self.session_id, self._turns) == self._expected[self._turns]
        self._turns += 1
        if self._turns == len(self._expected):
            self._begin()


class Target:
    """The server under attack. `stub` and `call` are the villain's; `session` is one of his own."""

    def __init__(self, server: ServerProcess, channel: grpc.Channel) -> None:
        self.server = server
        self.channel = channel
        self.stub = EnvironmentServiceStub(channel)
        self.metadata = bearer(VILLAIN)
        self.witness = Witness(channel)

    def open(self, environment: str = "walk-v1", **fields: object) -> pb.Session:
        request = pb.OpenRequest(environment_id=environment, **{"seed": 1, **fields})  # type: ignore[arg-type]
        return self.stub.Open(request, metadata=self.metadata, timeout=60).sessions[0]

    def close(self, *session_ids: str) -> None:
        self.stub.Close(pb.CloseRequest(session_ids=session_ids), metadata=self.metadata)

    def fails(self, method: str, request: object, **call: object) -> str:
        """The class of the error that a call must have."""
        with pytest.raises(grpc.RpcError) as caught:
            getattr(self.stub, method)(request, **{"metadata": self.metadata, "timeout": 60, **call})
        return status_class(caught.value)

    def raw(self, method: str) -> Callable[..., bytes]:
        """A unary method that takes and gives bytes as they are."""
        return self.channel.unary_unary(SERVICE + method)

    def raw_stream(self) -> Callable[..., Iterator[bytes]]:
        return self.channel.stream_stream(SERVICE + "Stream")

    @property
    def url(self) -> str:
        """URL of the HTTP transport."""
        return http_url(self.server)

    @contextlib.contextmanager
    def unharmed(self, *, memory: int = 64 * MEBIBYTE) -> Iterator[None]:
        """Check that an attack leaves the server alive, the witness's episode right, no bug logged, memory bounded."""
        Path(f"/proc/{self.server.pid}/clear_refs").write_text("5")  # VmHWM starts from here
        before, said = memory_of(self.server.pid), len(self.server.log)
        yield
        assert self.server.process.poll() is None, self.server.log[-2000:]
        self.witness.look()
        more = memory_of(self.server.pid, "VmHWM") - before
        assert more <= memory, f"{more / MEBIBYTE:.0f} MiB more"
        assert "server bug" not in self.server.log[said:], self.server.log[said:][-4000:]


@contextlib.contextmanager
def guarded_server(*arguments: str, modules: Iterable[str] = PLAIN) -> Iterator[ServerProcess]:
    """A server with a token for the villain and one for the witness."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens")
        tokens.write_text(f"{VILLAIN} name=villain\n{WITNESS} name=witness\n")
        files = [str(ROOT / "tests" / f"{name}.py") for name in modules]
        variables = {"STARPOD_TEST_SECRET": "hunter2"}
        with start_server("bandit", *files, "--token-file", str(tokens), *arguments, environment=variables) as server:
            yield server


@contextlib.contextmanager
def target_server(*arguments: str, modules: Iterable[str] = PLAIN) -> Iterator[Target]:
    """A server with low limits."""
    limits = ("--max-group", "64", "--max-sessions", "2000", "--max-message-bytes", str(4 * MEBIBYTE))
    more = ("--sandbox-memory", "512", "--log-level", "info", *limits, *arguments)
    with guarded_server(*more, modules=modules) as server:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(server.address, options=options) as channel:
            yield Target(server, channel)


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    """One for all tests: whatever an attack leaves behind is there for the next."""
    with target_server(*GAMES, "--http", "0", "--mcp", "--ors-server", modules=HARMFUL) as attacked:
        yield attacked


@pytest.fixture(scope="session")
def attacked() -> Iterator[ServerProcess]:
    """A server with the default limits, for tests of work and memory."""
    with guarded_server(*GAMES, "--http", "0", modules=(*PLAIN, "hostile/hanging")) as server:
        yield server
