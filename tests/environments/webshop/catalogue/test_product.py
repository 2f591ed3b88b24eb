"""The text that search sees of a product."""

from tests.environments.webshop.catalogues import made_up


def test_title_description_first_bullet_and_options_are_indexed_in_lower_case() -> None:
    fields = {"title": "Oak Table", "description": "A Table.", "bullets": ("Sturdy ", "Round")}
    table = made_up(**fields, options={"color": ("black", "navy | blue"), "size": ("small",)})
    assert table.index_text() == "oak table a table. sturdy  color: black, navy | blue, and size: small"
    assert made_up(title="Oak Table").index_text() == "oak table   "
    assert made_up(**fields, options={"color": ()}).index_text().endswith("sturdy  color: ")
