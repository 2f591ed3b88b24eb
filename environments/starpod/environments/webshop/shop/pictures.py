"""Drawn pictures of products, for use without a network: two tones, a shape and the category's sign."""

from __future__ import annotations

import functools
import hashlib
import tomllib
from importlib import resources
from urllib.parse import quote

DRAWINGS = tomllib.loads(resources.files(__package__).joinpath("static", "drawings.toml").read_text("utf-8"))
_PICTURES = DRAWINGS["pictures"]


@functools.lru_cache(maxsize=4096)
def picture(asin: str, category: str) -> str:
    """Return an SVG of 320 x 320 as a `data:` URI. Equal arguments give equal pictures on every machine."""
    dice = hashlib.blake2b(asin.encode(), digest_size=4).digest()
    entry = _PICTURES["categories"].get(category.lower(), {"hue": 205, "signs": _PICTURES["parcel"]})
    hue, signs, shapes = (entry["hue"] + dice[0] % 49 - 24) % 360, entry["signs"], _PICTURES["shapes"]
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 320 320">'
        f'<rect width="320" height="320" fill="hsl({hue} 46% {88 + dice[1] % 5}%)"/>'
        f'<g fill="hsl({(hue + 14) % 360} 44% {76 + dice[2] % 6}%)">{shapes[dice[3] % len(shapes)]}</g>'
        f'<g transform="translate(88 88) scale(6)" fill="none" stroke="hsl({hue} 48% 30%)" stroke-width="1.3" '
        f'stroke-linecap="round" stroke-linejoin="round">{signs[dice[2] % len(signs)]}</g></svg>'
    )
    return "data:image/svg+xml," + quote(svg.replace('"', "'"), safe=" =:/'()")
