"""Seeds derived from seeds, identical on every machine and in every process."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *labels: str | int) -> int:
    """Return a 64-bit seed derived from a 64-bit seed and labels, by BLAKE2b over the decimal texts joined by '/'.

    Different labels give independent random streams, so that the start's stream cannot leak into the transitions'.
    """
    text = "/".join(map(str, (seed, *labels)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
