"""What WebShop's benchmark plays and how it judges: the recorded episodes, and the aims."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.webshop.episodes import BUY, KINDS, OPTIONS, SEARCH, ShopEpisode, record
from benchmarks.webshop.original import CLICKS, ORIGINAL
from benchmarks.webshop.report import Build, Result, Steps, Wait, aims, sheets
from benchmarks.webshop.wire import Memory, Start
from starpod.environments.webshop.environment import WebShop
from starpod.environments.webshop.shop import starts
from tests.environments.webshop.memory_store import synthetic_store

COUNT = 60


@cache
def episodes() -> list[ShopEpisode]:
    return record(synthetic_store("human"), COUNT)  # type: ignore[arg-type]


def test_searches_differ_and_are_an_eighth_of_the_steps() -> None:
    kinds = Counter(kind for played in episodes() for kind in played.kinds)
    assert len({played.actions[0] for played in episodes()}) == kinds[SEARCH] == kinds[BUY] == COUNT
    assert set(kinds) == set(KINDS)
    assert 0.10 < kinds[SEARCH] / kinds.total() < 0.15


def test_an_episode_recorded_or_played_again_goes_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = synthetic_store("human")
    assert record(store, 10) == episodes()[:10]  # type: ignore[arg-type]
    monkeypatch.setattr(starts, "stores", lambda: {OPTIONS["catalogue"]: store})
    environment = WebShop()
    environment.options = WebShop.Options(**OPTIONS)
    rewards = set()
    for played in episodes():
        environment.seed = played.goal
        environment.reset(random.Random(0))
        for place, action in enumerate(played.actions):
            outcome = environment.step(action)
            played.check(place, outcome.reward, outcome.terminated)
        rewards.add(outcome.reward)
    assert len(rewards) > 3


def test_a_wrong_answer_stops_the_benchmark() -> None:
    played = ShopEpisode(0, ("search[a]", "click[buy now]"), (SEARCH, BUY), 0.5)
    played.check(0, 0.0, False)
    played.check(1, 0.5, True)
    for reward, over in ((0.7, True), (0.5, False)):
        with pytest.raises(RuntimeError, match="buy now"):
            played.check(1, reward, over)


def result(products: int) -> Result:
    """Figures that meet every aim."""
    waits = {kind: Wait(500, 2e-3, 9e-3) for kind in (*KINDS, CLICKS, "reset")}
    memory = [Memory(150_000_000, 140_000_000, 160_000_000)]
    return Result(
        products=products,
        store_bytes=10**9,
        build=Build(600.0, 10**9),
        start=Start(1.0, 1.1, 1.0),
        used_steps=5000,
        memory={"one server, started": memory, "each of 2 workers, used": memory},
        wire=waits,
        inside=waits,
        steps=[Steps("text", 256, 8000.0, 0.02, 0.04, 2e-5, 9e-5, [8000.0])],
    )


def test_aims_are_met_or_missed() -> None:
    small, large = result(1_000), result(1_181_436)
    assert [row[-1] for row in aims([small, large]).rows] == ["met"] * 6
    slow = replace(small.steps[0], steps_per_second=6999.0)
    worse = [
        replace(small, steps=[slow]),
        replace(
            large,
            start=Start(1.0, 2.1, 1.0),
            memory={"each of 2 workers, used": [Memory(10, 10, 10), Memory(401_000_000, 10, 10)]},
            wire={**large.wire, SEARCH: Wait(500, 11e-3, 41e-3)},
            build=Build(901.0, 1),
        ),
    ]
    assert [row[-1] for row in aims(worse).rows] == ["missed"] * 6
    assert not aims([result(10_000)]).rows


def test_every_row_has_a_cell_for_every_heading() -> None:
    for sheet in sheets([result(size) for size in (*ORIGINAL, 1_181_436)]):
        assert sheet.rows
        assert {len(row) for row in sheet.rows} == {len(sheet.headings)}, sheet.title
