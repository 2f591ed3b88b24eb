"""The products of a shop, wherever they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from starpod.environments.webshop.catalogue.product import Product


class Catalogue(Protocol):
    """The loaded products in catalogue order; a position counts from 0. Immutable, safe to read from threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Product:
        """The product at a position. Raises IndexError outside 0 .. len - 1."""
        ...

    def position(self, asin: str) -> int | None:
        """The position of the product with exactly this asin; None if there is none."""
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
