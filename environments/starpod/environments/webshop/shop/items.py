"""Items, listings and what can be clicked on them: shared by all sessions of a store in caches with bounds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from starpod.environments.webshop.catalogue.product import Catalogue, Product
    from starpod.environments.webshop.search.nouns import Tagger

HITS: Final = 50
"""The most products that a search for words finds."""
LONGEST_KEPT: Final = 1000
"""Characters of a search whose results are kept."""
SUB_PAGES: Final = ("Description", "Features", "Reviews", "Attributes")
"""The parts of a product that have pages of their own."""


class Clickable(NamedTuple):
    """Something that can be clicked. `text` is what to click, in lower case.

    kind: a caption of the page's own, a product of a page of results, or a value of an option.
    value: the product's asin, or the option's group; empty for a caption.
    """

    text: str
    kind: Literal["button", "product", "option"]
    value: str = ""


SEARCH, BACK, PREVIOUS, NEXT, BUY = (
    Clickable(text, "button") for text in ("search", "back to search", "< prev", "next >", "buy now")
)
ON_SUB_PAGES: Mapping[str, Clickable] = {button.text: button for button in (BACK, PREVIOUS)}


class Searcher(Protocol):
    """The index, as far as the shop needs it."""

    def search(self, query: str, k: int = HITS) -> Sequence[int]:
        """The best documents, best first. Raises TooManyTerms."""


class Stock(Hashable, Protocol):
    """The part of a store that the shop needs. Hashable by identity: sessions of one store share a cache."""

    @property
    def catalogue(self) -> Catalogue: ...
    @property
    def index(self) -> Searcher: ...
    @property
    def prices(self) -> Sequence[float] | Any: ...
    @property
    def tagger(self) -> Tagger: ...


class Item:
    """A product and what can be clicked on its page. One per product: what is made of it can be kept by identity."""

    __slots__ = ("__weakref__", "clickables", "position", "product", "show_attributes")

    def __init__(self, product: Product, position: int, show_attributes: bool) -> None:
        self.product = product
        self.position = position
        self.show_attributes = show_attributes
        clickables = dict(ON_SUB_PAGES)
        for name in SUB_PAGES if show_attributes else SUB_PAGES[:3]:
            clickables[name.lower()] = Clickable(name.lower(), "button")
        clickables[BUY.text] = BUY
        for group, values in product.options.items():
            for value in values:  # a value named like a caption takes its place; one of two groups is the last one's
                clickables[value] = Clickable(value, "option", group)
        self.clickables: Mapping[str, Clickable] = clickables


class Entry(NamedTuple):
    """A product as results show it."""

    asin: str
    title: str
    price_tag: str


class Listing:
    """The products of one page of results. One per page, like `Item`."""

    __slots__ = ("__weakref__", "_catalogue", "entries", "links", "positions")

    def __init__(self, catalogue: Catalogue, positions: tuple[int, ...]) -> None:
        self._catalogue = catalogue
        self.positions = positions
        self.entries = tuple(Entry(each.asin, each.title, each.price_tag) for each in self.products)
        self.links: Mapping[str, Clickable] = {
            entry.asin.lower(): Clickable(entry.asin.lower(), "product", entry.asin) for entry in self.entries
        }

    @property
    def products(self) -> tuple[Product, ...]:
        """The whole products, read again each time: a thousand pages of them would fill the memory."""
        return tuple(self._catalogue[position] for position in self.positions)


class StoreCache:
    """Cache of a store's items, listings and search results, shared by all sessions, within bounds."""

    def __init__(self, stock: Stock) -> None:
        self.stock = stock
        self.size = len(stock.catalogue)
        self.item = lru_cache(2048)(self._item)
        self.listing = lru_cache(2048)(self._listing)
        self.found = lru_cache(4096)(self._search)

    def _item(self, position: int, show_attributes: bool) -> Item:
        return Item(self.stock.catalogue[position], position, show_attributes)

    def _listing(self, positions: tuple[int, ...]) -> Listing:
        return Listing(self.stock.catalogue, positions)

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
        query = " ".join(keywords)
        return self.found(query) if len(query) <= LONGEST_KEPT else self._search(query)


@lru_cache(maxsize=8)
def cache_of(stock: Stock) -> StoreCache:
    """The cache of a store, one per process."""
    return StoreCache(stock)
