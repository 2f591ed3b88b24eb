"""Actions as they are written, what can be clicked, and what clicks and searches change."""

import random
import re
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from starpod.environments.webshop.shop import actions
from starpod.environments.webshop.shop.items import StoreCache
from starpod.environments.webshop.shop.shop import Shop, ShopState
from tests.environments.webshop.little import GOAL, PRODUCTS, SANDAL, Stock, little_shop, product


@given(st.text(alphabet="searchlik[] \nx", max_size=30))
@example("search[Red Shoes]")
@example("search[a] now")
@example("search[lamp]]")
@example("search[[lamp]]")
@example("search[]")
@example("[lamp]")
@example("\nsearch[lamp]")
@example("click[a\nb]")
def test_an_action_is_read_as_the_original_reads_it(text: str) -> None:
    match = re.match(r"(.+)\[(.+)\]", text)
    assert actions.parse(text) == ((match[1], match[2].lower()) if match else (text, ""))


@given(st.text(max_size=40))
def test_written_actions_are_read_back(text: str) -> None:
    written = actions.click(text)
    assert written is None or actions.parse(written) == ("click", text)
    searched = actions.search(text)
    if searched is not None:
        assert actions.parse(searched)[0] == "search"
        assert len(actions.parse(searched)[1].split()) == len(re.sub(r"[\[\]]", " ", text.lower()).split())


def open_item(options: dict[str, tuple[str, ...]], asin: str = SANDAL.asin) -> Shop:
    """A shop on the page of a product with these options."""
    shop = little_shop((replace(SANDAL, options=options, asin=asin), *PRODUCTS[1:]))
    assert shop.search("sandals")
    assert shop.click(SANDAL.asin)  # whatever the case of its letters
    return shop


def test_each_page_offers_what_it_shows() -> None:
    shop = little_shop(show_attributes=True)
    assert list(shop.clickables()) == ["search"]
    shop.search("all")
    first = [each.asin.lower() for each in PRODUCTS[:10]]
    assert list(shop.clickables()) == ["back to search", "next >", *first]
    shop.click("next >")
    assert list(shop.clickables()) == ["back to search", "< prev", "next >", "b000000010", "b000000011"]
    shop.click("b000000010")
    buttons = ["back to search", "< prev", "description", "features", "reviews", "attributes", "buy now"]
    assert list(shop.clickables()) == buttons
    shop.click("Attributes")
    assert list(shop.clickables()) == ["back to search", "< prev"]
    shop.click("< prev")
    shop.click("buy now")
    assert not shop.clickables()


def test_a_value_of_two_options_is_the_last_ones() -> None:
    shop = open_item({"color": ("one", "two"), "size": ("two", "two", "")})
    assert [text for text in shop.clickables() if shop.clickables()[text].kind == "option"] == ["one", "two", ""]
    shop.click("two")
    assert shop.state.options == {"size": "two"}


def test_a_value_named_like_a_caption_takes_its_place() -> None:
    shop = open_item({"style": ("features", "search", "attributes", "next >")})
    assert list(shop.clickables())[3] == "features"
    assert shop.click("features")
    assert shop.state.page == "item_sub_page"
    shop.click("< prev")
    assert shop.click("search") is None
    assert shop.click("next >")
    assert shop.state.options == {"style": "next >"}
    assert shop.click("attributes")  # no such button is shown, and the page is there all the same
    assert (shop.state.page, shop.state.sub_page) == ("item_sub_page", "Attributes")
    assert shop.state.options == {"style": "next >"}


def test_nothing_happens_to_what_is_not_there() -> None:
    shop = little_shop()
    before = shop.state.as_dict()
    for text in ("search", "buy now", "b07sandals", "", "next >"):
        assert shop.click(text) is None
    assert shop.state.as_dict() == before


def test_a_search_forgets_product_and_options_and_keeps_what_was_opened() -> None:
    shop = open_item({"color": ("red", "blue")})
    assert shop.click("RED")
    assert not shop.click("red")
    assert shop.click("blue")
    assert shop.state.options == {"color": "blue"}
    assert shop.search("Lamp  SHADE")
    state = shop.state
    assert (state.page, state.keywords, state.number) == ("search_results", ["lamp", "", "shade"], 1)
    assert (state.asin, state.options, state.opened) == ("", {}, [SANDAL.asin])
    assert not shop.search("lamp  shade")
    assert shop.click("back to search")
    assert shop.state == ShopState(0, "abc")


