"""The lock, constraints/main.txt and pyproject.toml say the same, and every pin of the lock has its hashes."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT

LOCK = ROOT / "constraints/requirements.lock"
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)([^\\\n]*)((?:\\\n\s+--hash=sha256:[0-9a-f]{64} ?)*)", re.MULTILINE)


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    return {canonicalize_name(pin[1]): pin[2] for pin in PIN.finditer(LOCK.read_text())}


def test_every_line_is_a_pin_with_hashes() -> None:
    text = LOCK.read_text()
    pins = list(PIN.finditer(text))
    assert "".join(pin[0] + "\n" for pin in pins) == text
    for pin in pins:
        assert pin[4], f"{pin[1]} has no hash"


def test_no_index_is_named() -> None:
    assert not re.search(r"https?:|--index|--find-links| @ ", LOCK.read_text())


def test_the_constraints_are_locked(locked: dict[str, str]) -> None:
    lines = (ROOT / "constraints/main.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    constrained = {canonicalize_name(name): version for name, version in pins.items()}
    assert {name: locked.get(name) for name in constrained} == constrained, "make lock"


def test_the_lock_satisfies_the_project(locked: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra in ("", *sorted(set(extras) - {"vllm"})):
        for line in extras[extra] if extra else project["dependencies"]:
            requirement = Requirement(line)
            version = locked.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} of {extra or 'the client'} is not locked: make lock"
            assert requirement.specifier.contains(version), f"{line} is locked as {version}: make lock"
