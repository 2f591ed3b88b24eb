"""Chromium for the shop: pictures of its pages, and an environment in which the agent uses the browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starpod.environments.webshop.shop.markup import render_html

from .pool import shared_pool

if TYPE_CHECKING:
    from starpod.environments.webshop.shop.shop import Shop

__all__ = ["png", "shared_pool"]


def png(shop: Shop) -> bytes:
    """Draw the part of the shop's page that is visible without scrolling, as a PNG. Equal pages give equal bytes.

    Raises:
        Busy: no browser became free in time.
        Unavailable: there is no Chromium.
    """
    html = render_html(shop)
    return shared_pool().run(lambda browser: browser.draw(html))
