"""Documents of the recorded catalogues."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from starpod.env_server.webshop.records import Malformed, read_products
from tests.golden import ROOT


@functools.cache
def real_documents() -> list[tuple[str, str]]:
    """Asin and text of the 1,000 real products; skips the test where they are absent."""
    folder = ROOT / "webshop_data"
    return _documents(folder / "items_shuffle_1000.reconstructed.json", folder / "items_ins_v2_1000.json")


@functools.cache
def synthetic_documents(size: str) -> list[tuple[str, str]]:
    """The same of a synthetic catalogue, 1k or 10k."""
    folder = ROOT / "webshop_golden" / "catalogue" / size
    return _documents(folder / "items_shuffle.json.gz", folder / "items_ins_v2.json.gz")


def _documents(products: Path, attributes: Path) -> list[tuple[str, str]]:
    if not products.is_file():
        pytest.skip(f"no golden data at {products}; STARPOD_GOLDEN names the folder that holds it")
    return [
        (product.asin, product.index_text())
        for product in read_products(products, attributes, None, on_malformed=_refuse)
    ]


def _refuse(found: Malformed) -> None:
    raise AssertionError(found)
