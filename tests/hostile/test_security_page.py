"""SECURITY.md: every file of tests that it names is there, and every option."""

from __future__ import annotations

import re

from starpod.env_server.cli import serve
from tests.support import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()


def test_the_tests_that_it_names() -> None:
    assert len(files := set(re.findall(r"\btest_\w+\.py", TEXT))) > 5
    elsewhere = {
        name for folder, name in re.findall(r"(tests/[\w/]+/)(test_\w+\.py)", TEXT) if (ROOT / folder / name).exists()
    }
    assert files - elsewhere <= {path.name for path in (ROOT / "tests/hostile").glob("test_*.py")}


def test_the_options_that_it_names() -> None:
    options = {option for parameter in serve.params for option in parameter.opts}
    elsewhere = {"--ca", "--require-hashes"}
    assert set(re.findall(r"`(--[a-z-]+)", TEXT)) - elsewhere <= options
