"""An expert that finds and buys what the goal asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from starpod.environments.webshop.shop import actions

from .items import HITS, SUB_PAGES, Item
from .matching import matches, normalise, normalise_pair
from .shop import Shop

if TYPE_CHECKING:
    from starpod.environments.webshop.catalogue.goals import Goal

    from .matching import Ratio

NEAR = 2
"""Pages of results that the expert looks through before it searches for something else."""
CHOICES = 5
"""Values that it tries for one option of the goal."""

_CAPTIONS = frozenset({"search", "back to search", "< prev", "buy now", *(name.lower() for name in SUB_PAGES)})


def expert_action(shop: Shop) -> str | None:
    """The next step of the expert's plan from wherever the shop is; None after the purchase, or where it has no plan.

    It finds the product by the instruction's words where these bring it near enough to the top, else by its title, else
    by listing its query; opens it, chooses each option and buys.
    """
    state, plan = shop.state, plan_for(shop)
    if state.page == "done" or plan is None:
        return None
    if state.page == "index":
        return actions.search(plan.query)
    if state.page == "search_results":
        return _turn(shop, plan)
    if state.asin != plan.item.product.asin or shop.page_by_address() != state.page:
        return "click[back to search]"
    if state.page == "item_sub_page":
        return "click[< prev]"
    missing = (value for group, value in plan.options.items() if state.options.get(group) != value)
    return actions.click(next(missing, "buy now"))


@dataclass(frozen=True, slots=True)
class Plan:
    """The expert's plan: a query, a product to buy, and its options (group -> value)."""

    query: str
    item: Item
    options: dict[str, str]
    reward: float


_plans: WeakKeyDictionary[Shop, Plan | None] = WeakKeyDictionary()


def plan_for(shop: Shop) -> Plan | None:
    """The best purchase that the expert knows: the goal's product, and where that cannot be graded 1, the best of what
    the same searches find. None if it finds none. Made once per shop."""
    if shop not in _plans:
        _plans[shop] = _plan(shop)
    return _plans[shop]


def _plan(shop: Shop) -> Plan | None:
    goal, best = shop.goal, None
    queries = _queries(shop)
    for position in _candidates(shop, queries):
        item = shop.item_at(position)
        query = _query_for(shop, queries, position)
        if query is None or actions.click(item.product.asin.lower()) is None:
            continue
        options = best_options(item, goal, shop.ratio)
        reward = shop.worth(item, options).reward
        if best is None or reward > best.reward:
            best = Plan(query, item, options, reward)
        if best.reward == 1.0:
            break
    return best


def _queries(shop: Shop) -> list[str]:
    """Queries in the order in which they are tried, as far as they can be written as actions."""
    texts = (shop.instruction, shop.goal.name, f"<q> {shop.goal.query}")
    return [actions.parse(action)[1] for action in map(actions.search, texts) if action]


def _candidates(shop: Shop, queries: Sequence[str]) -> Iterator[int]:
    yield shop.goal.position
    for query in queries:
        yield from map(int, shop.find(query)[:HITS])


def _query_for(shop: Shop, queries: Sequence[str], position: int) -> str | None:
    """The first query that has the product within `NEAR` pages, else the one that has it earliest; None if none has."""
    pages = {query: page for query in queries if (page := _page_of(shop, shop.find(query), position)) is not None}
    near = (query for query, page in pages.items() if page <= NEAR)
    return next(near, min(pages, key=pages.__getitem__, default=None))


def _page_of(shop: Shop, hits: Sequence[int], position: int) -> int | None:
    """The page of results that shows a product; None if none does."""
    place = next((place for place, hit in enumerate(hits) if hit == position), None)
    return None if place is None else place // shop.page_size + 1


def _turn(shop: Shop, plan: Plan) -> str | None:
    """The action on a page of results: the product, a page nearer to it, or back where it is too far or not there."""
    state, page = shop.state, _page_of(shop, shop.hits(), plan.item.position)
    if page == state.number:
        return actions.click(plan.item.product.asin.lower())
    planned = " ".join(state.keywords or ()) == plan.query
    if page is None or state.drawn is not None or (abs(page - state.number) > NEAR and not planned):
        return "click[back to search]"
    return "click[next >]" if page > state.number else "click[< prev]"


def best_options(item: Item, goal: Goal, ratio: Ratio) -> dict[str, str]:
    """Values to choose (group -> value), at most one of a group, so that most of the goal's options are matched."""
    offered = [
        (clickable.value, clickable.text)
        for clickable in item.clickables.values()
        if clickable.kind == "option" and clickable.text not in _CAPTIONS and actions.click(clickable.text)
    ]
    if isinstance(goal.options, dict):
        wanted = [(name, value, normalise_pair(name, value)) for name, value in goal.options.items()]
    else:
        wanted = [("", value, normalise(value)) for value in goal.options]
    choices: list[list[tuple[str, str]]] = []
    for name, value, text in wanted:
        fitting = [offer for offer in offered if matches(normalise(offer[1]), text, ratio)]
        fitting.sort(key=lambda offer: (offer[1] != value, offer[0] != name))  # what the goal says itself comes first
        choices.append(fitting[:CHOICES])
    return max(_chosen(choices), key=lambda found: found[0], default=(0, {}))[1]


def _chosen(choices: Sequence[Sequence[tuple[str, str]]]) -> Iterator[tuple[int, dict[str, str]]]:
    """Ways to choose for one option of the goal after the other, each with how many got their choice.

    Stops at the first that serves all.
    """
    stack: list[tuple[int, int, dict[str, str]]] = [(0, 0, {})]
    while stack:
        place, served, chosen = stack.pop()
        if place == len(choices):
            yield served, chosen
            if served == place:
                return
            continue
        stack.append((place + 1, served, chosen))
        for group, value in reversed(choices[place]):
            if chosen.get(group, value) == value:
                stack.append((place + 1, served + 1, {**chosen, group: value}))
