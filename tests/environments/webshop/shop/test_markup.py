"""The shop's pages as html: the original's texts, fields and links, for anyone, and safe with any product."""

import re
from collections import Counter
from dataclasses import replace

import pytest

from starpod.environments.webshop.catalogue.product import Product
from starpod.environments.webshop.shop import actions, pages
from starpod.environments.webshop.shop.markup import render_html, with_fields, with_pictures
from starpod.environments.webshop.shop.pictures import picture
from starpod.environments.webshop.shop.shop import Shop
from tests.environments.webshop.catalogues import recorded
from tests.environments.webshop.html_text import Reader
from tests.environments.webshop.little import GOAL, PRODUCTS, SANDAL, little_shop


def walk(shop: Shop) -> list[str]:
    """Every kind of page, as html, with the shop left on the final one."""
    found = [render_html(shop)]
    shop.search("all")
    tabs = ["description", "features", "reviews", *(["attributes"] if shop.show_attributes else [])]
    for click in ("", "b07sandals", "navy blue", *(move for tab in tabs for move in (tab, "< prev")), "buy now"):
        assert not click or shop.click(click) is not None
        found.append(render_html(shop))
    return found


def segments(shop: Shop) -> list[str]:
    return pages.text(shop).split(pages.SEPARATOR)


def test_the_texts_of_every_page_but_the_last_are_the_originals() -> None:
    shop = little_shop(show_attributes=True)
    assert Reader(render_html(shop)).texts == segments(shop)
    moves = "search all, next >, < prev, b07sandals, sand, description, < prev, features, < prev, reviews, < prev"
    for action in f"{moves}, attributes, < prev, back to search, search nothing".split(", "):
        if action.startswith("search "):
            shop.search(action.removeprefix("search "))
        else:
            assert shop.click(action) is not None, action
        assert Reader(render_html(shop)).texts == segments(shop), action


def test_the_texts_of_recorded_products_are_the_originals() -> None:
    products = list(recorded("1k"))[::9]  # the others say nothing new
    shop = little_shop(products, replace(GOAL, position=0, asin=products[0].asin), show_attributes=True)
    for product in products:
        shop.state.page, shop.state.asin = "item_page", product.asin
        assert Reader(render_html(shop)).texts == segments(shop), product.asin
        for shop.state.sub_page in ("Description", "Features", "Attributes"):
            shop.state.page = "item_sub_page"
            assert Reader(render_html(shop)).texts == segments(shop), (product.asin, shop.state.sub_page)
    assert len(products) > 100


def test_the_final_page_says_what_the_originals_does_and_shows_the_parts() -> None:
    shop = little_shop()
    *_, page = pages_seen = walk(shop)
    assert pages_seen == walk(little_shop())
    reader = Reader(page)
    for text in ("Thank you for shopping with us!", "Purchased", "Target", "Goal", "Reward", "Reward Details",
                 "Your score (min 0.0, max 1.0)", "asin", "options", "attrs", "category", "query", "product category",
                 "price upper"):  # fmt: skip
        assert text in reader.texts, text
    ids = {attrs.get("id") for _, attrs in reader.tags}
    assert {"reward", "reward_info", "asin", "options", "purchased_attrs", "goal-asin", "goal-options", "goal-attrs",
            "goal-price"} <= ids  # fmt: skip
    assert shop.grade is not None and re.search(r'id="reward".*?<pre>0\.8</pre>', page, re.DOTALL)
    parts = [float(text) for text in reader.texts if re.fullmatch(r"0\.\d{3}", text)]
    assert parts == [0.4, 0.2, 0.2] and sum(parts) == pytest.approx(shop.grade.reward)
    assert reader.buttons() == [] and not reader.all("input", id="search_input")


def test_what_browser_agents_of_the_original_look_for_is_there() -> None:
    shop = little_shop()
    index = Reader(render_html(shop))
    (field,) = index.all("input", id="search_input")
    assert field["name"] == "search_query" and index.all("form", method="post")
    assert index.all("section", id="instruction-text") and index.all("h4")
    shop.search("women")
    results = Reader(render_html(shop))
    assert next(attrs["value"] for attrs in results.all("button", class_="product-link")) == "click[b07sandals]"
    assert len(results.all("div", class_="list-group-item")) == len(results.all("h4", class_="product-title")) == 4
    assert len(results.all("h5", class_="product-price")) == 4
    assert {"Back to Search", "Next >"} <= set(results.texts) and len(results.all("button", class_="btn")) == 3
    shop.click("b07sandals")
    shop.click("sand")
    item = Reader(render_html(shop))
    assert item.all("img")[0] == item.all("img", id="product-image")[0]
    radios = item.all("input", type="radio")
    assert [(radio["name"], radio["value"]) for radio in radios] == [
        (group, value) for group, values in SANDAL.options.items() for value in values
    ]
    assert all("data-url" in radio for radio in radios)
    assert [radio["value"] for radio in radios if "checked" in radio] == ["sand"]
    assert len(item.all("div", class_="radio-toolbar")) == 2 and len(item.all("label")) == len(radios)


def test_whatever_can_be_clicked_is_a_button_that_clicks_it() -> None:
    shop = little_shop(show_attributes=True)
    for move in ("", "search", "next >", "< prev", "b07sandals", "features", "< prev", "attributes", "< prev"):
        if move == "search":
            shop.search("all")
        elif move:
            shop.click(move)
        offered = Counter(f"click[{text}]" for text in shop.clickables() if text != "search")
        assert Counter(Reader(render_html(shop)).buttons()) == offered, move
        for button in Reader(render_html(shop)).buttons():
            name, argument = actions.parse(button)
            assert name == "click" and shop.clickable(argument) is not None


