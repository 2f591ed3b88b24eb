"""Alternative formats of a page: a compact format, and formats of programs built on the original WebShop."""

from __future__ import annotations

from collections.abc import Iterator

from .pages import SEPARATOR, sub_page_nodes, text
from .shop import Shop

ADVICE = (
    "You have 10 actions to buy something; it need not fit the description in everything.",
    "Leave details such as size and colour out of what you search for.",
    "Search no more than twice.",
    "A product that is close enough, bought in time, is better than the right one not bought.",
    "Open a product of this page rather than turn to the next page.",
    "Use click[next >] at most twice.",
    "Use click[< prev] only if you are sure that the product is on an earlier page.",
    "With fewer than 3 actions left, buy the first product that the page shows.",
    "Before click[buy now], choose a size that fits and then a colour, one action each, where there are such options; "
    "skip that if only 1 action is left. Do not open the description.",
)
"""RAGEN's nine pieces of advice, in our words."""
_ADVICE = "\n".join(ADVICE)


def present(shop: Shop, style: str) -> str:
    """Return the page in a presentation: `ragen`, `verl_agent` or `compact`."""
    match style:
        case "ragen":
            return _ragen(shop)
        case "verl_agent":
            return _verl_agent(shop)
    return _compact(shop)


def _ragen(shop: Shop) -> str:
    """Return page, advice and possible actions. On the index, the page is only the instruction."""
    page = f"Instruction: {shop.goal.instruction_text}" if shop.state.page == "index" else text(shop)
    choices = list(_actions(shop, "search[<content>]"))
    if choices == ["click[back to search]", "click[< prev]", "click[next >]"]:
        choices.pop()  # this page of results is empty, and so are all further ones
    return f"{page}.{_ADVICE}\nChoose one of these actions: {', '.join(choices)}."


def _verl_agent(shop: Shop) -> str:
    """Return the task, the page's texts after the instruction (each in quotes), and a line per possible action."""
    parts = text(shop).split(SEPARATOR)
    task = shop.goal.instruction_text.strip()
    page = SEPARATOR.join(parts)
    if task in parts:
        page = SEPARATOR.join(f"'{part}'" for part in parts[parts.index(task) + 1 :])
    lines = "\n".join(f"'{action}'," for action in _actions(shop, "search[<your query>]", hide_search=False))
    return f"Task: {task}\nPage: {page}\nPossible actions: [\n{lines}\n]"


def _actions(shop: Shop, search: str, *, hide_search: bool = True) -> Iterator[str]:
    """Yield the possible actions. verl-agent also lists `click[search]`, which does nothing."""
    if shop.state.has_search_bar:
        yield search
    yield from (f"click[{clickable}]" for clickable in shop.clickables() if clickable != "search" or not hide_search)


def _compact(shop: Shop) -> str:
    """Return the instruction, the content in lines, and the buttons. Clickable texts are in brackets.

    The chosen value follows the name of an option: `color = red: [red] [blue]`.
    """
    buttons = (clickable.text for clickable in shop.clickables().values() if clickable.kind == "button")
    lines = [shop.goal.instruction_text, *_content(shop), " ".join(f"[{text}]" for text in buttons if text != "search")]
    return "\n".join(line for line in lines if line)


def _content(shop: Shop) -> Iterator[str]:
    """Yield the lines between the instruction and the buttons."""
    state, item = shop.state, shop.item()
    if state.page == "index":
        yield "search[words]"
    elif item is None:
        for entry in shop.listing().entries:
            yield f"[{entry.asin.lower()}] {entry.title} {entry.price_tag}"
    elif state.page == "item_sub_page":
        yield from (node.strip() for node in sub_page_nodes(item, state.sub_page))
    elif state.page == "item_page":
        yield f"{item.product.title} {item.product.price_tag}"
        for group, values in item.product.options.items():
            choice = f" = {state.options[group]}" if group in state.options else ""
            yield f"{group}{choice}: {' '.join(f'[{value}]' for value in values)}"
    else:
        yield f"Bought {state.asin.lower()} for a score of {state.reward:.3g}"
