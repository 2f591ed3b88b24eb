"""Seeds derived from seeds: the same on every machine and in every process."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *labels: str | int) -> int:
    """A 64-bit seed from a 64-bit seed and labels.

    BLAKE2b over the decimal texts joined by '/'. Different labels give independent streams, so that what fixes the
    start can never leak into what draws the transitions.
    """
    text = "/".join(map(str, (seed, *labels)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
