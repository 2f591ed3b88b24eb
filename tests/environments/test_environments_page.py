"""docs/environments.md says what the code does: options, limits, deviations, and an example that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from starpod.env_server import Environment
from starpod.env_server.episode import Episode, Want
from starpod.environments.countdown import Countdown
from tests.environments.test_golden import CHOSEN, FILTER_CHOSEN

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("kind", CHOSEN)
def test_every_option_and_deviation_is_listed(kind: type[Environment]) -> None:
    text = section(kind.spec.id)
    for name in kind.Options.model_fields:
        assert re.search(rf"^\|[^|]*`{name}`", text, re.MULTILINE), f"no row for the option {name}"
    for name in CHOSEN[kind] | (FILTER_CHOSEN if kind is Countdown else {}):
        assert f"\n| {name} |" in text, f"no row for the deviation {name}"


def test_the_example_is_an_environment() -> None:
    code = section("Write your own").split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 60
    names: dict[str, Any] = {"__name__": "corridor"}
    exec(compile(code, "corridor.py", "exec"), names)
    environment = names["Corridor"]()
    environment.options = environment.Options(length=9)
    episode = Episode(environment, environment.spec.limits)
    episode.reset(1, 1)
    assert environment.observe() == "....P...."
    twin = episode.fork(None)
    ends = [state.turn([way] * 9, Want()) for state, way in ((episode, "LEFT"), (twin, "right"))]
    assert sorted(end.reward for end in ends) == [0.0, 1.0]
