"""Pages as text: which texts count, what is marked, and addresses."""

import re
from dataclasses import replace

from starpod.environments.webshop.catalogue.product import Product
from starpod.environments.webshop.shop import pages
from starpod.environments.webshop.shop.presentation import ADVICE, present
from starpod.environments.webshop.shop.shop import HOME, Shop
from tests.environments.webshop.little import GOAL, PRODUCTS, SANDAL, little_shop

INSTRUCTION = GOAL.instruction_text


def at(product: Product, *clicks: str, query: str = "sandals", show_attributes: bool = False) -> Shop:
    """A shop after a search, a click on this product, and further clicks."""
    shop = little_shop((product, *PRODUCTS[1:]), show_attributes=show_attributes)
    shop.search(query)
    for text in (product.asin, *clicks):
        assert shop.click(text) is not None, text
    return shop


def below(shop: Shop) -> list[str]:
    """The texts of a product's page or sub-page that follow the two buttons at the top."""
    head = f"Instruction: [SEP] {INSTRUCTION} [SEP] Back to Search [SEP] < Prev"
    text = pages.text(shop)
    assert text.startswith(head)
    return text.removeprefix(head).split(" [SEP] ")[1:]


def test_blanks_without_a_line_break_count_and_others_do_not() -> None:
    odd = replace(SANDAL, description=" \t", bullets=("", " \n ", "\u00a0", "a\nb ", "  x"), attributes=("",))
    description = at(odd, "description")
    assert (below(description), pages.rich(description).splitlines()[-1]) == ([""], " ")
    features = at(odd, "features")
    assert below(features) == ["", "", "a\nb", "x"]
    assert pages.rich(features).endswith("[button] < Prev [button_]\n \n \u00a0\n a\nb \n   x\n")
    assert below(at(replace(SANDAL, description="\n"), "description")) == []
    assert below(at(replace(SANDAL, description="", bullets=()), "features")) == []
    assert below(at(SANDAL, "reviews")) == []
    attributes = at(odd, "attributes", show_attributes=True)
    assert below(attributes) == ["", odd.category, odd.query, odd.product_category]


def test_empty_titles_and_values_are_not_shown() -> None:
    odd = replace(SANDAL, title="", options={"": ("", "red")}, price_tag="$1.0")
    shop = little_shop((odd,))
    shop.search("all")
    assert pages.text(shop).endswith("[SEP] B07SANDALS [SEP] $1.0")
    shop.click(odd.asin)
    assert below(shop)[:2] == ["red", "Price: $1.0"]
    assert "" in shop.clickables()
    assert "\n  [button] red [button_]\nPrice" in pages.rich(shop)


def test_clicked_values_are_marked_if_the_address_quotes_them() -> None:
    options: dict[str, tuple[str, ...]] = {"color": ("red", 'a "b"', "açaí"), "size": ("color", "9", "size")}
    both = pages.rich(at(replace(SANDAL, options=options), "red", "9"))
    # The latest in the order of the page stands first; the names of groups are in the address as well.
    assert both.startswith("".join(f"You have clicked {name}.\n" for name in ("size", "9", "color", "red")))
    assert "  [clicked button] red [clicked button_]\n" in both
    for odd in ('a "b"', "açaí"):
        assert f"  [button] {odd} [button_]\n" in pages.rich(at(replace(SANDAL, options=options), odd))
    asked = pages.rich(at(replace(SANDAL, options=options), query='sandals "red"'))
    assert asked.startswith("You have clicked red.\n")


def test_opened_products_are_marked_on_results() -> None:
    shop = at(SANDAL, "< prev")
    assert "\n\n[clicked button] B07SANDALS [clicked button_]\n" in pages.rich(shop)
    shop.click("back to search")
    shop.search("sandals")
    assert "\n\n[button] B07SANDALS [button_]\n" in pages.rich(shop)


