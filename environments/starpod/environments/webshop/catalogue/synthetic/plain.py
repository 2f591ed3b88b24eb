"""Products with a small vocabulary, short titles and one or two options, for policies that learn from scratch."""

from __future__ import annotations

import itertools
import random as randoms
import string
from collections.abc import Iterator
from typing import Any, TypeVar

from .names import Random, pick
from .people import human_record
from .vocabulary import COMMON, UNUSED, split
from .wording import a, title

_T = TypeVar("_T")

_WORDS = COMMON["plain"]
_KINDS: list[dict[str, str]] = _WORDS["kinds"]
_PRICES = tuple(f"${dollars}.00" for dollars in range(9, 309, 10))


def plain_products(count: int, seed: int) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Generate products in the original WebShop's raw schema. The kinds alternate, and each product has two attributes.

    A kind has 15 pairs of attributes, so kind and attributes identify each of the first 120 products. Asins are short
    (A0 to Z0, A1, ...), so that a tokeniser needs only two tokens for them.
    """
    random = randoms.Random(seed).random
    pairs = [_shuffled(random, list(itertools.combinations(split(kind["attributes"]), 2))) for kind in _KINDS]
    for number in range(count):
        round_, index = divmod(number, len(_KINDS))
        kind, has = _KINDS[index], list(pairs[index][round_ % len(pairs[index])])
        query, noun = kind["query"], kind["noun"]
        asin = f"{string.ascii_uppercase[number % 26]}{number // 26}"
        options = {group: _some(random, split(_WORDS["values"][group])) for group in split(kind["options"])}
        choices = [pick(random, values) for values in options.values()]
        record = {
            "asin": asin,
            "name": title(f"{' '.join(has)} {noun}"),
            "full_description": f"A good choice: {noun}, {has[0]}, {has[1]}.",
            "pricing": pick(random, _PRICES),
            "images": [f"https://images.example.com/I/{asin}-1.jpg"],
            "product_category": f"{title(kind['category'])} \u203a {title(query)}",
            "small_description": [title(attribute) for attribute in has],
            "customization_options": {
                title(group): [{"value": value, "is_selected": False, "image": None} for value in values]
                for group, values in options.items()
            },
            "category": kind["category"],
            "query": query,
            "average_rating": "",
            "page": 1,
            **UNUSED,
        }
        entry = {
            "attributes": has,
            "instruction": f"Find me {has[0]}, {has[1]} {query}",
            "instruction_attributes": has,
        }
        opening = pick(random, _WORDS["openings"]).format(a(f"{has[0]} {has[1]} {noun}"))
        yield record, entry, [human_record(asin, (f"{opening}, {', '.join(choices)}", has, choices), has, options)]


def _some(random: Random, values: tuple[str, ...]) -> list[str]:
    """Draw two or three of the values, and keep their order."""
    sample = _shuffled(random, list(values))[: 2 + int(random() * 2)]
    return [value for value in values if value in sample]


def _shuffled(random: Random, items: list[_T]) -> list[_T]:
    return [items.pop(int(random() * len(items))) for _ in range(len(items))]
