"""Pictures for products whose own cannot be loaded: two tones, a shape and the category's sign, drawn from the asin."""

from __future__ import annotations

import functools
import hashlib
from urllib.parse import quote

_SIGNS = {
    "beauty": (
        '<path d="M9 21h6V12H9zM9.7 12V9h4.6v3M10.4 9V5l3.2-2.2V9"/>',
        '<path d="M7 21h10a1 1 0 0 0 1-1v-8a3 3 0 0 0-3-3H9a3 3 0 0 0-3 3v8a1 1 0 0 0 1 1zM10 9V6h4v3'
        'M12 6V3h4M6 14h12"/>',
    ),
    "electronics": (
        '<path d="M4 15v-3a8 8 0 0 1 16 0v3M4 14h3v6H5.5a1.5 1.5 0 0 1-1.5-1.5z'
        'M20 14h-3v6h1.5a1.5 1.5 0 0 0 1.5-1.5z"/>',
        '<rect x="4" y="5" width="16" height="11" rx="1.5"/><path d="M9 20h6M12 16v4"/>',
        '<rect x="3" y="8" width="18" height="12" rx="2"/><circle cx="12" cy="14" r="3.5"/><path d="'
        'M8 8l1.5-3h5L16 8"/>',
    ),
    "fashion": (
        '<path d="M8 3l-5 3 2 4 2-1v12h10V9l2 1 2-4-5-3a4 4 0 0 1-8 0z"/>',
        '<path d="M12 9.5L2.8 16.3A1 1 0 0 0 3.4 18h17.2a1 1 0 0 0 .6-1.7zM12 9.5V8.3a2 2 0 1 0-2-2"/>',
    ),
    "garden": (
        '<path d="M12 21v-9M12 14c0-5-3-7-8-7 0 5 3 7 8 7zM12 12c0-5 3-7 8-7 0 5-3 7-8 7z"/>',
        '<path d="M8 3h8l3 8H5zM12 11v8M8 21h8M16 11v4"/>',
        '<path d="M5 11V6.5A2.5 2.5 0 0 1 7.5 4h9A2.5 2.5 0 0 1 19 6.5V11'
        'M3 12.5a2 2 0 0 1 4 0V15h10v-2.5a2 2 0 0 1 4 0V19H3zM6 19v2M18 19v2"/>',
    ),
    "grocery": (
        '<path d="M12 7c-2-2-8-1.5-8 5 0 5 3 9 5.5 9 1 0 1.5-.6 2.5-.6s1.5.6 2.5.6c2.5 0 5.5-4 5.5-9'
        ' 0-6.5-6-7-8-5zM12 7c0-2 1-4 3.5-4.5"/>',
        '<path d="M3 10h18l-2 10H5zM8 10l3-6M16 10l-3-6M9 14v3M15 14v3M12 14v3"/>',
    ),
}
"""Line drawings on a field of 24 x 24."""
_PARCEL = ('<path d="M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9"/>',)
_HUES = {"beauty": 335, "electronics": 222, "fashion": 268, "garden": 150, "grocery": 32}
_SHAPES = (
    '<circle cx="160" cy="160" r="112"/>',
    '<path d="M0 320L320 70V320z"/>',
    '<path d="M64 320V168a96 96 0 0 1 192 0V320z"/>',
    '<path d="M0 196q80-56 160 0t160 0V320H0z"/>',
    '<circle cx="54" cy="70" r="92"/><circle cx="278" cy="270" r="122"/>',
    '<rect x="56" y="56" width="208" height="208" rx="64" transform="rotate(18 160 160)"/>',
)


@functools.lru_cache(maxsize=4096)
def picture(asin: str, category: str) -> str:
    """A `data:` URI of an SVG of 320 x 320: the same for the same asin and category, on every machine."""
    dice = hashlib.blake2b(asin.encode(), digest_size=4).digest()
    known = category.lower()
    hue = (_HUES.get(known, 205) + dice[0] % 49 - 24) % 360
    signs = _SIGNS.get(known, _PARCEL)
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 320 320">'
        f'<rect width="320" height="320" fill="hsl({hue} 46% {88 + dice[1] % 5}%)"/>'
        f'<g fill="hsl({(hue + 14) % 360} 44% {76 + dice[2] % 6}%)">{_SHAPES[dice[3] % len(_SHAPES)]}</g>'
        f'<g transform="translate(88 88) scale(6)" fill="none" stroke="hsl({hue} 48% 30%)" stroke-width="1.3" '
        f'stroke-linecap="round" stroke-linejoin="round">{signs[dice[2] % len(signs)]}</g></svg>'
    )
    return "data:image/svg+xml," + quote(svg.replace('"', "'"), safe=" =:/'()")