def test_the_final_page_writes_options_as_a_template_does() -> None:
    options: dict[str, tuple[str, ...]] = {"size": ("5' <a> & b",), "color": ("ç",)}
    shop = at(replace(SANDAL, options=options), "5' <a> & b", "ç", "buy now")
    shown = '{"color": "\\u00e7", "size": "5\\u0027 \\u003ca\\u003e \\u0026 b"}'
    assert f"[SEP] options [SEP] {shown} [SEP] attrs" in pages.text(shop)
    assert f"\noptions\n{shown}\nattrs\n" in pages.rich(shop)
    assert shop.state.address() == f"{HOME}/done/abc/B07SANDALS/{{'size': \"5' <a> & b\", 'color': 'ç'}}"
    assert f"(min 0.0, max 1.0) [SEP] {shop.state.reward} [SEP]" in pages.text(shop)


def test_addresses_are_not_escaped() -> None:
    shop = at(SANDAL, "7.5 wide", "features", query="sandals  with 50%/é")
    place = "B07SANDALS/sandals++with+50%/é/1"
    assert shop.state.address() == f"{HOME}/item_sub_page/abc/{place}/Features/{{'size': '7.5 wide'}}"
    shop.click("< prev")
    assert shop.state.address() == f'{HOME}/item_page/abc/{place}/{{"size": "7.5 wide"}}'


def test_ragen_adds_advice_and_possible_actions() -> None:
    shop = little_shop()
    shown = present(shop, "ragen")
    assert shown.startswith(f"Instruction: {INSTRUCTION}.{ADVICE[0]}\n")
    assert shown.endswith("\nChoose one of these actions: search[<content>].")
    shop.search("sandals")
    for _ in range(3):
        shop.click("next >")
    shown = present(shop, "ragen")
    assert shown.startswith(f"{pages.text(shop)}.")
    assert shown.endswith(": click[back to search], click[< prev].")  # the next page is as empty


def test_verl_agent_cuts_what_precedes_the_instruction() -> None:
    shop = little_shop()
    first = present(shop, "verl_agent").splitlines()
    assert first[:2] == [f"Task: {INSTRUCTION}", "Page: 'Search'"]
    assert first[2:] == ["Possible actions: [", "'search[<your query>]',", "'click[search]',", "]"]
    shop.search("kite")
    assert "Page: 'Back to Search' [SEP] 'Page 1 (Total results: 1)' [SEP] 'Next >' [SEP] 'B000000011'" in present(
        shop, "verl_agent"
    )
    shop.click("b000000011")
    shop.click("buy now")
    assert f"\nPage: {pages.text(shop)}\n" in present(shop, "verl_agent")


def test_compact_shows_in_brackets_all_that_can_be_clicked_and_nothing_else() -> None:
    shop = little_shop((replace(SANDAL, options={"color": ("red", "blue"), "size": ("7",)}), *PRODUCTS[1:]))
    assert present(shop, "compact").splitlines() == [INSTRUCTION, "search[words]"]
    shop.search("sandals")
    for step in ("", SANDAL.asin, "description", "< prev", "features", "< prev", "blue", "7", "buy now"):
        assert not step or shop.click(step) is not None, step
        first, *rest = present(shop, "compact").splitlines()
        assert first == INSTRUCTION
        assert sorted(re.findall(r"\[(.*?)\]", "\n".join(rest))) == sorted(shop.clickables())
        if step in ("blue", "7"):
            assert "color = blue: [red] [blue]" in rest
            assert ("size = 7: [7]" if step == "7" else "size: [7]") in rest
    assert rest == [f"Bought {SANDAL.asin.lower()} for a score of {shop.state.reward:.3g}"]


def test_show_chooses_the_mode() -> None:
    shop = at(SANDAL)
    shown = [pages.show(shop, mode) for mode in ("text", "text_rich", "url")]
    assert shown == [pages.text(shop), pages.rich(shop), shop.state.address()]
