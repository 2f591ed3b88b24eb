"""Servers behind proxies, and what came through in the end."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.episodes import ENVIRONMENTS, TALLY
from tests.faults.proxy import Proxy
from tests.support import ServerProcess, start_server
from tests.training import DISTURBED, train


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """A server that nothing happens to, where the same episodes are played."""
    with start_server(*ENVIRONMENTS) as process:
        yield process


@pytest.fixture(scope="session")
def pair(server: ServerProcess) -> Iterator[list[ServerProcess]]:
    """Two servers for faults on the way to them; neither is harmed."""
    with start_server(*ENVIRONMENTS) as other:
        yield [server, other]


@pytest.fixture
def proxies(pair: list[ServerProcess]) -> Iterator[list[Proxy]]:
    """A faithful proxy before each of them."""
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(server.address, seed=number)) for number, server in enumerate(pair)]


@pytest.fixture(scope="session")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(run_dir=folder, base=DISTURBED)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many episodes survived each fault exactly like in the undisturbed run."""
    if not TALLY:
        return
    terminalreporter.section("episodes that came through unchanged")
    width = max(map(len, TALLY))
    for fault, count in TALLY.items():
        terminalreporter.write_line(
            f"{fault:{width}}  {count.episodes:6,} episodes  {count.turns:7,} turns  {count.recoveries:5,} brought back"
        )
