"""`starpod serve` as processes: workers, crashes, signals, wrong calls."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.support import ROOT, children_of, gone, start_server

TROUBLESOME = str(Path(__file__).with_name("troublesome.py"))
WORKERS = pytest.mark.parametrize("workers", [(), ("--workers", "1"), ("--workers", "2")], ids=" ".join)
"""One process, one that is supervised, two of them."""


def describe(address: str) -> pb.DescribeResponse:
    with grpc.insecure_channel(address) as channel:
        return EnvironmentServiceStub(channel).Describe(pb.DescribeRequest(), timeout=60, wait_for_ready=True)


def test_workers_know_each_other_and_a_crashed_one_comes_back() -> None:
    with start_server("--environment-module", TROUBLESOME, "--workers", "2") as server:
        first = describe(server.address)
        assert len(first.endpoints) == 2 and server.address in first.endpoints
        other_address = next(address for address in first.endpoints if address != server.address)
        with grpc.insecure_channel(other_address) as channel:
            stub = EnvironmentServiceStub(channel)
            session = stub.Open(pb.OpenRequest(environment_id="walk-v1", seed=1)).sessions[0]
            victim, *_ = children_of(server.process.pid)
            os.kill(victim, signal.SIGKILL)
            step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="Right")])
            for index in range(20):
                step.step_index = index
                stub.Step(step, timeout=30)
                time.sleep(0.01)
        for _ in range(1500):
            try:
                again = describe(server.address)
                break
            except grpc.RpcError:
                time.sleep(0.02)
        assert again.instance_id != first.instance_id
        assert again.endpoints == first.endpoints


def test_workers_end_with_their_supervisor_however_it_ends() -> None:
    with start_server("--environment-module", TROUBLESOME, "--workers", "2", "--drain", "1") as server:
        workers = children_of(server.process.pid)
        assert len(workers) == 2
        os.kill(server.process.pid, signal.SIGKILL)  # the supervisor alone
        server.process.wait()
        assert all(gone(worker) for worker in workers)


@WORKERS
def test_a_server_may_end_with_its_standard_input(workers: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "starpod.env_server", "bandit-v1", "--port", "0", *workers]
    pipe = subprocess.PIPE
    for words in (["--end-with-stdin"], []):
        with subprocess.Popen([*command, *words], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline().startswith("Serving bandit-v1")
            workers_of_it = children_of(process.pid) if workers else []
            process.stdin.close()
            if words:
                assert process.wait(60) == 0
                assert all(gone(each) for each in workers_of_it)
            else:
                time.sleep(0.5)
                assert process.poll() is None
                process.terminate()


@WORKERS
def test_sigterm_drains_and_a_second_signal_does_not_wait(workers: tuple[str, ...]) -> None:
    with start_server("--environment-module", TROUBLESOME, "--drain", "600", *workers) as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = EnvironmentServiceStub(channel)
            stub.Open(pb.OpenRequest(environment_id="walk-v1"))
            server.process.send_signal(signal.SIGTERM)
            for _ in range(1500):
                if stub.Describe(pb.DescribeRequest()).draining:
                    break
                time.sleep(0.02)
            assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_a_thread_that_hangs_does_not_keep_the_server() -> None:
    with start_server("--environment-module", TROUBLESOME, "--drain", "0") as server:
        channel = grpc.insecure_channel(server.address)
        stub = EnvironmentServiceStub(channel)
        session = stub.Open(pb.OpenRequest(environment_id="waiting-v1")).sessions[0]
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="600000")])
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            stub.Step(step, timeout=0.2)
        assert server.terminate() == 0
        channel.close()


@WORKERS
def test_what_environments_print_goes_to_standard_error(tmp_path: Path, workers: tuple[str, ...]) -> None:
    file = tmp_path / "talking.py"
    file.write_text(
        "import os\n"
        "from starpod.env_server import Environment, EnvironmentSpec, Outcome\n"
        "print('hello from an import')\n"
        "os.write(1, b'hello from below')\n"
        "class Talking(Environment):\n"
        "    spec = EnvironmentSpec(id='talking-v1', version='1.0.0', title='Talking', grammar='anything')\n"
        "    def reset(self, rng): pass\n"
        "    def step(self, action): print('word ' * 20_000); return Outcome()\n"
        "    def render(self, mode='text'): return ''\n"
    )
    with start_server("--environment-module", str(file), *workers) as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = EnvironmentServiceStub(channel)
            session = stub.Open(pb.OpenRequest(environment_id="talking-v1")).sessions[0]
            step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="go")])
            for step.step_index in range(3):
                stub.Step(step, timeout=60)
        assert all(said in server.log for said in ("hello from an import", "hello from below", "word word"))


def test_environment_processes_end_with_their_server() -> None:
    with start_server("--environment-module", TROUBLESOME) as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = EnvironmentServiceStub(channel)
            session = stub.Open(pb.OpenRequest(environment_id="fragile-v1")).sessions[0]
            step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=[pb.Action(text="pid")])
            pid = int(stub.Step(step).transition.info["pid"])
            step.step_index, step.actions[0].text = 1, "hang"
            stub.Step.future(step)
            time.sleep(0.2)
            os.kill(server.process.pid, signal.SIGKILL)
        assert gone(pid)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["sokobann"], 2, "did you mean sokoban-v1"),
        (["--environment-module", "missing.py"], 2, "no such file: missing.py"),
        (["--environment-module", "no.such.module"], 2, "cannot import 'no.such.module'"),
        (["--tls-key", "x"], 2, "--tls-certificate and --tls-key go together"),
        (["--lease", "0"], 2, "lease"),
        (["--max-snapshot-bytes", "33554432"], 2, "raise --max-message-bytes to 33619968"),
        (["bandit", "--store", "x=y"], 2, "--store: none of bandit-v1 uses stores"),
        (["--token-file", "missing"], 1, "cannot read the token file"),
        (["--prot", "1"], 2, "--port"),
    ],
)
def test_a_wrong_call_is_one_readable_line(arguments: list[str], status: int, message: str) -> None:
    command = [sys.executable, "-m", "starpod.env_server", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, "")
    (line,) = (line for line in done.stderr.splitlines() if " WARNING " not in line)
    assert message in line


def test_stores_reach_the_environments_that_use_them_in_every_process(tmp_path: Path) -> None:
    file = tmp_path / "library.py"
    file.write_text(
        "import os\n"
        "from starpod.env_server import Concurrency, Environment, EnvironmentSpec, Outcome, Unavailable\n"
        "class Library(Environment):\n"
        "    spec = EnvironmentSpec(\n"
        "        id='library-v1', version='1.0.0', title='Library', concurrency=Concurrency.PROCESS)\n"
        "    @classmethod\n"
        "    def use_stores(cls, stores):\n"
        "        if 'burnt' in stores: raise Unavailable('the store burnt is no more; leave it out')\n"
        "        os.environ['BOOKS'] = ' and '.join(stores)\n"
        "        return True\n"
        "    def reset(self, rng): pass\n"
        "    def step(self, action): return Outcome()\n"
        "    def render(self, mode='text'): return os.environ['BOOKS']\n"
    )
    arguments = ["--environment-module", str(file), "--workers", "2", "--sandbox", "off", "--store"]
    request = pb.OpenRequest(environment_id="library-v1")
    with (
        start_server(*arguments, "poems", "--store", "plays") as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        for endpoint in EnvironmentServiceStub(channel).Describe(pb.DescribeRequest()).endpoints:
            with grpc.insecure_channel(endpoint) as worker:
                (session,) = EnvironmentServiceStub(worker).Open(request).sessions
                assert session.observation.parts[0].text == "poems and plays"
    command = [sys.executable, "-m", "starpod.env_server", "--port", "0", *arguments, "burnt"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "starpod: --store: the store burnt is no more; leave it out\n"


@pytest.mark.parametrize("option", ["port", "metrics-port", "health-port"])
def test_a_port_in_use_is_said_so(option: str) -> None:
    with start_server("--environment-module", TROUBLESOME) as server:
        port = server.address.rpartition(":")[2]
        command = [sys.executable, "-m", "starpod.env_server", "--port", "0", "--environment-module", TROUBLESOME]
        command += [f"--{option}", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert re.fullmatch(rf"starpod: port {port} of 127.0.0.1 is in use; choose another --{option}\n", done.stderr)


def test_an_environment_that_lacks_something_is_one_line_even_with_workers(tmp_path: Path) -> None:
    file = tmp_path / "lacking.py"
    file.write_text(
        "from starpod.env_server import Environment, EnvironmentSpec, Outcome, Unavailable\n"
        "class Lacking(Environment):\n"
        "    spec = EnvironmentSpec(id='lacking-v1', version='1.0.0', title='Lacking')\n"
        "    prepare = classmethod(lambda cls: (_ for _ in ()).throw(Unavailable('no data; bring some')))\n"
        "    def reset(self, rng): pass\n"
        "    def step(self, action): return Outcome()\n"
        "    def render(self, mode='text'): return ''\n"
    )
    for workers in ((), ("--workers", "3")):
        arguments = ["--port", "0", "--environment-module", str(file), *workers]
        command = [sys.executable, "-m", "starpod.cli.main", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("lacking-v1 cannot be served here: no data; bring some\n") == 1
        assert "Traceback" not in done.stderr
