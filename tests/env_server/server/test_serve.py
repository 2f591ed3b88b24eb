"""`starpod serve` as processes: workers, crashes, signals, wrong calls."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import grpc
import httpx
import pytest

from starpod.env_server import cli
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import children_of, gone, start_server

TROUBLESOME = str(Path(__file__).parents[1] / "troublesome.py")


def ask(address: str, method: str, **fields: Any) -> Any:
    """The reply to a call of the contract by its name, as soon as a server is there."""
    with grpc.insecure_channel(address) as channel:
        call = getattr(EnvironmentServiceStub(channel), method)
        return call(getattr(pb, f"{method}Request")(**fields), timeout=60, wait_for_ready=True)


def opened(address: str, environment: str) -> pb.Session:
    (session,) = ask(address, "Open", environment_id=environment, seed=1).sessions
    return session  # type: ignore[no-any-return]


def step(address: str, session: pb.Session, index: int, action: str) -> pb.Transition:
    actions = [pb.Action(text=action)]
    reply = ask(address, "Step", session_id=session.session_id, epoch=1, step_index=index, actions=actions)
    return reply.transition  # type: ignore[no-any-return]


def environment_file(folder: Path, members: str, setup: str = "") -> str:
    """A module of one environment, local-v1, with these members."""
    file = folder / "local.py"
    file.write_text(
        f"import os\nfrom dataclasses import replace\nfrom starpod.env_server import *\n{setup}\n"
        "class Local(Environment):\n"
        "    spec = EnvironmentSpec(id='local-v1', version='1.0.0', title='Local', grammar='anything')\n"
        "    def reset(self, rng): pass\n"
        "    def step(self, action): return Outcome()\n"
        "    def render(self, mode='text'): return os.environ.get('BOOKS', '')\n"
        f"    {members}\n"
    )
    return str(file)


def test_the_folder_of_an_exported_model_means_its_environments(tmp_path: Path) -> None:
    file = environment_file(tmp_path, "")
    (tmp_path / "starpod.json").write_text(json.dumps({"serve": ["local-v1", file]}))
    with start_server(str(tmp_path)) as server:
        assert [spec.id for spec in ask(server.address, "Describe").environments] == ["local-v1"]


def test_workers_know_each_other_come_back_and_end_with_their_supervisor() -> None:
    settings = ("--workers", "2", "--drain", "1", "--http", "0", "--ors-server")
    with start_server(TROUBLESOME, *settings) as server:
        url = next(word.rstrip(",") for word in server.ready.split() if word.startswith("http://"))
        over_http = httpx.get(f"{url}/v1/environments", trust_env=False).json()
        assert len(over_http["endpoints"]) == 2 and url == f"http://{over_http['endpoints'][0]}"
        second = httpx.get(f"http://{over_http['endpoints'][1]}/v1/environments", trust_env=False).json()
        assert second["instance_id"] != over_http["instance_id"] and second["endpoints"] == over_http["endpoints"]
        assert "walk-v1" in httpx.get(f"{url}/list_environments", trust_env=False).json()
        first = ask(server.address, "Describe")
        assert len(first.endpoints) == 2 and server.address in first.endpoints
        (other,) = set(first.endpoints) - {server.address}
        session = opened(other, "walk-v1")
        victim, *_ = children_of(server.pid)
        os.kill(victim, signal.SIGKILL)
        for index in range(20):
            step(other, session, index, "Right")
        again = ask(server.address, "Describe")
        assert again.instance_id != first.instance_id
        assert again.endpoints == first.endpoints
        workers = children_of(server.pid)
        assert len(workers) == 2
        os.kill(server.pid, signal.SIGKILL)  # the supervisor alone
        server.process.wait()
        assert all(gone(worker) for worker in workers)


@pytest.mark.parametrize("lock", ["CDLL", "PyDLL"])  # PyDLL keeps the interpreter's lock during the step
@pytest.mark.parametrize("workers", [(), ("--workers", "1")], ids=" ".join)
def test_a_server_ends_with_its_standard_input_even_in_a_step_of_minutes(
    tmp_path: Path, lock: str, workers: tuple[str, ...]
) -> None:
    file = environment_file(tmp_path, f"def step(self, action): ctypes.{lock}(None).sleep(600)", "import ctypes")
    with (
        start_server(file, *workers) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        session = opened(server.address, "local-v1")
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="go")])
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            EnvironmentServiceStub(channel).Step(step, timeout=0.5)
        family = [server.pid, *children_of(server.pid)]
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.wait(120)
        assert all(gone(member) for member in family)


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=" ".join)
def test_signals_and_what_environments_print(tmp_path: Path, workers: tuple[str, ...]) -> None:
    """A second SIGTERM ends the drain, whatever hangs on a thread. What is printed goes to standard error."""
    printing = "print('hello from an import')\nos.write(1, b'hello from below')"
    file = environment_file(tmp_path, "def step(self, action): print('word ' * 20_000); return Outcome()", printing)
    modules = (file, TROUBLESOME)
    with start_server(*modules, "--drain", "600", *workers) as server, grpc.insecure_channel(server.address) as channel:
        session = opened(server.address, "local-v1")
        for index in range(3):
            step(server.address, session, index, "go")
        assert all(said in server.log for said in ("hello from an import", "hello from below", "word word"))
        hanging = opened(server.address, "waiting-v1").session_id
        hang = pb.StepRequest(session_id=hanging, epoch=1, actions=[pb.Action(text="600000")])
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            EnvironmentServiceStub(channel).Step(hang, timeout=0.2)
        server.process.send_signal(signal.SIGTERM)
        while not ask(server.address, "Describe").draining:
            time.sleep(0.02)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0


def test_environment_processes_end_with_their_server() -> None:
    with start_server(TROUBLESOME) as server, grpc.insecure_channel(server.address) as channel:
        session = opened(server.address, "fragile-v1")
        pid = int(step(server.address, session, 0, "pid").info["pid"])
        hang = pb.StepRequest(session_id=session.session_id, epoch=1, step_index=1, actions=[pb.Action(text="hang")])
        EnvironmentServiceStub(channel).Step.future(hang)
        time.sleep(0.2)
        os.kill(server.pid, signal.SIGKILL)
        assert gone(pid)


LACKING = "prepare = classmethod(lambda cls: (_ for _ in ()).throw(Unavailable('no data; bring some')))"
LIBRARY = """@classmethod
    def use_stores(cls, stores):
        if 'burnt' in stores: raise Unavailable('the store burnt is no more; leave it out')
        os.environ['BOOKS'] = ' and '.join(stores)
        return True
