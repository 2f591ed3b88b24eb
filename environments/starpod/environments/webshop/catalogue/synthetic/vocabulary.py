"""Words of the generator, as the files in `words` list them: kinds of products, their options, names and texts."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

ROLES = ("is", "has", "for")
"""How an attribute is said: 'easy clean lamps', 'lamps with glass shade', 'lamps for living room'."""

UNUSED: dict[str, str | None] = {
    **dict.fromkeys(("product_information", "brand", "brand_url", "list_price"), ""),
    "availability_quantity": None,
    "availability_status": "In Stock.",
    **dict.fromkeys(("total_reviews", "total_answered_questions", "seller_id", "seller_name"), ""),
    **dict.fromkeys(("fulfilled_by_amazon", "fast_track_message", "aplus_present", "small_description_old"), ""),
}
"""Fields that the original's loader insists on and throws away."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute and its role, one of ROLES."""

    text: str
    role: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of product.

    category, query, path: as in a record; path with U+203A.
    nouns: names of the product, singular, lower-case.
    attributes: what products of the kind may be, have or be for.
    made: materials or ingredients.
    parts: what it consists of.
    does: what it does, in the third person.
    price: lowest and highest in dollars.
    options: (generator of options, share of the products that have it).
    uses, sentences: what products of the department are good for, and templates of what is said of them.
    """

    category: str
    query: str
    path: str
    nouns: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    made: tuple[str, ...]
    parts: tuple[str, ...]
    does: tuple[str, ...]
    price: tuple[float, float]
    options: tuple[tuple[str, float], ...]
    uses: tuple[str, ...]
    sentences: tuple[str, ...]


def split(text: str) -> tuple[str, ...]:
    """The entries of a list written with commas."""
    return tuple(text.split(", "))


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("words", f"{name}.toml").read_text("utf-8"))


def _department(category: str) -> tuple[Kind, ...]:
    words = _read(category)
    return tuple(
        Kind(
            category=category,
            query=kind["query"],
            path=kind["path"].replace(" > ", " \u203a "),
            nouns=split(kind["nouns"]),
            attributes=tuple(Attribute(text, role) for role in ROLES for text in split(kind[role])),
            made=split(kind["made"]),
            parts=split(kind["parts"]),
            does=split(kind["does"]),
            price=tuple(kind["price"]),
            options=tuple(kind["options"].items()),
            uses=split(words["uses"]),
            sentences=tuple(words["sentences"]),
        )
        for kind in words["kinds"]
    )


def _options(listed: dict[str, dict[str, str | list[str]]]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Generator -> name of the group, and values: one list, or the pairs of two."""
    options = {}
    for generator, groups in listed.items():
        ((group, values),) = groups.items()
        lists = [values] if isinstance(values, str) else values
        options[generator] = (group, tuple(map(" ".join, itertools.product(*map(split, lists)))))
    return options


COMMON = _read("common")
"""The words that are no single department's."""
DEPARTMENTS = tuple(map(_department, ("beauty", "electronics", "garden", "fashion", "grocery")))
ORDERED = _options(COMMON["ordered"])
"""Generator -> name of the group, and values from which a run is taken."""
DRAWN = _options(COMMON["drawn"])
"""Generator -> name of the group, and values of which some are drawn."""
