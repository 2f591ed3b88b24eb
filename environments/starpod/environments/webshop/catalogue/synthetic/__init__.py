"""Generator of made-up but plausible products in the original WebShop's raw schema, in any number."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from .maker import Maker, Records
from .plain import plain_products

__all__ = ["FILES", "generate", "write_files"]

FILES = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")
"""Names of the original WebShop's files: products, attributes with synthetic instructions, human instructions."""


def generate(count: int, seed: int = 0, *, plain: bool = False) -> Iterator[Records]:
    """Yield the record, the entry of attributes and the human instructions of each generated product.

    The same seed gives the same products in every process. A smaller `count` gives the first of these products.

    Args:
        plain: use short texts with a small vocabulary, for policies that learn from scratch.
    """
    return plain_products(count, seed) if plain else Maker(seed).products(count)


def write_files(
    folder: Path, count: int, seed: int = 0, *, plain: bool = False, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Write FILES into an existing folder, one record per line. `progress` receives the number of products so far."""
    products, attributes, human = (folder / name for name in FILES)
    with (
        products.open("w", encoding="utf-8") as product_file,
        attributes.open("w", encoding="utf-8") as attribute_file,
        human.open("w", encoding="utf-8") as human_file,
    ):
        product_file.write("[")
        attribute_file.write("{")
        human_file.write("{")
        comma, human_comma = "\n", "\n"
        for number, (record, entry, instructions) in enumerate(generate(count, seed, plain=plain), 1):
            asin = json.dumps(record["asin"])
            product_file.write(comma + json.dumps(record))
            attribute_file.write(f"{comma}{asin}: {json.dumps(entry)}")
            comma = ",\n"
            if instructions:
                human_file.write(f"{human_comma}{asin}: {json.dumps(instructions)}")
                human_comma = ",\n"
            if number % 1000 == 0 or number == count:
                progress(number)
        product_file.write("\n]\n")
        attribute_file.write("\n}\n")
        human_file.write("\n}\n")
