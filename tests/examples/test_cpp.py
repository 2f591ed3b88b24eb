"""examples/cpp: it is small, it builds, it keeps the contract, the trainer learns from it, and it leaves gracefully."""

import contextlib
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.foreign import code_lines, drain, keep_contract, learn_from
from tests.support import ROOT, ServerProcess

EXAMPLE = ROOT / "examples" / "cpp"
BUILD = ROOT / "build" / "examples-cpp"
"""Kept between runs: what has not changed is not compiled again."""
TOOLS = ("cmake", "c++", "make", "protoc", "grpc_cpp_plugin")
ENVIRONMENT = "key_door-v1"
OBSERVATION = re.compile(r"(key|door) (Left|Right|-) \d (Up|Down|-) \d")

NEVER_SHOWN = {
    *("C-20", "C-21", "C-57"),  # it has no options
    "C-98",  # pings take long
    *("C-65", "C-70"),  # nor a score or pictures
    *("C-92", "C-95", "C-97", "S-15"),  # it is too large to fill, asks for no token, tells no timing
    *("S-11", "S-12", "S-13", "S-14", "S-16", "S-17", "S-18"),  # and takes no columns
}


def test_it_is_small() -> None:
    assert 0 < code_lines(EXAMPLE, ".h", ".cpp") < 400


@pytest.fixture(scope="module")
def program() -> Path:
    """The server, compiled with what Debian packages."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking or not Path("/usr/include/grpcpp/grpcpp.h").exists():
        pytest.skip(f"no {', '.join(lacking) or 'libgrpc++-dev'} here; examples/cpp/README.md names the packages")
    for command in (["cmake", "-S", str(EXAMPLE), "-B", str(BUILD)], ["cmake", "--build", str(BUILD)]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stderr
    return BUILD / "key_door_server"


@pytest.fixture(scope="module")
def example(program: Path) -> Iterator[ServerProcess]:
    server = ServerProcess([str(program)])
    yield server
    server.close()


@pytest.mark.languages
@pytest.mark.timeout(700)  # the first build
def test_it_keeps_the_contract(program: Path, example: ServerProcess) -> None:
    with contextlib.closing(ServerProcess([str(program)])) as other:
        assert set(keep_contract(example, other, "--level", "core,stream")) == NEVER_SHOWN


@pytest.mark.languages
@pytest.mark.timeout(700)
def test_the_trainer_learns_from_it(example: ServerProcess, tmp_path: Path) -> None:
    _, episodes = learn_from(example, EXAMPLE / "key_door.yaml", tmp_path / "run")
    for episode in episodes:
        assert (episode["environment"], episode["version"]) == (ENVIRONMENT, "1.0.0")
        assert all(OBSERVATION.fullmatch(turn["observation"]) for turn in episode["turns"])


@pytest.mark.languages
@pytest.mark.timeout(700)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_drains_before_it_ends(program: Path, number: signal.Signals) -> None:
    with contextlib.closing(ServerProcess([str(program)])) as server:
        drain(server, ENVIRONMENT, "Up", number)


@pytest.mark.languages
def test_a_port_that_is_taken_is_reported(program: Path, example: ServerProcess) -> None:
    done = subprocess.run([program, "--port", str(example.port)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    assert "usage" in subprocess.run([program, "--prot"], capture_output=True, text=True, timeout=250).stderr
