"""A page of the shop as the text an agent reads: `text`, `text_rich` and `url`. No markup is made or parsed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal

from .items import Item, Listing
from .shop import Shop

TextMode = Literal["text", "text_rich", "url"]

SEPARATOR = " [SEP] "

_BLANKS = " \t\n\f\r"
_HTML_SAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&'"}


def show(shop: Shop, mode: TextMode) -> str:
    """The page as the agent reads it.

    text: the visible texts, stripped, between separators. text_rich: one text a line as it is, with marks around what
    can be clicked and what was. url: the address.
    """
    if mode == "text":
        return text(shop)
    return rich(shop) if mode == "text_rich" else shop.address()


def text(shop: Shop) -> str:
    """The page in mode `text`."""
    state = shop.state
    page = state.page
    if page == "done":
        return SEPARATOR.join(node.strip() for node in _final_nodes(shop))
    instruction = "".join(_joined(_visible([shop.instruction])))
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
    rest = _item_text(item) if page == "item_page" else _sub_page_text(item, state.sub_page)
    return f"Instruction:{instruction}{SEPARATOR}Back to Search{SEPARATOR}< Prev{rest}"


def rich(shop: Shop) -> str:
    """The page in mode `text_rich`."""
    state = shop.state
    page = state.page
    if page == "done":
        return _lines(_final_nodes(shop))
    instruction = _lines(_visible([shop.instruction]))
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
    clicked, options = _options_rich(item, shop.address())
    return f"{clicked}{head}{previous}{options}{_item_rich(item)}"


# --- texts, as a page has them -----------------------------------------------------------------------------------


def _visible(texts: Iterable[str]) -> Iterator[str]:
    """The texts that a page shows: none that is empty or only blanks with a line break; other blanks become one."""
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
    """The asin of each product and the lines below it."""
    return tuple((entry.asin, _lines(_visible((entry.title, entry.price_tag)))) for entry in listing.entries)


def _listing_rich(listing: Listing, opened: list[str]) -> str:
    return "".join(
        f"\n[clicked button] {asin} [clicked button_]\n{rest}"
        if asin in opened
        else f"\n[button] {asin} [button_]\n{rest}"
        for asin, rest in _entries(listing)
    )


# --- items -------------------------------------------------------------------------------------------------------


def _buttons(item: Item) -> tuple[str, ...]:
    attributes = ("Attributes",) if item.show_attributes else ()
    return ("Description", "Features", "Reviews", *attributes, "Buy Now")


def _facts(item: Item) -> Iterator[str]:
    return _visible((item.product.title, f"Price: {item.product.price_tag}", "Rating: N.A."))


@lru_cache(maxsize=2048)
def _item_text(item: Item) -> str:
    options = (part for group, values in item.product.options.items() for part in (group, *values))
    return "".join(_joined((*_visible(options), *_facts(item), *_buttons(item))))


@lru_cache(maxsize=2048)
def _item_rich(item: Item) -> str:
    """The lines below the options."""
    return _lines((*_facts(item), *(f"[button] {caption} [button_]" for caption in _buttons(item))))


@lru_cache(maxsize=2048)
def _options_unclicked(item: Item) -> str:
    return _options_rich(item, "")[1]


def _options_rich(item: Item, address: str) -> tuple[str, str]:
    """The lines on clicked values, latest in page order first, and the options.

    A value counts as clicked if the address holds it in double quotes, whatever put it there.
    """
    if address and '"' not in address:
        return "", _options_unclicked(item)
    clicked: list[str] = []
    lines: list[str] = []
    for group, values in item.product.options.items():
        lines.extend(_visible([group]))
        for value in _visible(values):
            if f'"{value}"' in address:
                clicked.append(f"You have clicked {value}.\n")
                lines.append(f"  [clicked button] {value} [clicked button_]")
            else:
                lines.append(f"  [button] {value} [button_]")
    return "".join(reversed(clicked)), _lines(lines)


def sub_page_nodes(item: Item, sub_page: str) -> Iterator[str]:
    """The texts of one of a product's sub-pages, as they are."""
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
def _sub_page_text(item: Item, sub_page: str) -> str:
    return "".join(_joined(sub_page_nodes(item, sub_page)))


@lru_cache(maxsize=2048)
def _sub_page_rich(item: Item, sub_page: str) -> str:
    return _lines(sub_page_nodes(item, sub_page))


# --- the final page ----------------------------------------------------------------------------------------------


def _final_nodes(shop: Shop) -> tuple[str, ...]:
    """The final page as the original's text environment has it: most of its fields are never filled."""
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
