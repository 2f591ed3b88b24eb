"""Chromium for the shop: pictures of its pages, and an environment that acts through the browser alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starpod.environments.webshop.browser.pool import shared_pool
from starpod.environments.webshop.shop.markup import render_html

if TYPE_CHECKING:
    from starpod.environments.webshop.shop.shop import Shop

__all__ = ["picture_of", "png", "shared_pool"]


def png(shop: Shop) -> bytes:
    """The page that the shop shows as a PNG, as `picture_of`."""
    return picture_of(render_html(shop))


def picture_of(html: str) -> bytes:
    """A page as a PNG of the configured size: what shows without scrolling. The same page gives the same bytes.

    Raises Busy when every browser is taken for too long, Unavailable where there is no Chromium.
    """
    return shared_pool().run(lambda browser: browser.draw(html))
