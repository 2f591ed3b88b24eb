"""Pages of the shop as HTML: our own markup, with the texts, fields and links of the original WebShop's pages.

A page contains its styles and pictures and works without JavaScript. All clickable texts are buttons of forms that post
`action=click[...]` to `act`, relative to the page's address; the search field posts `search_query`. A program that
serves such a page can add hidden fields to each form with `with_fields`.
"""

from __future__ import annotations

import functools
import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from starpod.environments.webshop.catalogue.prices import NO_CAP
from starpod.environments.webshop.shop import actions

from .pictures import DRAWINGS, picture

if TYPE_CHECKING:
    from starpod.environments.webshop.catalogue.product import Product

    from .shop import Shop

_HERE = Path(__file__).parent
_TEMPLATES = {
    "index": "index.html",
    "search_results": "results.html",
    "item_page": "item.html",
    "item_sub_page": "sub.html",
    "done": "done.html",
}
_ICONS: dict[str, str] = DRAWINGS["icons"]


def render_html(shop: Shop) -> str:
    """Render the shop's current page."""
    state = shop.state
    fields: dict[str, Any] = {
        "page": state.page,
        "instruction": shop.goal.instruction_text,
        "keywords": " ".join(state.keywords or ()),
        "offered": shop.clickables(),
    }
    fields["title"] = _title(shop)
    match state.page:
        case "search_results":
            fields |= {"number": state.number, "total": len(shop.hits())}
            fields |= {"products": shop.listing().products, "opened": set(state.opened)}
        case "item_page" | "item_sub_page":
            fields |= {"product": _product(shop), "options": state.options, "sub_page": state.sub_page}
        case "done":
            fields |= _purchase(shop)
    return _environment().get_template(_TEMPLATES[state.page]).render(fields)


def with_fields(page: str, hidden: Mapping[str, str], banner: str = "") -> str:
    """Add hidden fields to each form of a page, and a banner at the top of its body.

    Args:
        hidden: values of the fields by name, which are escaped.
        banner: HTML, which is not escaped; by default none.
    """
    fields = "".join(
        Markup('<input type="hidden" name="{}" value="{}">\n').format(name, value) for name, value in hidden.items()
    )
    page = _FORM.sub(lambda form: form[0] + fields, page)
    return _BODY.sub(lambda body: body[0] + banner, page, count=1)


def with_pictures(page: str) -> str:
    """Replace drawn pictures by the products' pictures, which a browser loads over the network."""
    return _PICTURE.sub(r'src="\1"', page)


def with_cents(page: str) -> str:
    """Write prices with two decimals: $100.00 instead of the original WebShop's $100.0."""
    return _PRICE.sub(lambda price: _TENTHS.sub(r"\g<0>0", price[0]), page)


def stylesheet() -> Markup:
    """Return the page's style sheet, for other pages of the site."""
    return Markup(_read("shop.css"))


def logo() -> Markup:
    """Return the shop's logo as SVG."""
    return Markup(_ICONS["logo"])


def script_hash() -> str:
    """Return the source expression that allows the page's script in a Content-Security-Policy."""
    return f"'sha256-{b64encode(sha256(_read('shop.js').encode()).digest()).decode()}'"


_FORM = re.compile(r"<form\b[^>]*>")
_BODY = re.compile(r"<body\b[^>]*>")
_PRICE = re.compile(r'data-price="[^"]*"|<h[45] class="(?:product-)?price"[^<]*')
_TENTHS = re.compile(r"\$[\d,]+\.\d(?!\d)")
_PICTURE = re.compile(r'src="data:[^"]*" data-image="(https://[^"]*)"')


def _picture(product: Product) -> Markup:
    """Return the attributes of an image: a drawn picture, and the address of the product's picture."""
    return Markup('src="{}" data-image="{}"').format(picture(product.asin, product.category), product.image)


def _product(shop: Shop) -> Product:
    item = shop.item()
    assert item is not None
    return item.product


def _title(shop: Shop) -> str:
    """Return the title for the browser's tab and history."""
    state = shop.state
    match state.page:
        case "search_results":
            text = f"{' '.join(state.keywords or ())}: page {state.number}"
        case "item_page":
            text = _product(shop).title
        case "item_sub_page":
            text = f"{state.sub_page}: {_product(shop).title}"
        case "done":
            text = f"Score {state.reward:.3g}"
        case _:
            return "WebShop"
    return f"{text} - WebShop"


def _purchase(shop: Shop) -> dict[str, Any]:
    """Return the fields of the final page: the purchase, the goal, and the parts of the reward."""
    goal, grade, item = shop.goal, shop.grade, shop.item()
    assert grade is not None
    assert item is not None
    shares = {
        "attributes": (grade.r_att, len(goal.attributes)),
        "options": (grade.r_option or 0.0, len(goal.options)),
        "price": (grade.r_price, 1),
    }
    parts = [
        {"name": name.capitalize(), "met": round(share * count), "asked": count, "adds": grade.parts()[name]}
        for name, (share, count) in shares.items()
        if count
    ]
    return {
        "product": item.product,
        "wanted": shop.stock.catalogue[goal.position],
        "goal": goal,
        "grade": grade,
        "parts": parts,
        "kind": _kind(grade),
        "figures": json.dumps(grade.as_info(), indent=2),
        "options": ", ".join(f"{name}: {value}" for name, value in shop.state.options.items()) or "none",
        "goal_options": ", ".join(goal.options) or "none",
        "price": float(shop.stock.prices[item.position]),
        "cap": f"${goal.price_upper:.2f}" if goal.price_upper < NO_CAP else "none",
    }


def _kind(grade: Any) -> str:
    """Return why the product counts as the kind that was asked for, or why not."""
    if grade.r_type < 1 and grade.title_score < 0.1:
        return "the titles have next to nothing in common"
    reasons = (
        (grade.query_match, "same search term"),
        (grade.category_match, "same category"),
        (grade.title_score > 0.2, "similar title"),
    )
    return ", ".join(text for holds, text in reasons if holds) or "another kind"


@functools.cache
def _read(name: str) -> str:
    return (_HERE / "static" / name).read_text(encoding="utf-8")


def templates_in(folder: Path) -> Environment:
    """Return the templates of a folder. Values are escaped, and a missing value is an error."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )


@functools.cache
def _environment() -> Environment:
    environment = templates_in(_HERE / "templates")
    environment.globals.update(
        style=stylesheet(),
        script=Markup(_read("shop.js")),
        logo=logo(),
        icon=lambda name: Markup(_ICONS[name]),
        picture=_picture,
        click=actions.click,
    )
    return environment
