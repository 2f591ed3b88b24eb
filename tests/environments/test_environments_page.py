"""docs/environments.md says what the code does: options, deviations, and an example that runs."""

from pathlib import Path
from typing import Any

import pytest

from docs import options
from starpod.env_server import Environment
from starpod.env_server.episode import Episode, Want
from starpod.environments.countdown import Countdown
from tests.environments.test_golden import CHOSEN, FILTER_CHOSEN

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_tables_of_options_are_fresh() -> None:
    assert options.page() == PAGE, "run: python -m docs.options"
    assert len(options.MARKED.findall(PAGE)) == len(options.OPTIONS) + 1
    rows = [row for kind in options.OPTIONS.values() for row in options.table(kind).splitlines()[2:]]
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))


@pytest.mark.parametrize("kind", CHOSEN)
def test_every_deviation_is_listed(kind: type[Environment]) -> None:
    """In the section of the environment, or above all sections where several share it."""
    text = PAGE.partition("\n## ")[0] + section(kind.spec.id)
    deviations = CHOSEN[kind] | (FILTER_CHOSEN if kind is Countdown else {})
    assert [name for name in deviations if f"\n| {name} |" not in text] == []


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
