"""A store that the tests of the shop share."""

import shutil
from pathlib import Path

import pytest

from starpod.environments.webshop.store.build import Synthetic, build

COUNT = 40


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 40 synthetic products, which no test may change."""
    out = tmp_path_factory.mktemp("built") / "store"
    build(out, Synthetic(COUNT), nouns="textblob")
    return out


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "copy"))
