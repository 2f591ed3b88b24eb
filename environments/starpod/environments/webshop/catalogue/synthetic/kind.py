"""Kinds of products: the words of their titles, texts, attributes and options."""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("is", "has", "for")
"""How an attribute is said: 'easy clean lamps', 'lamps with glass shade', 'lamps for living room'."""


UNUSED: dict[str, str | None] = {
    "product_information": "",
    "brand": "",
    "brand_url": "",
    "list_price": "",
    "availability_quantity": None,
    "availability_status": "In Stock.",
    "total_reviews": "",
    "total_answered_questions": "",
    "seller_id": "",
    "seller_name": "",
    "fulfilled_by_amazon": "",
    "fast_track_message": "",
    "aplus_present": "",
    "small_description_old": "",
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


def split(text: str) -> tuple[str, ...]:
    """The entries of a list written with commas."""
    return tuple(" ".join(entry.split()) for entry in text.split(","))


def kind(
    category: str,
    query: str,
    path: str,
    *,
    price: tuple[float, float],
    options: dict[str, float],
    nouns: str,
    is_: str,
    has: str,
    for_: str,
    made: str,
    parts: str,
    does: str,
) -> Kind:
    """A kind from lists written with commas; the levels of the path with ' > '."""
    attributes = tuple(
        Attribute(text, role) for role, listed in zip(ROLES, (is_, has, for_), strict=True) for text in split(listed)
    )
    return Kind(
        category=category,
        query=query,
        path=path.replace(" > ", " \u203a "),
        nouns=split(nouns),
        attributes=attributes,
        made=split(made),
        parts=split(parts),
        does=split(does),
        price=price,
        options=tuple(options.items()),
    )
