"""A table of the nouns of all titles. It is made when a store is built, because taggers are slow."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import msgpack
import numpy as np


def nouns_columns(tagged: Iterable[tuple[str, tuple[str, ...]]]) -> dict[str, np.ndarray]:
    """Return the arrays of a MappedTagger from titles and their nouns."""
    keys, offsets, rows = array("Q"), array("q", [0]), []
    seen_keys: set[int] = set()
    for title, nouns in tagged:
        key = _key(title)
        if key in seen_keys:
            continue
        seen_keys.add(key)
        keys.append(key)
        rows.append(msgpack.packb(nouns, unicode_errors="surrogatepass"))
        offsets.append(offsets[-1] + len(rows[-1]))
    hashes = np.array(keys, np.uint64)
    order = np.argsort(hashes).astype(np.uint32)
    return {
        "keys": hashes[order],
        "rows": order,
        "offsets": np.array(offsets, np.int64),
        "data": np.frombuffer(b"".join(rows), np.uint8),
    }


class MappedTagger:
    """A Tagger that looks titles up in the table. Raises KeyError for unknown titles."""

    def __init__(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        self.name = name
        self._arrays = arrays
        self.nouns = lru_cache(4096)(self._nouns)

    nouns: Callable[[str], tuple[str, ...]]

    def _nouns(self, title: str) -> tuple[str, ...]:
        keys, offsets = self._arrays["keys"], self._arrays["offsets"]
        key = np.uint64(_key(title))
        index = int(np.searchsorted(keys, key))
        if index == len(keys) or keys[index] != key:
            raise KeyError(f"the store's table of {self.name} has no title {title!r}")
        row = int(self._arrays["rows"][index])
        data = self._arrays["data"][int(offsets[row]) : int(offsets[row + 1])].tobytes()
        nouns: tuple[str, ...] = msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass")
        return nouns


def _key(title: str) -> int:
    """Return the 8-byte BLAKE2b hash of a title. The probability of a collision among a million titles is 3e-8."""
    return int.from_bytes(hashlib.blake2b(title.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
