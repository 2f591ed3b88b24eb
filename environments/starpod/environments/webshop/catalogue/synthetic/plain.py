"""A catalogue of few words: short titles, one or two options, for policies that learn from scratch on a CPU."""

from __future__ import annotations

import itertools
import random as randoms
import string
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from starpod.environments.webshop.catalogue.synthetic.kind import UNUSED, split
from starpod.environments.webshop.catalogue.synthetic.wording import Random, a, title

_T = TypeVar("_T")


class _Plain(NamedTuple):
    """A kind of product: where it stands, what it is called, the options that it comes in, and what it may be."""

    category: str
    query: str
    noun: str
    options: str
    attributes: str


_KINDS = (
    _Plain(
        "fashion",
        "shirts",
        "shirt",
        "color, size",
        "slim fit, long sleeve, soft cotton, v neck, classic fit, button down",
    ),
    _Plain(
        "fashion",
        "shoes",
        "shoes",
        "color, size",
        "non slip, rubber sole, light weight, memory foam, arch support, quick dry",
    ),
    _Plain(
        "garden", "lamps", "lamp", "color", "glass shade, steel frame, easy clean, home office, long lasting, wood base"
    ),
    _Plain(
        "garden",
        "blankets",
        "blanket",
        "color, size",
        "super soft, machine wash, soft cotton, light weight, hand made, super warm",
    ),
    _Plain(
        "beauty", "soaps", "soap", "scent", "tea tree, dry skin, plant based, long lasting, cruelty free, natural oils"
    ),
    _Plain(
        "electronics",
        "speakers",
        "speaker",
        "color",
        "water proof, easy carry, long lasting, usb port, high quality, fast charge",
    ),
    _Plain(
        "grocery",
        "cookies",
        "cookies",
        "flavor, pack",
        "gluten free, sugar free, plant based, real butter, low fat, hand made",
    ),
    _Plain(
        "grocery",
        "teas",
        "tea",
        "flavor",
        "sugar free, fair trade, natural leaves, caffeine free, plant based, low sugar",
    ),
)
_VALUES = {
    "color": split("red, blue, green, black, white, yellow"),
    "size": split("small, medium, large"),
    "scent": split("rose, lemon, mint, honey"),
    "flavor": split("lemon, mint, honey, peach, apple"),
    "pack": split("4 pack, 8 pack"),
}
_PRICES = tuple(f"${dollars}.00" for dollars in range(9, 309, 10))
_ASKED = ("i need {}", "i want {}", "find me {}", "i am looking for {}")


def plain_products(count: int, seed: int) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]]:
    """Products in the original's raw schema, the kinds in turn; those of a kind have two of its attributes each.

    A kind has 15 pairs of attributes. The first 120 products are therefore all told apart by what they are. Numbers are
    short, A0 to Z0, A1 and so on: they are read and copied in two pieces.
    """
    random = randoms.Random(seed).random
    pairs = [_shuffled(random, list(itertools.combinations(split(kind.attributes), 2))) for kind in _KINDS]
    for number in range(count):
        turn, which = divmod(number, len(_KINDS))
        kind, has = _KINDS[which], pairs[which][turn % len(pairs[which])]
        product_asin = f"{string.ascii_uppercase[number % 26]}{number // 26}"
        options = {group: _some(random, _VALUES[group]) for group in split(kind.options)}
        chosen = [values[int(random() * len(values))] for values in options.values()]
        record = {
            "asin": product_asin,
            "name": title(f"{' '.join(has)} {kind.noun}"),
            "full_description": f"A good choice: {kind.noun}, {has[0]}, {has[1]}.",
            "pricing": _PRICES[int(random() * len(_PRICES))],
            "images": [f"https://images.example.com/I/{product_asin}-1.jpg"],
            "product_category": f"{title(kind.category)} \u203a {title(kind.query)}",
            "small_description": [title(attribute) for attribute in has],
            "customization_options": {
                title(group): [{"value": value, "is_selected": False, "image": None} for value in values]
                for group, values in options.items()
            },
            "category": kind.category,
            "query": kind.query,
            "average_rating": "",
            "page": 1,
            **UNUSED,
        }
        entry = {
            "attributes": list(has),
            "instruction": f"Find me {has[0]}, {has[1]} {kind.query}",
            "instruction_attributes": list(has),
        }
        asked = _ASKED[int(random() * len(_ASKED))].format(a(f"{has[0]} {has[1]} {kind.noun}"))
        instruction = {
            "asin": product_asin,
            "instruction": f"{asked}, {', '.join(chosen)}",
            "attributes": list(has),
            "options": [f"{group}: {value}" for group, values in options.items() for value in values],
            "instruction_attributes": list(has),
            "instruction_options": chosen,
            "assignment_id": "",
            "worker_id": "",
        }
        yield record, entry, [instruction]


def _some(random: Random, values: tuple[str, ...]) -> list[str]:
    """Two or three of the values, in their order."""
    some = _shuffled(random, list(values))[: 2 + int(random() * 2)]
    return [value for value in values if value in some]


def _shuffled(random: Random, left: list[_T]) -> list[_T]:
    return [left.pop(int(random() * len(left))) for _ in range(len(left))]
