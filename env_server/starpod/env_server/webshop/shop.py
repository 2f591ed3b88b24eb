"""The shop as a state machine: what a page shows, what can be clicked there, and what clicks and searches change."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from starpod.env_server.webshop.catalogue import Catalogue
    from starpod.env_server.webshop.fuzzy import Ratio
    from starpod.env_server.webshop.goals import Goal
    from starpod.env_server.webshop.nouns import Tagger
    from starpod.env_server.webshop.product import Product
    from starpod.env_server.webshop.reward import Grade

HOME = "http://127.0.0.1:3000"
"""What the addresses begin with. They are shown and looked at, never opened."""
HITS = 50
"""The most products that a search for words finds."""
PAGE_SIZE = 10
"""Products on a page of results."""
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
"""The parts of a product that have pages of their own."""

Page = Literal["index", "search_results", "item_page", "item_sub_page", "done"]
_PAGES: tuple[Page, ...] = ("search_results", "item_page", "item_sub_page", "done")
_SUB_PAGE = {name.lower(): name for name in SUB_PAGES}


class Clickable(NamedTuple):
    """What can be clicked. `text` is what to click, in lower case.

    kind: a caption of the page's own, a product of a page of results, or a value of an option.
    value: the product's asin, or the option's group; empty for a caption.
    """

    text: str
    kind: Literal["button", "product", "option"]
    value: str = ""


_SEARCH, _BACK, _PREVIOUS, _NEXT, _BUY = (
    Clickable(text, "button") for text in ("search", "back to search", "< prev", "next >", "buy now")
)
_INDEX = {_SEARCH.text: _SEARCH}
_SUB = {button.text: button for button in (_BACK, _PREVIOUS)}


@dataclass(slots=True)
class ShopState:
    """Where a session is, in plain values that snapshot.

    goal: index into the goals. session: the name in the addresses.
    keywords: words of the search; None before the first. number: the page of its results; it has no upper end.
    asin: the product that is open or bought; empty on the index and on results. sub_page: one of `SUB_PAGES`.
    opened: asins since the last visit of the index, in order. options: chosen values by group, in order.
    drawn: positions that `search[<r>]` drew; None for any other search.
    reward: the raw score of the purchase on the final page, in [0, 1].
    """

    goal: int
    session: str
    page: Page = "index"
    keywords: list[str] | None = None
    number: int = 1
    asin: str = ""
    sub_page: str = ""
    opened: list[str] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    drawn: list[int] | None = None
    reward: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """A copy as plain values; `ShopState(**state.as_dict())` is an equal state."""
        return asdict(self)


class Searcher(Protocol):
    """The index, as far as the shop needs it."""

    def search(self, query: str, k: int = HITS) -> Sequence[int]:
        """The best documents, best first. Raises TooManyTerms."""
        ...


class Stock(Hashable, Protocol):
    """What the shop needs of a store. Hashable by identity: sessions of one store share what is worked out once."""

    @property
    def catalogue(self) -> Catalogue: ...
    @property
    def index(self) -> Searcher: ...
    @property
    def prices(self) -> Sequence[float] | Any: ...
    @property
    def tagger(self) -> Tagger: ...


class GoalList(Protocol):
    """The goals, as far as the shop needs them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Goal: ...


class Item:
    """A product and what can be clicked on its page. One per product: what is made of it can be kept by identity."""

    __slots__ = ("__weakref__", "clickables", "position", "product", "show_attributes")

    def __init__(self, product: Product, position: int, show_attributes: bool) -> None:
        self.product = product
        self.position = position
        self.show_attributes = show_attributes
        clickables = dict(_SUB)
        for name in SUB_PAGES if show_attributes else SUB_PAGES[:3]:
            clickables[name.lower()] = Clickable(name.lower(), "button")
        clickables[_BUY.text] = _BUY
        for group, values in product.options.items():
            for value in values:  # a value named like a caption takes its place; one of two groups is the last one's
                clickables[value] = Clickable(value, "option", group)
        self.clickables: Mapping[str, Clickable] = clickables


