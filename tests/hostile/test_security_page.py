"""Every test that SECURITY.md names is there, and every option."""

from __future__ import annotations

import re

from starpod.env_server.cli import serve
from tests.hostile.villain import Villain
from tests.support import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()
TESTS = {path.name: path.read_text() for path in (ROOT / "tests/hostile").glob("test_*.py")}


def test_the_tests_that_it_names() -> None:
    assert len(files := set(re.findall(r"\btest_\w+\.py", TEXT))) > 5
    assert files <= set(TESTS)
    functions = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(functions) > 15
    assert functions <= set(re.findall(r"def (test_\w+)\(", "\n".join(TESTS.values())))


def test_the_crimes_that_it_names() -> None:
    table = TEXT[TEXT.index("| Given up |") : TEXT.index("What it says to the server")]
    crimes = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.rpartition("| ")[2])}
    assert "fork_bomb" in crimes
    for name in crimes:
        assert hasattr(Villain, name) or f"def {name}(" in "".join(TESTS.values()), name


def test_the_options_that_it_names() -> None:
    options = {option for parameter in serve.params for option in parameter.opts}
    elsewhere = {"--ca", "--require-hashes"}
    assert set(re.findall(r"`(--[a-z-]+)", TEXT)) - elsewhere <= options
