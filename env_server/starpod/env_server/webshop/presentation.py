"""What programs built on the original put around a page's text before a model reads it."""

from __future__ import annotations

from collections.abc import Iterator

from starpod.env_server.webshop.pages import SEPARATOR, text
from starpod.env_server.webshop.shop import Shop

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
    """The page's text in a program's form: `ragen` or `verl_agent`."""
    return _ragen(shop) if style == "ragen" else _verl_agent(shop)


def _ragen(shop: Shop) -> str:
    """The page, advice, and the possible actions. The index page is the instruction alone."""
    page = f"Instruction: {shop.instruction}" if shop.state.page == "index" else text(shop)
    possible = list(_actions(shop, "search[<content>]"))
    if possible == ["click[back to search]", "click[< prev]", "click[next >]"]:
        possible.pop()  # there is nothing on this page of results, nor on those that follow
    return f"{page}.{_ADVICE}\nChoose one of these actions: {', '.join(possible)}."


def _verl_agent(shop: Shop) -> str:
    """The task, the page's texts that follow the instruction, each in quotes, and the possible actions, one a line."""
    parts = text(shop).split(SEPARATOR)
    task = shop.instruction.strip()
    page = SEPARATOR.join(parts)
    if task in parts:
        page = SEPARATOR.join(f"'{part}'" for part in parts[parts.index(task) + 1 :])
    listed = "\n".join(f"'{action}'," for action in _actions(shop, "search[<your query>]", hide_search=False))
    return f"Task: {task}\nPage: {page}\nPossible actions: [\n{listed}\n]"


def _actions(shop: Shop, search: str, *, hide_search: bool = True) -> Iterator[str]:
    """The actions as they are shown. `click[search]`, which does nothing, is shown by verl-agent."""
    if shop.has_search_bar:
        yield search
    yield from (f"click[{clickable}]" for clickable in shop.clickables() if clickable != "search" or not hide_search)
