"""A catalogue, its prices and its nouns in plain lists and dictionaries: what stores are compared with."""

import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from starpod.environments.webshop.catalogue.prices import draw_price
from starpod.environments.webshop.catalogue.product import Catalogue, Product


class ListCatalogue:
    """A catalogue over a plain list."""

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


def draw_prices(catalogue: Catalogue, rng: random.Random) -> np.ndarray:
    """The price of every product in dollars, by position, drawn in catalogue order."""
    return np.array([draw_price(catalogue[position].pricing, rng) for position in range(len(catalogue))])


class StandIn:
    """A tagger that finds nouns by a rule, or in a table: then it raises KeyError for other titles."""

    def __init__(self, name: str, nouns: Callable[[str], Sequence[str]]) -> None:
        self.name = name
        self._nouns = nouns

    def nouns(self, title: str) -> tuple[str, ...]:
        return tuple(self._nouns(title))