# --- any product -------------------------------------------------------------------------------------------------

HOSTILE = (
    "</title></style></textarea><script>alert(1)</script><!-- ",
    "\"><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    "<form action=//evil.example><input name=action>",
    "&lt;b&gt; &amp;amp; {{ 7*7 }} {% raw %}",
    "javascript:alert(1)\u2028\x00\u202e",
)  # fmt: skip


def hostile(text: str) -> Product:
    """A product that says this wherever it can."""
    return replace(
        SANDAL, title=text, description=text, bullets=(text,), category=text, query=text, product_category=text,
        price_tag=text, options={text: (text, "plain")}, attributes=(text,), image=text,
    )  # fmt: skip


def same_elements(page: str, other: str) -> None:
    """Check that both pages have the same elements and attributes, except attributes that depend on the content.

    A button is disabled if its text cannot be written as an action. Blank bullets and full shares have a class.
    """
    ours, theirs = Reader(page).tags, Reader(other).tags
    assert [tag for tag, _ in ours] == [tag for tag, _ in theirs]
    for (_, names), (_, other_names) in zip(ours, theirs, strict=True):
        assert set(names) ^ set(other_names) <= {"disabled", "class"}


def hostile_walk(text: str) -> list[str]:
    goal = replace(GOAL, instruction_text=text, attributes=(text,), options=(text,))
    shop = little_shop([hostile(text)], goal, show_attributes=True)
    shop.state.keywords, shop.state.page, shop.state.number = [text], "search_results", 1
    shop.state.drawn = [0]
    found = [render_html(shop)]
    moves = "b07sandals, plain, description, < prev, features, < prev, attributes, < prev, buy now"
    for move in moves.split(", "):
        assert shop.click(move) is not None
        found.append(render_html(shop))
    return found


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_stay_texts(text: str) -> None:
    seen = 0
    for harmful, harmless in zip(hostile_walk(text), hostile_walk("plain words"), strict=True):
        same_elements(harmful, harmless)
        seen += Reader(harmful).texts.count(text.strip())
    assert seen >= 10 or "\x00" in text


def test_pages_are_labelled_complete_and_name_each_id_once() -> None:
    for page in walk(little_shop(show_attributes=True)):
        reader = Reader(page)
        assert page.startswith("<!doctype html>\n") and reader.all("html", lang="en")
        title = re.search("<title>(.+)</title>", page)
        assert title and title[1].strip()
        ids = [attrs["id"] for _, attrs in reader.tags if "id" in attrs]
        assert len(ids) == len(set(ids))
        for tag, attrs in reader.tags:
            for name in ("aria-labelledby", "for"):
                for target in (attrs.get(name) or "").split():
                    assert target in ids, (tag, target)
            assert tag != "img" or "alt" in attrs
            assert tag != "input" or attrs.get("type") in ("hidden", "radio") or attrs.get("aria-label")
        assert not re.search(r"(?:src|href|url\()\s*=?[\"']?\s*(?:https?:)?//", page)  # complete in itself
        for name, value in (pair for _, attrs in reader.tags for pair in attrs.items()):
            assert not name.startswith("on") and not (name == "style" and "url" in str(value))
        assert len(reader.all("main")) == 1 and len(reader.all("h1")) >= 1
        assert all(chip["aria-pressed"] in ("true", "false") for chip in reader.all("button") if "aria-pressed" in chip)


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_have_the_contrast_of_wcag_aa(scheme: int) -> None:
    style = render_html(little_shop())
    blocks = re.findall(r":root\{(.*?)\}", style, re.DOTALL)
    assert len(blocks) == 2
    colours = dict(re.findall(r"--([\w-]+):(#[0-9a-f]{3,6})", blocks[scheme]))
    for back in ("paper", "card", "gold", "green-wash"):
        for text in ("ink", "soft", "green"):
            if (text, back) != ("green", "gold"):  # never together
                assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
    assert contrast(colours["green-ink"], colours["green"]) >= 4.5
    assert contrast(colours["buy-ink"], colours["buy"]) >= 4.5
    assert contrast(colours["field"], colours["card"]) >= 3  # the borders of fields


def test_every_form_carries_the_fields_it_is_given() -> None:
    shop = little_shop()
    shop.search("all")
    fields = {"epoch": "1", "token": '"><script>'}
    page = with_fields(render_html(shop), fields, "<p>here</p>")
    reader = Reader(page)
    assert len(reader.all("input", type="hidden", name="token", value='"><script>')) == len(reader.all("form")) == 2
    assert "<p>here</p>" in page.partition("<body>")[2][:20]


def test_pictures_are_drawn_from_asin_and_category() -> None:
    drawn = {product.asin: picture(product.asin, product.category) for product in PRODUCTS}
    assert len(set(drawn.values())) == len(PRODUCTS)
    assert picture("B000000001", "fashion") == drawn["B000000001"] != picture("B000000001", "beauty")
    assert all(len(uri) < 2000 and re.fullmatch(r"data:image/svg\+xml,[^\"<>\s#]*(?: [^\"<>\s#]*)*", uri)
               for uri in drawn.values())  # fmt: skip


def test_own_pictures_are_only_for_an_open_network() -> None:
    shop = little_shop()
    shop.search("women")
    page = render_html(shop)
    assert 'src="https:' not in page
    opened = with_pictures(page)
    assert next(image["src"] for image in Reader(opened).all("img")) == SANDAL.image
    hostile_image = little_shop([replace(SANDAL, image="javascript:alert(1)")])
    hostile_image.search("all")
    assert with_pictures(render_html(hostile_image)) == render_html(hostile_image)
