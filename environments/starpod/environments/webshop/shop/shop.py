"""The shop as a state machine: pages, their clickable texts, and the effects of clicks and searches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from .items import (
    BACK,
    HITS,
    NEXT,
    ON_SUB_PAGES,
    PREVIOUS,
    SEARCH,
    SUB_PAGES,
    Clickable,
    Listing,
    ShopItem,
    Stock,
    cache_of,
)
from .reward import grade

if TYPE_CHECKING:
    from starpod.environments.webshop.catalogue.goals import Goal, Goals

    from .matching import Ratio
    from .reward import Grade

HOME: Final = "http://127.0.0.1:3000"
"""Beginning of all addresses. They are only shown, never opened."""
PAGE_SIZE: Final = 10
"""Default number of products on a page of results."""

Page = Literal["index", "search_results", "item_page", "item_sub_page", "done"]
_PAGES: tuple[Page, ...] = ("search_results", "item_page", "item_sub_page", "done")
_SUB_PAGE = {name.lower(): name for name in SUB_PAGES}
_INDEX = {SEARCH.text: SEARCH}


@dataclass(slots=True)
class ShopState:
    """State of a session, in plain values for snapshots."""

    goal: int
    """Index of the goal."""
    session: str
    """Name of the session in the addresses."""
    page: Page = "index"
    keywords: list[str] | None = None
    """Words of the search; None before the first search."""
    number: int = 1
    """Number of the page of results; it can exceed the last page."""
    asin: str = ""
    """The open or bought product; "" on the index and on results."""
    sub_page: str = ""
    opened: list[str] = field(default_factory=list)
    """Products opened since the last visit of the index, in order."""
    options: dict[str, str] = field(default_factory=dict)
    """Chosen values by group, in order."""
    drawn: list[int] | None = None
    """Positions that `search[<r>]` drew; None for any other search."""
    reward: float | None = None
    """Score of the purchase in [0, 1], on the final page."""

    def as_dict(self) -> dict[str, Any]:
        """Return a copy as plain values; `ShopState(**state.as_dict())` is an equal state."""
        return asdict(self)

    @property
    def has_search_bar(self) -> bool:
        return self.page == "index"

    def address(self) -> str:
        """Return the address of the page. Keywords are joined by '+', and nothing is escaped."""
        keywords = "+".join(self.keywords or ())
        match self.page:
            case "index":
                return f"{HOME}/{self.session}"
            case "search_results":
                return f"{HOME}/search_results/{self.session}/{keywords}/{self.number}"
            case "item_page":
                options = json.dumps(self.options)
                return f"{HOME}/item_page/{self.session}/{self.asin}/{keywords}/{self.number}/{options}"
            case "item_sub_page":
                path = f"{self.session}/{self.asin}/{keywords}/{self.number}/{self.sub_page}"
                return f"{HOME}/item_sub_page/{path}/{self.options}"
        return f"{HOME}/done/{self.session}/{self.asin}/{self.options}"

    def page_by_address(self) -> Page:
        """Return the page as the original WebShop determines it, from the address.

        It is the first name in _PAGES that occurs in the address, even among the keywords.
        """
        address = self.address()
        return next((page for page in _PAGES if page in address), "index")


@dataclass(eq=False)
class Shop:
    """A session in a store. Only its field `state` changes."""

    stock: Stock
    goals: Goals | Sequence[Goal]
    state: ShopState
    show_attributes: bool = field(default=False, kw_only=True)
    page_size: int = field(default=PAGE_SIZE, kw_only=True)
    """Number of products on a page of results."""
    ratio: Ratio = field(default="difflib", kw_only=True)
    """Similarity by which options and attributes are compared."""
    stream: Callable[[], random.Random] = field(default=random.Random, kw_only=True)
    """Function that returns the random state for `search[<r>]`."""
    _item: ShopItem | None = field(default=None, init=False)
    _appraised: tuple[Any, Grade] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._cache = cache_of(self.stock)

    @cached_property
    def goal(self) -> Goal:
        return self.goals[self.state.goal]

    # --- the page ------------------------------------------------------------------------------------------------

    def hits(self) -> Sequence[int]:
        """Return the positions of all hits of the current search, best first; empty before the first search."""
        state = self.state
        if state.drawn is not None:
            return state.drawn
        return () if state.keywords is None else self._cache.find(state.keywords)

    def find(self, text: str) -> Sequence[int]:
        """Return the positions that a search for this text finds. A text that begins with `<r>` finds nothing.

        Raises TooManyTerms.
        """
        keywords = text.lower().split(" ")
        return () if keywords[0] == "<r>" else self._cache.find(keywords)

    def item_at(self, position: int) -> ShopItem:
        """Return the product at a position, with the clickable texts of its page."""
        return self._cache.item(position, self.show_attributes)

    def listing(self) -> Listing:
        """Return the products on this page of results. Pages before the first or after the last are empty."""
        number, size = self.state.number, self.page_size
        hits = self.hits()[(number - 1) * size : number * size] if number > 0 else ()
        return self._cache.listing(tuple(map(int, hits)))

    def item(self) -> ShopItem | None:
        """Return the open or bought product; None on the index and on results."""
        asin = self.state.asin
        if not asin:
            return None
        if self._item is None or self._item.product.asin != asin:
            position = self.stock.catalogue.position(asin)
            self._item = None if position is None else self.item_at(position)
        return self._item

    def clickables(self) -> Mapping[str, Clickable]:
        """Return everything that can be clicked, by its text, in the page's order. `search` is the search bar."""
        state = self.state
        match state.page:
            case "index":
                return _INDEX
            case "search_results":
                buttons = (BACK, PREVIOUS, NEXT) if state.number > 1 else (BACK, NEXT)
                return {**{button.text: button for button in buttons}, **self.listing().links}
            case "item_page":
                item = self.item()
                assert item is not None
                return item.clickables
            case "item_sub_page":
                return ON_SUB_PAGES
        return {}

    def clickable(self, text: str) -> Clickable | None:
        """Return the target of a click on this text (in any case), or None."""
        text = text.lower()
        return None if text == SEARCH.text else self.clickables().get(text)

    # --- actions -------------------------------------------------------------------------------------------------

    def search(self, text: str) -> bool:
        """Search, from any page. Return whether the state changed. After TooManyTerms, the state is unchanged."""
        return self._show_results(text.lower().split(" "), 1)

    def click(self, text: str) -> bool | None:
        """Click a text, in any case. Return whether the state changed, or None if the page has no such text."""
        clickable = self.clickable(text)
        if clickable is None:
            return None
        state = self.state
        match clickable.text:
            case "buy now":
                state.page = "done"
                state.reward = self.appraise().reward
                return True
            case "back to search":
                state.page, state.keywords, state.number, state.drawn = "index", None, 1, None
                state.asin, state.sub_page, state.opened, state.options = "", "", [], {}
                return True
            case "next >" | "< prev" as text:
                page = state.page_by_address()
                if page == "search_results":
                    return self._show_results(state.keywords or [], state.number + (1 if text == "next >" else -1))
                if text == "< prev" and page == "item_page":
                    return self._show_results(state.keywords or [], state.number)
                if text == "< prev":
                    state.page = "item_page"
                    return True
            case text if text in _SUB_PAGE:
                state.page, state.sub_page = "item_sub_page", _SUB_PAGE[text]
                return True
        if clickable.kind == "product":
            state.page, state.asin = "item_page", clickable.value
            if clickable.value not in state.opened:
                state.opened.append(clickable.value)
            return True
        has_changed = state.options.get(clickable.value) != clickable.text
        state.options[clickable.value] = clickable.text
        return has_changed

    def _show_results(self, keywords: list[str], number: int) -> bool:
        if keywords[0] == "<r>":
            size = self._cache.size
            drawn = self.stream().sample(range(size), min(HITS, size))
        else:
            self._cache.find(keywords)
            drawn = None
        state = self.state
        has_changed = drawn is not None or (state.page, state.number, state.keywords) != (
            "search_results",
            number,
            keywords,
        )
        state.page, state.keywords, state.number, state.drawn = "search_results", keywords, number, drawn
        state.asin, state.sub_page, state.options, state.reward = "", "", {}, None
        return has_changed

    # --- grades --------------------------------------------------------------------------------------------------

    def appraise(self) -> Grade:
        """Grade the purchase of the open product with the chosen options. Raises ValueError if none is open."""
        state, item = self.state, self.item()
        if item is None:
            raise ValueError("no product is open")
        key = (state.asin, tuple(state.options.items()))
        if self._appraised is None or self._appraised[0] != key:
            self._appraised = (key, self.worth(item, state.options))
        return self._appraised[1]

    def worth(self, item: ShopItem, options: Mapping[str, str]) -> Grade:
        """Grade the purchase of a product with these options (group -> value)."""
        goal, stock = self.goal, self.stock
        price = float(stock.prices[item.position])
        target = self.item_at(goal.position).product
        return grade(item.product, goal, target, price, options, stock.tagger, self.ratio)

    @property
    def grade(self) -> Grade | None:
        """The grade of the purchase; None before the final page."""
        return self.appraise() if self.state.page == "done" else None
