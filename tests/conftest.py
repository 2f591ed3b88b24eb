"""Fixtures for all tests."""

import gc
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support import ServerProcess, start_server

# No deadline for examples, since servers and other tests run at the same time. Each run draws other examples.
settings.register_profile("starpod", deadline=None, max_examples=30)
settings.load_profile("starpod")

# A shell that starts `make test` in the background ignores SIGINT, and every program that a test starts would inherit
# that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Leave what importing made out of garbage collections: they took a third of the time of tests with torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """One server with every built-in environment, shared by all tests that do not break it."""
    with start_server() as process:
        yield process
