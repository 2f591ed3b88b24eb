"""Chromium for the shop: pictures of its pages, and an environment that acts through the browser alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starpod.environments.webshop.shop.markup import render_html

from .pool import shared_pool

if TYPE_CHECKING:
    from starpod.environments.webshop.shop.shop import Shop

__all__ = ["png", "shared_pool"]


def png(shop: Shop) -> bytes:
    """The shop's page as a PNG of the configured size: what shows without scrolling. Equal pages give equal bytes.

    Raises Busy when every browser is taken for too long, Unavailable where there is no Chromium.
    """
    html = render_html(shop)
    return shared_pool().run(lambda browser: browser.draw(html))
