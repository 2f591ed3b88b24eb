"""What the shop needs of its products, wherever they are kept, and a catalogue over a plain list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from starpod.environments.webshop.product import Product


class Catalogue(Protocol):
    """The loaded products in catalogue order; a position counts from 0. Immutable, safe to read from threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Product:
        """The product at a position. Raises IndexError outside 0 .. len - 1."""
        ...

    def position(self, asin: str) -> int | None:
        """Where the product with exactly this asin is; None if there is none."""
        ...

    def in_category(self, category: str) -> Sequence[int]:
        """The positions of the products of a category, ascending."""
        ...

    def with_query(self, query: str) -> Sequence[int]:
        """The positions of the products that were scraped under a query, ascending."""
        ...

    def with_attribute(self, attribute: str) -> Sequence[int]:
        """The positions of the products that have an attribute, ascending."""
        ...


class ListCatalogue:
    """A catalogue in memory, for tests and for what is not worth a store."""

    def __init__(self, products: Iterable[Product]) -> None:
        self._products = list(products)
        self._positions = {product.asin: position for position, product in enumerate(self._products)}
        self._categories: dict[str, list[int]] = {}
        self._queries: dict[str, list[int]] = {}
        self._attributes: dict[str, list[int]] = {}
        for position, product in enumerate(self._products):
            self._categories.setdefault(product.category, []).append(position)
            self._queries.setdefault(product.query, []).append(position)
            for attribute in dict.fromkeys(product.attributes):
                self._attributes.setdefault(attribute, []).append(position)

    def __len__(self) -> int:
        return len(self._products)

    def __getitem__(self, position: int) -> Product:
        if position < 0:
            raise IndexError(position)
        return self._products[position]

    def position(self, asin: str) -> int | None:
        return self._positions.get(asin)

    def in_category(self, category: str) -> Sequence[int]:
        return self._categories.get(category, ())

    def with_query(self, query: str) -> Sequence[int]:
        return self._queries.get(query, ())

    def with_attribute(self, attribute: str) -> Sequence[int]:
        return self._attributes.get(attribute, ())