class Listing:
    """The products of one page of results. One per page, like `Item`."""

    __slots__ = ("__weakref__", "links", "positions", "products")

    def __init__(self, positions: tuple[int, ...], products: tuple[Product, ...]) -> None:
        self.positions = positions
        self.products = products
        self.links: Mapping[str, Clickable] = {
            product.asin.lower(): Clickable(product.asin.lower(), "product", product.asin) for product in products
        }


Key = TypeVar("Key")
Value = TypeVar("Value")


class Kept(dict[Key, Value], Generic[Key, Value]):
    """Values by key, made when first asked for; beyond `limit` the oldest goes. Safe to use from threads."""

    def __init__(self, limit: int, make: Callable[[Key], Value]) -> None:
        super().__init__()
        self._limit = limit
        self._make = make
        self._lock = threading.Lock()

    def __missing__(self, key: Key) -> Value:
        value = self._make(key)
        with self._lock:
            while len(self) >= self._limit:
                del self[next(iter(self))]
            self[key] = value
        return value


class Shelves:
    """What all sessions of a store share: items, pages and results that were asked for lately, within bounds."""

    def __init__(self, stock: Stock) -> None:
        self.stock = stock
        self.size = len(stock.catalogue)
        self.items: Kept[tuple[int, bool], Item] = Kept(4096, self._item)
        self.listings: Kept[tuple[int, ...], Listing] = Kept(2048, self._listing)
        self.found: Kept[str, tuple[int, ...]] = Kept(4096, self._search)

    def _item(self, key: tuple[int, bool]) -> Item:
        position, show_attributes = key
        return Item(self.stock.catalogue[position], position, show_attributes)

    def _listing(self, positions: tuple[int, ...]) -> Listing:
        return Listing(positions, tuple(self.stock.catalogue[position] for position in positions))

    def _search(self, query: str) -> tuple[int, ...]:
        # The index may hold products that are not loaded: they count among the best and are not shown.
        return tuple(hit for hit in self.stock.index.search(query, HITS) if hit < self.size)

    def find(self, keywords: Sequence[str]) -> Sequence[int]:
        """The positions that a search finds, all but `<r>`'s. Raises TooManyTerms."""
        first, rest = keywords[0], " ".join(keywords[1:]).strip()
        match first:
            case "<a>":
                return self.stock.catalogue.with_attribute(rest)
            case "<c>":  # the first word alone
                return self.stock.catalogue.in_category(keywords[1].strip()) if len(keywords) > 1 else ()
            case "<q>":
                return self.stock.catalogue.with_query(rest)
        return self.found[" ".join(keywords)]


@lru_cache(maxsize=8)
def shelves_of(stock: Stock) -> Shelves:
    """The shelves of a store, one per process."""
    return Shelves(stock)


