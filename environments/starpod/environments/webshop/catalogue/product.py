"""A product after cleaning by the original WebShop's rules, the human instructions for it, and the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """A person's instruction: the text, and the attributes and option values (without groups) that they chose."""

    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Product:
    """A cleaned product. Its dicts must not be modified."""

    asin: str
    """Unique id of at most 10 characters."""
    title: str
    description: str
    bullets: tuple[str, ...]
    category: str
    """Department of the shop."""
    query: str
    """Sub-category under which the product was found, in lower case."""
    product_category: str
    """Path of categories, joined by " \u203a " (U+203A)."""
    pricing: tuple[float, ...]
    """One or two prices in dollars, in the order of the record."""
    price_tag: str
    """Text that shows the prices."""
    options: dict[str, tuple[str, ...]]
    """Values of each group, in lower case and in the order of the record. A value can occur twice."""
    option_images: dict[str, str | None]
    """Address of the picture of each option's value; None if it has none."""
    attributes: tuple[str, ...]
    image: str
    instruction: str | None
    """Synthetic instruction, if any."""
    instruction_attributes: tuple[str, ...]
    human: tuple[HumanInstruction, ...]

    def index_text(self) -> str:
        """Return the indexed text: title, description, first bullet and options."""
        options = ", and ".join(f"{group}: {', '.join(values)}" for group, values in self.options.items())
        return " ".join((self.title, self.description, self.bullets[0] if self.bullets else "", options)).lower()


class Catalogue(Protocol):
    """The loaded products, by position from 0. A catalogue is immutable and safe to use from many threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> Product:
        """Return the product at a position. Raises IndexError outside 0 .. len - 1."""

    def position(self, asin: str) -> int | None:
        """Return the position of the product with exactly this asin, or None."""

    def in_category(self, category: str) -> Sequence[int]:
        """Return the positions of the products of a category, ascending."""

    def with_query(self, query: str) -> Sequence[int]:
        """Return the positions of the products that were found under a query, ascending."""

    def with_attribute(self, attribute: str) -> Sequence[int]:
        """Return the positions of the products that have an attribute, ascending."""
