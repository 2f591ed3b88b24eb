"""Catalogues: one over a list, and one over sections that gives the same."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.environments.webshop.catalogue.product import Catalogue, HumanInstruction, Product
from starpod.environments.webshop.store.mapped import CatalogueWriter, MappedCatalogue, decode, encode
from starpod.environments.webshop.store.sections import map_section
from tests.environments.webshop.catalogues import made_up
from tests.environments.webshop.in_memory import ListCatalogue

texts = st.text(max_size=12)
lists = st.lists(texts, max_size=3).map(tuple)
names = st.sampled_from(["", "a", "ab", "b", "soft", "weiß", "柔らかい", "\x00"])
products = st.builds(
    Product,
    asin=st.text("AB0é", max_size=4),
    title=texts,
    description=texts,
    bullets=lists,
    category=names,
    query=names,
    product_category=texts,
    pricing=st.lists(st.floats(0, 1e6), min_size=1, max_size=2).map(tuple),
    price_tag=texts,
    options=st.dictionaries(texts, lists, max_size=3),
    option_images=st.dictionaries(texts, st.none() | texts, max_size=3),
    attributes=st.lists(names, max_size=4).map(tuple),
    image=texts,
    instruction=st.none() | texts,
    instruction_attributes=lists,
    human=st.lists(st.builds(HumanInstruction, texts, lists, lists), max_size=2).map(tuple),
)
catalogues = st.lists(products, min_size=1, max_size=12, unique_by=lambda product: product.asin)


def write(folder: Path, goods: Sequence[Product], loaded: int) -> tuple[dict[str, np.ndarray], str]:
    with CatalogueWriter(folder) as writer:
        for number, product in enumerate(goods):
            writer.add(product, loaded=number < loaded)
    sections, content = writer.finish()
    return {name: map_section(folder, name, section) for name, section in sections.items()}, content


def expect_equal(ours: Catalogue, wanted: Sequence[Product], others: Sequence[Product] = ()) -> None:
    """Whether a catalogue gives these products, and finds them as a plain search does; and nothing of the others."""
    assert [ours[position] for position in range(len(ours))] == list(wanted)
    for product in (*wanted, *others, made_up(asin="no such", category="no", query="such", attributes=("name",))):
        asins = [each.asin for each in wanted]
        assert ours.position(product.asin) == (asins.index(product.asin) if product.asin in asins else None)
        finds = [(ours.in_category, product.category, lambda each: (each.category,))]
        finds += [(ours.with_query, product.query, lambda each: (each.query,))]
        finds += [(ours.with_attribute, attribute, lambda each: each.attributes) for attribute in product.attributes]
        for find, name, names_of in finds:
            positions = find(name)
            expected = [position for position, each in enumerate(wanted) if name in names_of(each)]
            assert list(positions) == expected and len(positions) == len(expected)
            assert [positions[place] for place in range(len(positions))] == list(positions[:]) == expected
            assert all(type(position) is int for position in positions)


@given(products)
def test_a_product_comes_back_as_it_was(product: Product) -> None:
    assert decode(encode(product)) == product


@given(catalogues, st.integers(0, 12))
def test_catalogues_of_both_kinds_give_what_a_plain_search_finds(goods: list[Product], loaded: int) -> None:
    loaded = min(loaded, len(goods))
    expect_equal(ListCatalogue(goods[:loaded]), goods[:loaded], goods[loaded:])
    with tempfile.TemporaryDirectory() as folder:
        arrays, _ = write(Path(folder), goods, loaded)
        mapped = MappedCatalogue(arrays, loaded)
        expect_equal(mapped, goods[:loaded], goods[loaded:])
        assert list(mapped) == goods[:loaded]
        assert list(mapped.documents()) == [(product.asin, product.index_text()) for product in goods]


def test_positions_outside_raise(tmp_path: Path) -> None:
    goods = [made_up(asin="A"), made_up(asin="B"), made_up(asin="C")]
    for catalogue in (ListCatalogue(goods[:2]), MappedCatalogue(write(tmp_path, goods, 2)[0], 2)):
        for position in (-1, 2, 10**9):
            with pytest.raises(IndexError):
                catalogue[position]


def test_a_second_product_of_an_asin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="asin A occurs twice"):
        write(tmp_path, [made_up(asin="A"), made_up(asin="A")], 2)


def test_the_content_digest_is_that_of_the_products_however_they_lie(tmp_path: Path) -> None:
    goods = [made_up(asin=f"B0{number}") for number in range(300)]
    first, second = ((tmp_path / name) for name in ("a", "b"))
    first.mkdir(), second.mkdir()
    digest = write(first, goods, 300)[1]
    assert write(second, goods, 300)[1] == digest
    goods[299] = made_up(asin="B0299", title="another")
    assert write(second, goods, 300)[1] != digest
