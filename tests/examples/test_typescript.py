"""examples/typescript: built from its lock file, checked from outside, trained on by the trainer as it is."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.disturbing import disturb
from tests.examples.foreign import code_lines, drain, keep_contract, learn_from
from tests.support import ROOT, ServerProcess

EXAMPLE = ROOT / "examples" / "typescript"
SNAPSHOTS = {*(f"N-{number:02}" for number in range(1, 11)), "N-12"}
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ERR_SOCKET_TIMEOUT")
"""npm's codes where no registry answers."""
NEVER_SHOWN = {"C-70", "C-95", "C-97", "C-98", "F-10", *(f"S-{number}" for number in range(11, 19))}
"""It draws no pictures, wants no token, tells no timing, declares fork, takes no columns; pings
take long."""


def test_its_source_is_short() -> None:
    assert 0 < code_lines(EXAMPLE / "src", ".ts", comments=("//", "/*", "*")) < 400


def test_its_lock_file_names_no_registry() -> None:
    """So that `npm ci` asks the registry that is configured."""
    packages = json.loads((EXAMPLE / "package-lock.json").read_text())["packages"]
    assert not [name for name, package in packages.items() if "resolved" in package]
    assert all("integrity" in package for name, package in packages.items() if name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built in a copy, so that the working tree stays as it is."""
    for tool in ("node", "npm"):
        if not shutil.which(tool):
            pytest.skip(f"there is no {tool} here")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if tuple(map(int, version.lstrip("v").split(".")[:2])) < (20, 10):
        pytest.skip(f"node is {version.strip()}, and the example needs 20.10 or newer")
    top = tmp_path_factory.mktemp("typescript")
    folder = top / "examples" / "typescript"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("node_modules", "dist", "generated"))
    shutil.copytree(ROOT / "proto", top / "proto")
    for words in (["ci"], ["run", "build"]):
        done = subprocess.run(["npm", *words], cwd=folder, capture_output=True, text=True, timeout=200)
        said = done.stdout + done.stderr
        if done.returncode != 0 and any(code in said for code in UNREACHABLE):
            pytest.skip(f"npm reaches no registry: {said.strip().splitlines()[0]}")
        assert done.returncode == 0, said
    return folder / "dist" / "main.js"


@pytest.fixture
def serve(built: Path) -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        servers.append(ServerProcess(["node", str(built), *arguments]))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.mark.languages
@pytest.mark.timeout(700)  # the first build
def test_it_keeps_the_contract(serve: Callable[..., ServerProcess]) -> None:
    """Two processes, so few sessions that the check can fill one, and every requirement but those it cannot show."""
    server = serve("--max-sessions", "250")
    skipped = set(keep_contract(server, serve()))
    assert skipped - NEVER_SHOWN == SNAPSHOTS, "snapshots alone are left out"
    assert not {"C-92", "C-94", "S-07", "F-08"} & skipped
    assert server.log == "", "something was thrown that is no refusal"


@pytest.mark.languages
@pytest.mark.timeout(700)
def test_sigterm_drains(serve: Callable[..., ServerProcess]) -> None:
    drain(serve(), "hangman-v1", "e", signal.SIGTERM)


@pytest.mark.languages
@pytest.mark.timeout(700)
def test_it_is_trained_on_and_may_be_killed(
    serve: Callable[..., ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer plays every episode to its end, although the server is killed with live sessions on the way."""
    server = serve()
    disturb("collect", 2, server.restart, monkeypatch.setattr)
    metrics, episodes = learn_from(server, EXAMPLE / "hangman.yaml", tmp_path / "run")
    assert metrics[-1]["collect/recoveries"] > 0, "no session was opened again"
    for episode in episodes:
        assert episode["environment"] == "hangman-v1"
        assert all(re.search(r"[a-z_]( [a-z_])+ wrong .+ lives \d+", turn["observation"]) for turn in episode["turns"])
