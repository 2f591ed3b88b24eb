"""The text that search sees of a product."""

from dataclasses import FrozenInstanceError, replace

import pytest

from starpod.environments.webshop.catalogue.product import HumanInstruction, Product

PRODUCT = Product(
    asin="B000000001",
    title="Oak Table",
    description="A Table.",
    bullets=("Sturdy ", "Round"),
    category="garden",
    query="console tables",
    product_category="Home \u203a Tables",
    pricing=(45.0,),
    price_tag="$45.0",
    options={"color": ("black", "navy | blue"), "size": ("small",)},
    option_images={},
    attributes=("solid wood",),
    image="1.jpg",
    instruction=None,
    instruction_attributes=(),
    human=(HumanInstruction("i need a table", ("solid wood",), ()),),
)


def test_title_description_first_bullet_and_options_are_indexed_in_lower_case() -> None:
    assert PRODUCT.index_text() == "oak table a table. sturdy  color: black, navy | blue, and size: small"


def test_absent_parts_leave_their_blanks() -> None:
    bare = replace(PRODUCT, description="", bullets=(), options={})
    assert bare.index_text() == "oak table   "


def test_a_group_without_values_is_still_named() -> None:
    assert replace(PRODUCT, options={"color": ()}).index_text().endswith("sturdy  color: ")


def test_products_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PRODUCT.title = "Other"  # type: ignore[misc]
