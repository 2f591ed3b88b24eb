"""The shop's pages as text, in the modes `text`, `text_rich` and `url`. They are made directly, not from HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal

from .items import Listing, ShopItem
from .shop import Shop

TextMode = Literal["text", "text_rich", "url"]

SEPARATOR = " [SEP] "

_BLANKS = " \t\n\f\r"
_HTML_SAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&'"}


def show(shop: Shop, mode: TextMode) -> str:
    """Return the current page.

    Args:
        mode: "text": the stripped texts, joined by [SEP]; "text_rich": one text per line, with marks around buttons and
            clicked buttons; "url": only the address.
    """
    if mode == "text":
        return text(shop)
    return rich(shop) if mode == "text_rich" else shop.state.address()


def text(shop: Shop) -> str:
    """Return the page in mode `text`."""
    state = shop.state
    page = state.page
    if page == "done":
        return SEPARATOR.join(node.strip() for node in _final_nodes(shop))
    instruction = "".join(_joined(_visible([shop.goal.instruction_text])))
    if page == "index":
        return f"WebShop{SEPARATOR}Instruction:{instruction}{SEPARATOR}Search"
    if page == "search_results":
        previous = f"{SEPARATOR}< Prev" if state.number > 1 else ""
        return (
            f"Instruction:{instruction}{SEPARATOR}Back to Search{SEPARATOR}{_page_line(shop)}{previous}"
            f"{SEPARATOR}Next >{_listing_text(shop.listing())}"
        )
    item = shop.item()
    assert item is not None
    content = _item_text(item) if page == "item_page" else _sub_page_text(item, state.sub_page)
    return f"Instruction:{instruction}{SEPARATOR}Back to Search{SEPARATOR}< Prev{content}"


def rich(shop: Shop) -> str:
    """Return the page in mode `text_rich`."""
    state = shop.state
    page = state.page
    if page == "done":
        return _lines(_final_nodes(shop))
    instruction = _lines(_visible([shop.goal.instruction_text]))
    if page == "index":
        return f"WebShop\nInstruction: \n{instruction}[button] Search [button_]\n"
    head = f"Instruction:\n{instruction}[button] Back to Search [button_]\n"
    previous = "[button] < Prev [button_]\n"
    if page == "search_results":
        buttons = f"{previous if state.number > 1 else ''}[button] Next > [button_]\n"
        return f"{head}{_page_line(shop)}\n{buttons}{_listing_rich(shop.listing(), state.opened)}"
    item = shop.item()
    assert item is not None
    if page == "item_sub_page":
        return head + previous + _sub_page_rich(item, state.sub_page)
    clicked_lines, options = _options_rich(item, shop.state.address())
    return f"{clicked_lines}{head}{previous}{options}{_item_rich(item)}"


# --- texts of a page ---------------------------------------------------------------------------------------------


def _visible(texts: Iterable[str]) -> Iterator[str]:
    """Yield the visible texts. Empty texts, and blanks with a line break, are left out; other blanks become one."""
    for node in texts:
        if node.strip(_BLANKS):
            yield node
        elif node and "\n" not in node:
            yield " "


def _joined(nodes: Iterable[str]) -> Iterator[str]:
    for node in nodes:
        yield SEPARATOR
        yield node.strip()


def _lines(nodes: Iterable[str]) -> str:
    return "".join(f"{node}\n" for node in nodes)


def _page_line(shop: Shop) -> str:
    return f"Page {shop.state.number} (Total results: {len(shop.hits())})"


# --- results -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2048)
def _listing_text(listing: Listing) -> str:
    nodes = (part for entry in listing.entries for part in entry)
    return "".join(_joined(_visible(nodes)))


@lru_cache(maxsize=2048)
def _entries(listing: Listing) -> tuple[tuple[str, str], ...]:
    return tuple((entry.asin, _lines(_visible((entry.title, entry.price_tag)))) for entry in listing.entries)


def _listing_rich(listing: Listing, opened: list[str]) -> str:
    return "".join(
        f"\n[clicked button] {asin} [clicked button_]\n{text}"
        if asin in opened
        else f"\n[button] {asin} [button_]\n{text}"
        for asin, text in _entries(listing)
    )


# --- items -------------------------------------------------------------------------------------------------------


def _buttons(item: ShopItem) -> tuple[str, ...]:
    attributes = ("Attributes",) if item.show_attributes else ()
    return ("Description", "Features", "Reviews", *attributes, "Buy Now")


def _facts(item: ShopItem) -> Iterator[str]:
    return _visible((item.product.title, f"Price: {item.product.price_tag}", "Rating: N.A."))


@lru_cache(maxsize=2048)
def _item_text(item: ShopItem) -> str:
    options = (part for group, values in item.product.options.items() for part in (group, *values))
    return "".join(_joined((*_visible(options), *_facts(item), *_buttons(item))))


@lru_cache(maxsize=2048)
def _item_rich(item: ShopItem) -> str:
    return _lines((*_facts(item), *(f"[button] {caption} [button_]" for caption in _buttons(item))))


@lru_cache(maxsize=2048)
def _options_unclicked(item: ShopItem) -> str:
    return _options_rich(item, "")[1]


def _options_rich(item: ShopItem, address: str) -> tuple[str, str]:
    """Return the lines about clicked values (in reverse order of the page), and the lines of the options.

    As in the original WebShop, a value counts as clicked if the address contains it in double quotes for any reason.
    """
    if address and '"' not in address:
        return "", _options_unclicked(item)
    clicked_lines: list[str] = []
    lines: list[str] = []
    for group, values in item.product.options.items():
        lines.extend(_visible([group]))
        for value in _visible(values):
            if f'"{value}"' in address:
                clicked_lines.append(f"You have clicked {value}.\n")
                lines.append(f"  [clicked button] {value} [clicked button_]")
            else:
                lines.append(f"  [button] {value} [button_]")
    return "".join(reversed(clicked_lines)), _lines(lines)


def sub_page_nodes(item: ShopItem, sub_page: str) -> Iterator[str]:
    """Return the texts of a sub-page of a product."""
    product = item.product
    match sub_page:
        case "Description":
            return _visible([product.description])
        case "Features":
            return _visible(f" {bullet}" for bullet in product.bullets)
        case "Attributes":
            attributes = (f" {attribute}" for attribute in product.attributes)
            return _visible((*attributes, product.category, product.query, product.product_category))
    return iter(())  # there are no reviews


@lru_cache(maxsize=2048)
def _sub_page_text(item: ShopItem, sub_page: str) -> str:
    return "".join(_joined(sub_page_nodes(item, sub_page)))


@lru_cache(maxsize=2048)
def _sub_page_rich(item: ShopItem, sub_page: str) -> str:
    return _lines(sub_page_nodes(item, sub_page))


# --- the final page ----------------------------------------------------------------------------------------------


def _final_nodes(shop: Shop) -> tuple[str, ...]:
    """Return the texts of the final page. As in the original WebShop's text mode, most fields are never filled."""
    state = shop.state
    options = json.dumps(state.options, sort_keys=True).translate(_HTML_SAFE)
    return (
        *("Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"),
        *("Purchased", "asin", state.asin, "options", options, "attrs", "None", "category", "None"),
        *("query", "None", "product category", "None"),
        *("Target", "asin", "options", "attrs", "price upper", "instuction text", "category", "product category"),
        *("query", "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)", str(state.reward)),
        *("Reward Details ", "None"),
    )
