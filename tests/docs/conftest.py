"""A reader of the project's pages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.reader import Reader
from tests.support import ServerProcess


@pytest.fixture
def reader(server: ServerProcess, tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path, server)
    with reader.servers:
        yield reader
