"""The check finds almost all bugs that were planted in environments, and none in environments without a bug."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.check.planted import look_for_all

GOOD = ("gymnasium:FrozenLake-v1", "gymnasium:Taxi-v4", "gymnasium:CartPole-v1")
"""Hosted ones; those that are built in are tested elsewhere."""
FOUND = 0.95
"""The share of the bugs that must be found."""


@pytest.mark.minutes
@pytest.mark.timeout(900)
def test_nearly_all_planted_bugs_are_found_and_nothing_else(tmp_path: Path) -> None:
    found = look_for_all(tmp_path, GOOD)
    total, missed = sum(found.planted.values()), [f"{k}: {bug}" for k, bugs in found.missed.items() for bug in bugs]
    print(f"{total - len(missed)} of {total} found; missed: {missed or 'none'}")
    assert found.good == 6
    assert not found.wrong
    assert total >= 40
    assert total - len(missed) >= FOUND * total, missed
