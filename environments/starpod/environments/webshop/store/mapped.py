"""A catalogue in sections: products as compressed records, found by position, asin, category, query, attribute."""

from __future__ import annotations

import hashlib
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import msgpack
import numpy as np

from starpod.environments.webshop.catalogue.product import HumanInstruction, Product

from .sections import Section, SectionWriter, StoreError, write_array

PRODUCTS_KEPT = 4096
"""Decoded products that a process keeps: some 20 MB."""

_SAMPLE = 256
"""So many products make the dictionary that all others are compressed with."""
_WINDOW = 1 << 15


def encode(product: Product) -> bytes:
    """A product as bytes, uncompressed."""
    row = [getattr(product, name) for name in Product.__slots__]
    row[-1] = [(asked.instruction, asked.attributes, asked.options) for asked in product.human]
    packed = msgpack.packb(row, unicode_errors="surrogatepass")
    assert isinstance(packed, bytes)
    return packed


def decode(data: bytes) -> Product:
    """The product that `encode` wrote."""
    row = list(msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass"))
    row[-1] = tuple(HumanInstruction(*asked) for asked in row[-1])
    return Product(*row)


class CatalogueWriter:
    """Writes products one by one; `finish` writes what finds them. Use as a context manager.

    The first `loaded` products can be found and shown; any after them are documents of the index alone.
    """

    def __init__(self, folder: Path) -> None:
        self.count = 0
        self._folder = folder
        self._data = SectionWriter(folder, "products.data")
        self._offsets = array("q", [0])
        self._content = hashlib.sha256()
        self._sample: list[bytes] = []
        self._dictionary = b""
        self._asins: dict[str, array[int]] = {}
        self._found: dict[str, dict[str, array[int]]] = {"category": {}, "query": {}, "attribute": {}}

    def __enter__(self) -> CatalogueWriter:
        self._data.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            self._write_sample()
        self._data.__exit__(*exception)

    def add(self, product: Product, *, loaded: bool = True) -> None:
        """Adds the next product. Raises ValueError if its asin is there already."""
        if loaded:
            position = self.count
            if product.asin in self._asins:
                raise ValueError(f"asin {product.asin} occurs twice")
            self._asins[product.asin] = array("i", [position])
            self._note("category", product.category, position)
            self._note("query", product.query, position)
            for attribute in dict.fromkeys(product.attributes):
                self._note("attribute", attribute, position)
        self.count += 1
        row = encode(product)
        self._content.update(len(row).to_bytes(4, "little") + row)
        if self._compressor is None:
            self._sample.append(row)
            if len(self._sample) == _SAMPLE:
                self._write_sample()
        else:
            self._write(row)

    def finish(self) -> tuple[dict[str, Section], str]:
        """The sections, after the context has ended, and the digest of all products, however they were compressed."""
        sections = {
            "products.data": self._data.section,
            "products.offsets": write_array(self._folder, "products.offsets", np.array(self._offsets, np.int64)),
            "products.dictionary": write_array(
                self._folder, "products.dictionary", np.frombuffer(self._dictionary, np.uint8)
            ),
        }
        for kind, found in (("asin", self._asins), *self._found.items()):
            for name, column in _columns(found).items():
                sections[f"{kind}.{name}"] = write_array(self._folder, f"{kind}.{name}", column)
        return sections, self._content.hexdigest()

    def _note(self, kind: str, name: str, position: int) -> None:
        found = self._found[kind]
        if name in found:
            found[name].append(position)
        else:
            found[name] = array("i", [position])

    _compressor: Any = None

    def _write_sample(self) -> None:
        if self._compressor is None:
            self._dictionary = b"".join(self._sample)[-_WINDOW:]
            self._compressor = zlib.compressobj(5, zlib.DEFLATED, -15, 8, zlib.Z_DEFAULT_STRATEGY, self._dictionary)
            for row in self._sample:
                self._write(row)
            self._sample.clear()

    def _write(self, row: bytes) -> None:
        compressor = self._compressor.copy()
        data = compressor.compress(row) + compressor.flush()
        self._data.write(zlib.crc32(row).to_bytes(4, "little") + data)
        self._offsets.append(self._data.size)


class MappedCatalogue:
    """A Catalogue over the sections of a store. The products asked for last are kept decoded."""

    def __init__(self, arrays: Mapping[str, np.ndarray], loaded: int) -> None:
        self._loaded = loaded
        self._data = arrays["products.data"]
        self._offsets = arrays["products.offsets"]
        self._dictionary = arrays["products.dictionary"].tobytes()
        if not len(self._offsets) or int(self._offsets[0]) or int(self._offsets[-1]) != len(self._data):
            raise StoreError("the offsets of the products do not fit their data; build the store again")
        self._kept = lru_cache(PRODUCTS_KEPT)(self._read)
        self.position = lru_cache(2 * PRODUCTS_KEPT)(_Names(arrays, "asin").first)
        self.in_category = lru_cache(64)(_Names(arrays, "category").find)
        self.with_query = lru_cache(256)(_Names(arrays, "query").find)
        self.with_attribute = lru_cache(256)(_Names(arrays, "attribute").find)

    position: Callable[[str], int | None]
    in_category: Callable[[str], Sequence[int]]
    with_query: Callable[[str], Sequence[int]]
    with_attribute: Callable[[str], Sequence[int]]

    def __len__(self) -> int:
        return self._loaded

    def __getitem__(self, position: int) -> Product:
        """Raises StoreError if the product's record is damaged."""
        if not 0 <= position < self._loaded:
            raise IndexError(position)
        return self._kept(position)

    def __iter__(self) -> Iterator[Product]:
        """All loaded products, without keeping them."""
        return map(self._read, range(self._loaded))

    def documents(self) -> Iterator[tuple[str, str]]:
        """Asin and text of everything that the index holds: the loaded products and those after them."""
        for product in map(self._read, range(len(self._offsets) - 1)):
            yield product.asin, product.index_text()

    def _read(self, position: int) -> Product:
        start, end = int(self._offsets[position]), int(self._offsets[position + 1])
        record = self._data[start:end].tobytes()
        decompressor = zlib.decompressobj(-15, self._dictionary)
        try:
            row = decompressor.decompress(record[4:])
        except zlib.error:
            row = b""
        # What follows a record is another one: then the offsets are wrong, and so may be its beginning.
        if not row or decompressor.unused_data or zlib.crc32(row).to_bytes(4, "little") != record[:4]:
            raise StoreError(f"the record of product {position} is damaged; build the store again")
        return decode(row)


class Positions(Sequence[int]):
    """Positions in a mapped array, as plain integers."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        found: int | list[int] = self._array[place].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._array.tolist())


class _Names:
    """Names to positions: the names sorted in one array of bytes, the positions of each in a row of another."""

    def __init__(self, arrays: Mapping[str, np.ndarray], kind: str) -> None:
        self._text = arrays[f"{kind}.names"]
        self._offsets = arrays[f"{kind}.offsets"]
        self._ends = arrays[f"{kind}.ends"]
        self._positions = arrays[f"{kind}.positions"]
        last, end = (int(column[-1]) if len(column) else 0 for column in (self._offsets, self._ends))
        if len(self._offsets) != len(self._ends) or (last, end) != (len(self._text), len(self._positions)):
            raise StoreError(f"the sections of {kind} do not fit together; build the store again")

    def find(self, name: str) -> Sequence[int]:
        wanted = _bytes(name)
        row = bisect_left(range(1, len(self._offsets)), wanted, key=self._name) + 1
        if row >= len(self._offsets) or self._name(row) != wanted:
            return ()
        return Positions(self._positions[int(self._ends[row - 1]) : int(self._ends[row])])

    def first(self, name: str) -> int | None:
        return next(iter(self.find(name)), None)

    def _name(self, row: int) -> bytes:
        return self._text[int(self._offsets[row - 1]) : int(self._offsets[row])].tobytes()


def _columns(found: Mapping[str, array[int]]) -> dict[str, np.ndarray]:
    """The arrays of `_Names`. Offsets and ends have one entry more than there are names, the first of them 0."""
    rows = sorted((_bytes(name), positions) for name, positions in found.items())
    return {
        "names": np.frombuffer(b"".join(name for name, _ in rows), np.uint8),
        "offsets": np.cumsum([0, *(len(name) for name, _ in rows)], dtype=np.int64),
        "ends": np.cumsum([0, *(len(positions) for _, positions in rows)], dtype=np.int64),
        "positions": np.concatenate([np.zeros(0, np.int32), *(np.array(each, np.int32) for _, each in rows)]),
    }


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
