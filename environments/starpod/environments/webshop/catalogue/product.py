"""A product of the shop as the original's loader leaves it, what people asked for when shown it, and a catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """A person's request: the text, and the attributes and option values (without group names) they chose."""

    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """One product, cleaned. Immutable by agreement: nobody writes into its dicts.

    asin: unique, at most 10 characters.
    category, query: one of the shop's departments; the sub-category it was found under, lower-cased and stripped.
    product_category: the path of categories, joined by the sign U+203A between blanks.
    pricing, price_tag: one or two numbers in dollars in the order of the record, and the text that shows them.
    options: group -> its values, both lower-cased, in the order of the record. A value may occur twice.
    option_images: value -> address of its picture, one map for all groups.
    instruction, instruction_attributes: the synthetic goal, None and () for a product without one.
    """

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    category: str
    query: str
    product_category: str
    pricing: tuple[float, ...]
    price_tag: str
    options: dict[str, tuple[str, ...]]
    option_images: dict[str, str | None]
    attributes: tuple[str, ...]
    image: str
    instruction: str | None
    instruction_attributes: tuple[str, ...]
    human: tuple[HumanInstruction, ...]

    def index_text(self) -> str:
        """The text that search sees: title, description, first bullet and options; nothing else is indexed."""
        options = ", and ".join(f"{group}: {', '.join(values)}" for group, values in self.options.items())
        return " ".join((self.title, self.description, self.bullets[0] if self.bullets else "", options)).lower()


class Catalogue(Protocol):
    """The loaded products in catalogue order; a position counts from 0. Immutable, safe to read from threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Product:
        """The product at a position. Raises IndexError outside 0 .. len - 1."""

    def position(self, asin: str) -> int | None:
        """The position of the product with exactly this asin; None if there is none."""

    def in_category(self, category: str) -> Sequence[int]:
        """The positions of the products of a category, ascending."""

    def with_query(self, query: str) -> Sequence[int]:
        """The positions of the products that were scraped under a query, ascending."""

    def with_attribute(self, attribute: str) -> Sequence[int]:
        """The positions of the products that have an attribute, ascending."""
