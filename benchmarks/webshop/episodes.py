"""Episodes of the WebShop benchmark, recorded beforehand so that measurements do not include the choice of actions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import Any

from starpod.environments.webshop.shop import actions
from starpod.environments.webshop.shop.shop import Shop, ShopState
from starpod.environments.webshop.store.store import Store

ENVIRONMENT = "webshop-v1"
NAME = "bench"
"""Name of the store on the servers."""
OPTIONS: dict[str, Any] = {"catalogue": NAME, "choose": "seed"}
"""Options of sessions. With `choose: seed`, the seed of an episode is the index of its goal."""
COUNT = 5000
"""Number of episodes, played in a cycle. No cache is large enough for their searches, so none is answered from one."""
SEARCH, PAGE, PRODUCT, OPTION, DESCRIPTION, TO_PRODUCT, TO_RESULTS, BUY = KINDS = (
    "search",
    "next or previous page",
    "a product",
    "an option",
    "Description",
    "back to the product",
    "back to the results",
    "Buy Now",
)
RESET = "reset"
SHORTEST_QUERY = 4
BROWSES = 0.28
"""Share of episodes that look at another product first."""
SECOND_OPTION = 0.15
"""Share of episodes that choose two options if the product has two."""

Waits = dict[str, list[float]]
"""Latencies in seconds by kind of action."""


@dataclass(frozen=True, slots=True)
class ShopEpisode:
    """An episode: index of its goal, its actions and their kinds, and the reward of the last action, which buys."""

    goal: int
    actions: tuple[str, ...]
    kinds: tuple[str, ...]
    reward: float

    def check(self, place: int, reward: float, over: bool) -> None:
        """Raise RuntimeError if a step has a wrong result, because speed counts only with correct results.

        Args:
            place: index of the step in the episode, from 0.
            reward: reward of the step; only the last step has one.
            over: whether the episode ended.
        """
        is_last = place == len(self.actions) - 1
        if over != is_last or not isclose(reward, self.reward if is_last else 0.0, abs_tol=1e-9):
            raise RuntimeError(f"{self.actions[place]} for goal {self.goal} gave reward {reward}, over {over}")


def record(store: Store, count: int = COUNT) -> list[ShopEpisode]:
    """Record `count` episodes on human goals, all with different searches. They are the same in every run.

    An episode searches for some words of the instruction, turns a page forth and back, sometimes looks at another
    product, opens a product and its description, chooses one or two options if there are any, and buys. The costs of
    the original WebShop were measured with this mix.
    """
    rng, goals = random.Random(0), store.goals("human")
    episodes: list[ShopEpisode] = []
    queries: set[str] = set()
    while len(episodes) < count:
        goal = rng.randrange(len(goals))
        shop = Shop(store, goals, ShopState(goal, str(goal)))
        query = _query(shop.goal.instruction_text, rng)
        if query not in queries:
            queries.add(query)
            episode = _play(shop, query, rng)
            episodes += [episode] if episode else []
    return episodes


def _query(instruction: str, rng: random.Random) -> str:
    words = instruction.split()
    count = rng.randint(min(SHORTEST_QUERY, len(words)), len(words))
    return actions.search(" ".join(words[index] for index in sorted(rng.sample(range(len(words)), count)))) or ""


def _play(shop: Shop, query: str, rng: random.Random) -> ShopEpisode | None:
    """Play an episode; None if its search finds nothing, or if a page refuses a planned click."""
    steps: list[tuple[str, str]] = []

    def click(kind: str, text: str) -> bool:
        steps.append((kind, f"click[{text}]"))
        return bool(shop.click(text))

    def open_one() -> bool:
        return click(PRODUCT, rng.choice(sorted(shop.listing().links)))

    steps.append((SEARCH, query))
    shop.search(actions.parse(query)[1])
    if not (shop.hits() and click(PAGE, "next >") and click(PAGE, "< prev")):
        return None
    if rng.random() < BROWSES and not (open_one() and click(TO_RESULTS, "< prev")):
        return None
    if not (open_one() and click(DESCRIPTION, "description") and click(TO_PRODUCT, "< prev")):
        return None
    item = shop.item()
    assert item is not None
    options = [each.text for each in item.clickables.values() if each.kind == "option" and actions.click(each.text)]
    for text in rng.sample(options, min(len(options), 1 + (rng.random() < SECOND_OPTION))):
        click(OPTION, text)
    click(BUY, "buy now")
    if shop.state.page != "done" or shop.state.reward is None:
        return None
    kinds, commands = zip(*steps, strict=True)
    return ShopEpisode(shop.state.goal, commands, kinds, shop.state.reward)


def record_at(path: Path, count: int = COUNT) -> list[ShopEpisode]:
    """Record episodes on the store at a path."""
    return record(Store.open(path, NAME), count)