class Shop:
    """A session in a store: its state, and what follows from it. The state is the only thing that changes.

    goals: what `state.goal` counts in. stream: where `search[<r>]` draws from. ratio: how options are compared.
    """

    def __init__(
        self,
        stock: Stock,
        goals: GoalList,
        state: ShopState,
        *,
        show_attributes: bool = False,
        ratio: Ratio = "difflib",
        stream: Callable[[], random.Random] = random.Random,
    ) -> None:
        self.stock = stock
        self.goals = goals
        self.state = state
        self.show_attributes = show_attributes
        self.ratio: Ratio = ratio
        self._stream = stream
        self._shelves = shelves_of(stock)
        self._appraised: tuple[Any, Grade] | None = None

    @cached_property
    def goal(self) -> Goal:
        return self.goals[self.state.goal]

    @property
    def instruction(self) -> str:
        return self.goal.instruction_text

    # --- what the page shows -------------------------------------------------------------------------------------

    @property
    def has_search_bar(self) -> bool:
        return self.state.page == "index"

    def hits(self) -> Sequence[int]:
        """The positions of all hits of the current search, best first; empty before the first."""
        state = self.state
        if state.drawn is not None:
            return state.drawn
        return () if state.keywords is None else self._shelves.find(state.keywords)

    def page_hits(self) -> Sequence[int]:
        """The positions on this page of results: at most `PAGE_SIZE`, none beyond the ends."""
        number = self.state.number
        return self.hits()[(number - 1) * PAGE_SIZE : number * PAGE_SIZE] if number > 0 else ()

    def listing(self) -> Listing:
        """The products on this page of results."""
        return self._shelves.listings[tuple(map(int, self.page_hits()))]

    def item(self) -> Item | None:
        """The product that is open or bought; None on the index and on results."""
        position = self.stock.catalogue.position(self.state.asin) if self.state.asin else None
        return None if position is None else self._shelves.items[position, self.show_attributes]

    def clickables(self) -> Mapping[str, Clickable]:
        """What can be clicked, by its text, in the page's order. `search` stands for the search bar."""
        state = self.state
        match state.page:
            case "index":
                return _INDEX
            case "search_results":
                buttons = (_BACK, _PREVIOUS, _NEXT) if state.number > 1 else (_BACK, _NEXT)
                return {**{button.text: button for button in buttons}, **self.listing().links}
            case "item_page":
                item = self.item()
                assert item is not None
                return item.clickables
            case "item_sub_page":
                return _SUB
        return {}

    def clickable(self, text: str) -> Clickable | None:
        """What a click on this text (in any case) would hit; None if nothing."""
        text = text.lower()
        return None if text == _SEARCH.text else self.clickables().get(text)

    def address(self) -> str:
        """The address of the page. Keywords are joined by '+' and nothing is escaped."""
        state = self.state
        words = "+".join(state.keywords or ())
        match state.page:
            case "index":
                return f"{HOME}/{state.session}"
            case "search_results":
                return f"{HOME}/search_results/{state.session}/{words}/{state.number}"
            case "item_page":
                options = json.dumps(state.options)
                return f"{HOME}/item_page/{state.session}/{state.asin}/{words}/{state.number}/{options}"
            case "item_sub_page":
                place = f"{state.session}/{state.asin}/{words}/{state.number}/{state.sub_page}"
                return f"{HOME}/item_sub_page/{place}/{state.options}"
        return f"{HOME}/done/{state.session}/{state.asin}/{state.options}"

    # --- what the agent does -------------------------------------------------------------------------------------

    def search(self, text: str) -> bool:
        """Searches, from whatever page. Says whether that changed anything.

        Raises TooManyTerms, with nothing changed.
        """
        return self._show_results(text.lower().split(" "), 1)

    def click(self, text: str) -> bool | None:
        """Clicks what has this text, in any case. Says whether that changed anything; None if nothing has it."""
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
                page = self._page_by_address()
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
        changed = state.options.get(clickable.value) != clickable.text
        state.options[clickable.value] = clickable.text
        return changed

    def _show_results(self, keywords: list[str], number: int) -> bool:
        if keywords[0] == "<r>":
            size = self._shelves.size
            drawn = self._stream().sample(range(size), min(HITS, size))
        else:
            self._shelves.find(keywords)
            drawn = None
        state = self.state
        changed = drawn is not None or (state.page, state.number, state.keywords) != (
            "search_results",
            number,
            keywords,
        )
        state.page, state.keywords, state.number, state.drawn = "search_results", keywords, number, drawn
        state.asin, state.sub_page, state.options, state.reward = "", "", {}, None
        return changed

    def _page_by_address(self) -> Page:
        """The page as the original knows it: the first of these names anywhere in the address, keywords included."""
        address = self.address()
        return next((page for page in _PAGES if page in address), "index")

    # --- what it is worth ----------------------------------------------------------------------------------------

    def appraise(self) -> Grade:
        """What buying the open product with the chosen options is worth, or was. Raises ValueError if none is open."""
        from starpod.env_server.webshop.reward import grade

        state, item = self.state, self.item()
        if item is None:
            raise ValueError("no product is open")
        key = (state.asin, tuple(state.options.items()))
        if self._appraised is None or self._appraised[0] != key:
            goal, stock = self.goal, self.stock
            price = float(stock.prices[item.position])
            target = stock.catalogue[goal.position]
            worth = grade(item.product, goal, target, price, state.options, stock.tagger, self.ratio)
            self._appraised = (key, worth)
        return self._appraised[1]

    @property
    def grade(self) -> Grade | None:
        """How the purchase was graded; None unless this is the final page."""
        return self.appraise() if self.state.page == "done" else None
