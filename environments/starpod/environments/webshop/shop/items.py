"""Items, listings and their clickable texts, in bounded caches that all sessions of a store share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from starpod.environments.webshop.catalogue.product import Catalogue, Product
    from starpod.environments.webshop.search.nouns import Tagger

HITS: Final = 50
"""Maximum number of results of a search for words."""
LONGEST_KEPT: Final = 1000
"""Maximum number of characters of a search whose results are cached."""
SUB_PAGES: Final = ("Description", "Features", "Reviews", "Attributes")
"""The parts of a product that are shown on separate pages."""


class Clickable(NamedTuple):
    """A clickable text of a page."""

    text: str
    """The argument of the click, in lower case."""
    kind: Literal["button", "product", "option"]
    """A button of the page, a product in a page of results, or a value of an option."""
    value: str = ""
    """The product's asin, or the option's group; "" for a button."""


SEARCH, BACK, PREVIOUS, NEXT, BUY = (
    Clickable(text, "button") for text in ("search", "back to search", "< prev", "next >", "buy now")
)
ON_SUB_PAGES: Mapping[str, Clickable] = {button.text: button for button in (BACK, PREVIOUS)}


class Searcher(Protocol):
    """The part of an index that the shop needs."""

    def search(self, query: str, k: int = HITS) -> Sequence[int]:
        """Return the numbers of the k best documents, best first. Raises TooManyTerms."""


class Stock(Hashable, Protocol):
    """The part of a store that the shop needs. It is hashed by identity, so that all its sessions share a cache."""

    @property
    def catalogue(self) -> Catalogue: ...
    @property
    def index(self) -> Searcher: ...
    @property
    def prices(self) -> Sequence[float] | Any: ...
    @property
    def tagger(self) -> Tagger: ...


class ShopItem:
    """A product with the clickable texts of its page. There is one object per product, so it can be a cache key."""

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
            for value in values:  # a value replaces a button or an earlier group's value with the same text
                clickables[value] = Clickable(value, "option", group)
        self.clickables: Mapping[str, Clickable] = clickables


class ResultEntry(NamedTuple):
    """A product as shown in a page of results."""

    asin: str
    title: str
    price_tag: str


class Listing:
    """The products of one page of results. There is one object per page, so it can be a cache key."""

    __slots__ = ("__weakref__", "_catalogue", "entries", "links", "positions")

    def __init__(self, catalogue: Catalogue, positions: tuple[int, ...]) -> None:
        self._catalogue = catalogue
        self.positions = positions
        self.entries = tuple(ResultEntry(product.asin, product.title, product.price_tag) for product in self.products)
        self.links: Mapping[str, Clickable] = {
            entry.asin.lower(): Clickable(entry.asin.lower(), "product", entry.asin) for entry in self.entries
        }

    @property
    def products(self) -> tuple[Product, ...]:
        """The complete products. They are read on each access, because keeping them would fill the memory."""
        return tuple(self._catalogue[position] for position in self.positions)


class StoreCache:
    """Bounded caches of a store's items, listings and search results. All sessions of the store share them."""

    def __init__(self, stock: Stock) -> None:
        self.stock = stock
        self.size = len(stock.catalogue)
        self.item = lru_cache(2048)(self._item)
        self.listing = lru_cache(2048)(self._listing)
        self.found = lru_cache(4096)(self._search)

    def _item(self, position: int, show_attributes: bool) -> ShopItem:
        return ShopItem(self.stock.catalogue[position], position, show_attributes)

    def _listing(self, positions: tuple[int, ...]) -> Listing:
        return Listing(self.stock.catalogue, positions)

    def _search(self, query: str) -> tuple[int, ...]:
        # The index may hold products that are not loaded. These take up places in the ranking, but are not shown.
        return tuple(hit for hit in self.stock.index.search(query, HITS) if hit < self.size)

    def find(self, keywords: Sequence[str]) -> Sequence[int]:
        """Return the positions of the products that a search finds (any search except `<r>`). Raises TooManyTerms."""
        mark, text = keywords[0], " ".join(keywords[1:]).strip()
        match mark:
            case "<a>":
                return self.stock.catalogue.with_attribute(text)
            case "<c>":  # only the first word counts
                return self.stock.catalogue.in_category(keywords[1].strip()) if len(keywords) > 1 else ()
            case "<q>":
                return self.stock.catalogue.with_query(text)
        query = " ".join(keywords)
        return self.found(query) if len(query) <= LONGEST_KEPT else self._search(query)


@lru_cache(maxsize=8)
def cache_of(stock: Stock) -> StoreCache:
    """Return the process's cache for a store."""
    return StoreCache(stock)
