"""The episodes that WebShop's benchmark records and plays."""

import random
from collections import Counter
from functools import cache

import pytest

from benchmarks.webshop.episodes import BUY, KINDS, OPTIONS, SEARCH, ShopEpisode, record
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
