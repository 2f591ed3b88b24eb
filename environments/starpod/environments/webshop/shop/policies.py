"""An expert that finds and buys the goal's product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from starpod.environments.webshop.shop import actions

from .items import HITS, SUB_PAGES, ShopItem
from .matching import matches, normalise, normalise_pair
from .shop import Shop

if TYPE_CHECKING:
    from starpod.environments.webshop.catalogue.goals import Goal

    from .matching import Ratio

NEAR = 2
"""Maximum number of pages of results that the expert visits before it tries another search."""
CHOICES = 5
"""Maximum number of values that the expert considers for one option of the goal."""

_CAPTIONS = frozenset({"search", "back to search", "< prev", "buy now", *(name.lower() for name in SUB_PAGES)})


def expert_action(shop: Shop) -> str | None:
    """Return the expert's next action from any page, or None after the purchase or if it has no plan.

    The expert searches for the instruction, or for the title or the query if the product then ranks higher. It opens
    the product, chooses each option and buys.
    """
    state, plan = shop.state, plan_for(shop)
    if state.page == "done" or plan is None:
        return None
    if state.page == "index":
        return actions.search(plan.query)
    if state.page == "search_results":
        return _results_action(shop, plan)
    if state.asin != plan.item.product.asin or shop.state.page_by_address() != state.page:
        return "click[back to search]"
    if state.page == "item_sub_page":
        return "click[< prev]"
    values = (value for group, value in plan.options.items() if state.options.get(group) != value)
    return actions.click(next(values, "buy now"))


@dataclass(frozen=True, slots=True)
class ShoppingPlan:
    """The expert's plan: a query, a product to buy, and its options (group -> value)."""

    query: str
    item: ShopItem
    options: dict[str, str]
    reward: float


_plans: WeakKeyDictionary[Shop, ShoppingPlan | None] = WeakKeyDictionary()


def plan_for(shop: Shop) -> ShoppingPlan | None:
    """Return the expert's plan for a shop, or None if it finds no product. Plans are cached.

    The plan is to buy the goal's product or, if its grade cannot be 1, the best product that the same searches find.
    """
    if shop not in _plans:
        _plans[shop] = _plan(shop)
    return _plans[shop]


def _plan(shop: Shop) -> ShoppingPlan | None:
    goal, best_plan = shop.goal, None
    queries = _queries(shop)
    for position in _candidates(shop, queries):
        item = shop.item_at(position)
        query = _query_for(shop, queries, position)
        if query is None or actions.click(item.product.asin.lower()) is None:
            continue
        options = best_options(item, goal, shop.ratio)
        reward = shop.worth(item, options).reward
        if best_plan is None or reward > best_plan.reward:
            best_plan = ShoppingPlan(query, item, options, reward)
        if best_plan.reward == 1.0:
            break
    return best_plan


def _queries(shop: Shop) -> list[str]:
    """Return the queries that can be written as actions, in the order in which they are tried."""
    texts = (shop.goal.instruction_text, shop.goal.name, f"<q> {shop.goal.query}")
    return [actions.parse(action)[1] for action in map(actions.search, texts) if action]


def _candidates(shop: Shop, queries: Sequence[str]) -> Iterator[int]:
    yield shop.goal.position
    for query in queries:
        yield from map(int, shop.find(query)[:HITS])


def _query_for(shop: Shop, queries: Sequence[str], position: int) -> str | None:
    """Return the first query that finds the product within NEAR pages, else the query that ranks it best, or None."""
    pages = {query: page for query in queries if (page := _page_of(shop, shop.find(query), position)) is not None}
    near_queries = (query for query, page in pages.items() if page <= NEAR)
    return next(near_queries, min(pages, key=pages.__getitem__, default=None))


def _page_of(shop: Shop, hits: Sequence[int], position: int) -> int | None:
    """Return the number of the page of results that shows a product, or None."""
    rank = next((rank for rank, hit in enumerate(hits) if hit == position), None)
    return None if rank is None else rank // shop.page_size + 1


def _results_action(shop: Shop, plan: ShoppingPlan) -> str | None:
    """Return the action on a page of results: open the product, turn the page towards it, or search again."""
    state, page = shop.state, _page_of(shop, shop.hits(), plan.item.position)
    if page == state.number:
        return actions.click(plan.item.product.asin.lower())
    is_planned = " ".join(state.keywords or ()) == plan.query
    if page is None or state.drawn is not None or (abs(page - state.number) > NEAR and not is_planned):
        return "click[back to search]"
    return "click[next >]" if page > state.number else "click[< prev]"


def best_options(item: ShopItem, goal: Goal, ratio: Ratio) -> dict[str, str]:
    """Return the values (group -> value) that match as many of the goal's options as possible."""
    offers = [
        (clickable.value, clickable.text)
        for clickable in item.clickables.values()
        if clickable.kind == "option" and clickable.text not in _CAPTIONS and actions.click(clickable.text)
    ]
    if isinstance(goal.options, dict):
        wishes = [(name, value, normalise_pair(name, value)) for name, value in goal.options.items()]
    else:
        wishes = [("", value, normalise(value)) for value in goal.options]
    choices: list[list[tuple[str, str]]] = []
    for name, value, text in wishes:
        fitting = [offer for offer in offers if matches(normalise(offer[1]), text, ratio)]
        fitting.sort(key=lambda offer: (offer[1] != value, offer[0] != name))  # exact matches come first
        choices.append(fitting[:CHOICES])
    return max(_combinations(choices), key=lambda combination: combination[0], default=(0, {}))[1]


def _combinations(choices: Sequence[Sequence[tuple[str, str]]]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield all ways to choose values for the goal's options, each with the number of options it matches.

    A group has at most one value. The search ends at the first way that matches all options.
    """
    stack: list[tuple[int, int, dict[str, str]]] = [(0, 0, {})]
    while stack:
        option, match_count, options = stack.pop()
        if option == len(choices):
            yield match_count, options
            if match_count == option:
                return
            continue
        stack.append((option + 1, match_count, options))
        for group, value in reversed(choices[option]):
            if options.get(group, value) == value:
                stack.append((option + 1, match_count + 1, {**options, group: value}))