def test_previous_leads_back_and_forgets_options_only_on_an_item() -> None:
    shop = open_item({"color": ("red", "blue")}, asin="b07Sandals")
    shop.click("red")
    shop.click("description")
    shop.click("< prev")
    assert (shop.state.page, shop.state.options) == ("item_page", {"color": "red"})
    shop.click("< prev")
    assert (shop.state.page, shop.state.options, shop.state.asin) == ("search_results", {}, "")


def test_pages_have_no_end() -> None:
    shop = little_shop()
    shop.search("all")
    for _ in range(4):
        assert shop.click("next >")
    assert (shop.state.number, len(shop.hits()), list(shop.listing().positions)) == (5, len(PRODUCTS), [])
    assert shop.click("< prev")
    assert shop.state.number == 4


def test_a_page_is_known_by_its_address() -> None:
    shop = little_shop()
    shop.search("search_results sandals")
    shop.click(SANDAL.asin)
    shop.click("< prev")  # as if it stood on the results, one page back
    assert (shop.state.page, shop.state.number, list(shop.listing().positions)) == ("search_results", 0, [])
    assert list(shop.clickables()) == ["back to search", "next >"]
    shop.click("next >")
    assert shop.state.number == 1
    shop.search("item_page sandals")
    shop.click(SANDAL.asin)
    shop.click("features")
    shop.click("< prev")
    assert shop.state.page == "search_results"


def test_after_the_purchase_one_can_only_search() -> None:
    shop = open_item({})
    assert shop.grade is None
    assert shop.click("buy now")
    assert shop.grade is not None
    assert shop.state.reward == shop.grade.reward > 0
    assert not shop.state.has_search_bar
    assert shop.click("back to search") is None
    assert shop.search("lamp")
    assert (shop.state.reward, shop.grade) == (None, None)


def test_special_searches_list_by_field() -> None:
    shop = little_shop()

    def found(text: str) -> list[str]:
        shop.search(text)
        return [shop.stock.catalogue[position].asin for position in shop.hits()]

    beauty = [each.asin for each in PRODUCTS if each.category == "beauty"]
    assert found("<c> beauty") == found("<C> Beauty and more") == beauty
    assert found("<q> women's sandals") == [SANDAL.asin]
    assert found("<a>  open toe ") == [each.asin for each in PRODUCTS if "open toe" in each.attributes]
    assert found("<c>") == []
    assert found("<q>") == []


def test_random_products_are_drawn_again_for_every_page() -> None:
    products = [product(number, "garden", f"Lamp {number}", 9.0) for number in range(90)]
    stream = random.Random(7)
    shop = Shop(Stock(products), [replace(GOAL, asin=products[0].asin)], ShopState(0, "s"), stream=lambda: stream)
    expected = random.Random(7)
    for click in (None, "next >", "next >", "< prev"):
        assert shop.click(click) if click else shop.search("<r>")
        assert list(shop.hits()) == expected.sample(range(90), 50)
    few = little_shop()
    few.search("<r>")
    assert sorted(few.hits()) == list(range(len(PRODUCTS)))


@given(st.integers(0, 2**32), st.integers(0, 12))
def test_a_state_is_plain_values(seed: int, steps: int) -> None:
    shop, rng = little_shop(), random.Random(seed)
    for _ in range(steps):
        texts = list(shop.clickables())
        if texts and rng.random() < 0.8:
            shop.click(rng.choice(texts))
        else:
            shop.search(rng.choice(["all", "<r>", "women's"]))
    assert ShopState(**shop.state.as_dict()) == shop.state


def test_the_results_of_long_searches_are_not_kept() -> None:
    cache = StoreCache(Stock(PRODUCTS))
    for _ in range(2):
        assert cache.find(["sandal"]) == cache.find(["sandal"] * 400) != ()
    kept = cache.found.cache_info()
    assert (kept.currsize, kept.hits, kept.misses) == (1, 1, 1)