"""


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["sokobann"], 2, "did you mean sokoban-v1"),
        (["missing.py"], 2, "no such file: missing.py"),
        (["tests/env_server/troublesom.py"], 2, "did you mean tests/env_server/troublesome.py"),
        (["tests/env_server/troublesome.py:Wlk"], 2, "troublesome.py defines no environment 'Wlk'; did you mean Walk"),
        (["gymnasum:CartPole-v1"], 2, "FAMILY:NAME with a family of gymnasium, "),
        (["127.0.0.1:1/bandit"], 2, "127.0.0.1:1/bandit is served already"),
        (["bandit", "--environment-module", "mine.py"], 2, "no such file: mine.py"),
        (["--environment-module=mine.py"], 2, "no such file: mine.py"),
        (["--host", "gymnasium:A-v1"], 2, "write starpod serve gymnasium:A-v1, without --host"),
        (["--host", "0.0.0.0:80"], 2, "write --host 0.0.0.0 --port 80"),
        (["--tls-key", "x"], 2, "--tls-certificate and --tls-key go together"),
        (["--lease", "0"], 2, "lease"),
        (["--max-snapshot-bytes", "33554432"], 2, "raise --max-message-bytes to 33619968"),
        (["bandit", "--store", "x=y"], 2, "--store: none of bandit-v1 uses stores"),
        (["bandit", "--token-file", "missing"], 1, "cannot read the token file"),
        (["--prot", "1"], 2, "--port"),
        (["LIBRARY", "--store", "burnt"], 2, "--store: the store burnt is no more; leave it out"),
        (["LACKING"], 2, "local-v1 cannot be served here: no data; bring some"),
    ],
)
def test_a_wrong_call_is_one_readable_line(
    arguments: list[str], status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "claim_output", io.StringIO)
    monkeypatch.setattr(cli, "configure_logs", lambda *_: None)
    if arguments[0] in ("LIBRARY", "LACKING"):
        members = LIBRARY if arguments[0] == "LIBRARY" else LACKING
        arguments = [environment_file(tmp_path, members), *arguments[1:]]
    with pytest.raises(click.ClickException) as refused:
        cli.serve.main(["--port", "0", *arguments], standalone_mode=False)
    assert refused.value.exit_code == status
    assert message in refused.value.format_message() and "\n" not in refused.value.format_message()


def test_all_workers_together_say_once_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "starpod.env_server", "--port", "0", "--workers", "3"]
    command += [environment_file(tmp_path, LACKING)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "starpod: local-v1 cannot be served here: no data; bring some\n"


def test_stores_reach_the_processes_of_environments_that_use_them(tmp_path: Path) -> None:
    file = environment_file(tmp_path, f"{LIBRARY}    spec = replace(spec, concurrency=Concurrency.PROCESS)")
    stores = ("--store", "poems", "--store", "plays")
    with start_server(file, "--sandbox", "off", *stores) as server:
        assert opened(server.address, "local-v1").observation.parts[0].text == "poems and plays"
