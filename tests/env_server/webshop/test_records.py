"""Records become products as in the original, and what is not a record is said with its place."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server.webshop import jsonstream
from starpod.env_server.webshop.jsonstream import BrokenJson, elements
from starpod.env_server.webshop.product import Product
from starpod.env_server.webshop.records import Malformed, read_products
from tests.golden import ROOT, golden


def refuse(malformed: Malformed) -> None:
    raise AssertionError(str(malformed))


def record(**changed: Any) -> dict[str, Any]:
    """A sound record of a product, with some fields changed; a field given as ... is left out."""
    sound = {
        "asin": "B000000001",
        "name": "Oak Table",
        "full_description": "A table.",
        "pricing": "$45.00",
        "images": ["https://example.com/1.jpg"],
        "product_category": "Home › Tables",  # noqa: RUF001
        "small_description": ["Sturdy "],
        "customization_options": "",
        "category": "garden",
        "query": " Console Tables ",
    }
    return {key: value for key, value in (sound | changed).items() if value is not ...}


class Files:
    """The three files in a folder, and what is read of them."""

    def __init__(self, folder: Path) -> None:
        self.products, self.attributes, self.human = (folder / f"{name}.json" for name in ("items", "ins", "human"))

    def read(
        self, products: Any, attributes: Any = None, human: Any = None, rows: int | None = None
    ) -> tuple[list[Product], list[str]]:
        """Products, and what was malformed; a text is written as it is, anything else as JSON."""
        for path, content in zip(
            (self.products, self.attributes, self.human), (products, attributes or {}, human or {}), strict=True
        ):
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        said: list[Malformed] = []
        read = list(read_products(self.products, self.attributes, self.human, rows=rows, on_malformed=said.append))
        return read, [str(malformed) for malformed in said]

    def one(self, **changed: Any) -> Product:
        (product,), said = self.read([record(**changed)])
        assert said == []
        return product


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize(("size", "valid"), [("1k", 989), ("10k", 9883)])
def test_the_recorded_catalogues_load_as_in_the_original(
    size: str, valid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = golden(f"loader_{size}", "webshop_golden")
    folder = ROOT / "webshop_golden" / "catalogue" / size
    names = ("items_shuffle", "items_ins_v2", "items_human_ins")
    products = list(read_products(*(folder / f"{name}.json.gz" for name in names), on_malformed=refuse))
    assert len(products) == len(recorded) == valid
    for product, original in zip(products, recorded, strict=True):
        text = product.index_text()
        assert original == {
            "asin": product.asin,
            "query": product.query,
            "pricing": list(product.pricing),
            "price_tag": product.price_tag,
            "options": {group: list(values) for group, values in product.options.items()},
            "n_bullets": len(product.bullets),
            "attributes": list(product.attributes),
            "main_image": product.image,
            "n_human_instructions": len(product.human),
            "index_text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "index_text_chars": len(text),
        }, product.asin
        assert list(original["options"]) == list(product.options)
    with capsys.disabled():
        print(f"\nloader {size}: compared {len(products)} products, {11 * len(products)} fields")


def test_the_published_thousand_products(capsys: pytest.CaptureFixture[str]) -> None:
    folder = ROOT / "webshop_data"
    if not folder.is_dir():
        pytest.skip(f"no real products at {folder}")
    products = list(
        read_products(
            folder / "items_shuffle_1000.reconstructed.json",
            folder / "items_ins_v2_1000.json",
            folder / "items_human_ins.subset13.json",
            on_malformed=refuse,
        )
    )
    instructed = [product for product in products if product.instruction is not None]
    facts = {
        "products": len(products),
        "attributes": len({attribute for product in products for attribute in product.attributes}),
        "attributes in instructions": len({one for product in products for one in product.instruction_attributes}),
        "instructed": len(instructed),
        "goals": sum(math.prod(map(len, product.options.values())) for product in instructed),
        "human": sum(len(product.human) for product in products),
        "ranges": sum(len(product.pricing) == 2 for product in products),
        "falling ranges": sum(product.pricing[-1] < product.pricing[0] for product in products),
        "categories": len({product.category for product in products}),
        "queries": len({product.query for product in products}),
    }
    with capsys.disabled():
        print(f"\npublished products: {facts}")
    assert facts == {
        "products": 1000,
        "attributes": 598,
        "attributes in instructions": 261,
        "instructed": 415,
        "goals": 6910,
        "human": 13,
        "ranges": 93,
        "falling ranges": 3,
        "categories": 5,
        "queries": 246,
    }
