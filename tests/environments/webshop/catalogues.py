"""Catalogues to test with: those of the recordings, real products, and goods made up for one test."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from starpod.environments.webshop.catalogue.product import HumanInstruction, Product
from starpod.environments.webshop.catalogue.records import MalformedRecord, read_products
from tests.environments.webshop.in_memory import ListCatalogue
from tests.golden import ROOT

REAL = ROOT / "webshop_data"


def real_data(name: str) -> Path:
    """A file of real data; skips the test, with the reason, where it is absent."""
    if not (REAL / name).exists():
        pytest.skip(f"no real data at {REAL / name}; STARPOD_GOLDEN names the folder that holds webshop_data/")
    return REAL / name


@cache
def recorded(name: str, rows: int | None = None) -> ListCatalogue:
    """Return a catalogue of the recordings (`1k` or `10k`), cut to `rows` rows before any product is left out."""
    folder = ROOT / "webshop_golden" / "catalogue" / name
    files = [folder / f"{stem}.json.gz" for stem in ("items_shuffle", "items_ins_v2", "items_human_ins")]
    if not all(file.is_file() for file in files):
        pytest.skip(f"no golden data at {folder}; STARPOD_GOLDEN names the folder that holds webshop_golden/")
    return ListCatalogue(read_products(*files, rows=rows, on_malformed=_refuse))


@cache
def real() -> ListCatalogue:
    """The 1,000 real products, with the 13 human instructions that belong to them."""
    stems = ("items_shuffle_1000.reconstructed", "items_ins_v2_1000", "items_human_ins.subset13")
    return ListCatalogue(read_products(*(real_data(f"{stem}.json") for stem in stems), on_malformed=_refuse))


def real_sessions() -> list[Any]:
    """The last line of each session of real shoppers: goal, purchase, reward and what it is made of."""
    lines = [file.read_text(encoding="utf-8").splitlines()[-1] for file in sorted(real_data("mturk_trajs").iterdir())]
    return [json.loads(line) for line in lines]


def made_up(**fields: Any) -> Product:
    """A product of which only the given fields matter."""
    return replace(_PLAIN, **fields)


def asked(text: str, attributes: tuple[str, ...] = ("soft",), options: tuple[str, ...] = ()) -> HumanInstruction:
    return HumanInstruction(text, attributes, options)


def _refuse(malformed: MalformedRecord) -> None:
    raise AssertionError(str(malformed))


_PLAIN = Product(
    asin="B000000001", title="", description="", bullets=(), category="garden", query="", product_category="",
    pricing=(10.0,), price_tag="$10.0", options={}, option_images={}, attributes=(), image="", instruction=None,
    instruction_attributes=(), human=(),
)  # fmt: skip
