"""The generator's vocabulary, from the files in `words`: kinds of products, options, names and texts."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

ROLES = ("is", "has", "for")
"""Roles of attributes in a sentence: 'easy clean lamps', 'lamps with glass shade', 'lamps for living room'."""

UNUSED: dict[str, str | None] = {
    **dict.fromkeys(("product_information", "brand", "brand_url", "list_price"), ""),
    "availability_quantity": None,
    "availability_status": "In Stock.",
    **dict.fromkeys(("total_reviews", "total_answered_questions", "seller_id", "seller_name"), ""),
    **dict.fromkeys(("fulfilled_by_amazon", "fast_track_message", "aplus_present", "small_description_old"), ""),
}
"""Fields that the original WebShop's loader requires but does not use."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute and its role, one of ROLES."""

    text: str
    role: str


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of product."""

    category: str
    query: str
    path: str
    """Path of categories, as in a record."""
    nouns: tuple[str, ...]
    """Names of the product, singular and in lower case."""
    attributes: tuple[Attribute, ...]
    """Possible attributes."""
    made: tuple[str, ...]
    """Materials or ingredients."""
    parts: tuple[str, ...]
    does: tuple[str, ...]
    """Functions of the product, as verbs in the third person."""
    price: tuple[float, float]
    """Lowest and highest price in dollars."""
    options: tuple[tuple[str, float], ...]
    """Generators of options, each with the share of products that have them."""
    uses: tuple[str, ...]
    """Uses of the department's products."""
    sentences: tuple[str, ...]
    """Templates of sentences about the department's products."""


def split(text: str) -> tuple[str, ...]:
    """Split a comma-separated list."""
    return tuple(text.split(", "))


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("words", f"{name}.toml").read_text("utf-8"))


def _department(category: str) -> tuple[Kind, ...]:
    department = _read(category)
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
            uses=split(department["uses"]),
            sentences=tuple(department["sentences"]),
        )
        for kind in department["kinds"]
    )


def _options(listed: dict[str, dict[str, str | list[str]]]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the name of the group and its values, for each generator of options.

    The values are given as one list, or as two lists of which all pairs are values.
    """
    options = {}
    for generator, groups in listed.items():
        ((group, values),) = groups.items()
        lists = [values] if isinstance(values, str) else values
        options[generator] = (group, tuple(map(" ".join, itertools.product(*map(split, lists)))))
    return options


COMMON = _read("common")
"""Words that all departments share."""
DEPARTMENTS = tuple(map(_department, ("beauty", "electronics", "garden", "fashion", "grocery")))
ORDERED = _options(COMMON["ordered"])
"""For each generator of options, the name of the group and its values. A product gets consecutive values."""
DRAWN = _options(COMMON["drawn"])
"""For each generator of options, the name of the group and its values. A product gets values from the whole list."""
