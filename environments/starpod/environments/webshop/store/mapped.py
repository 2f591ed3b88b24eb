"""A memory-mapped catalogue: compressed products with look-up by position, asin, category, query and attribute."""

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

from .sections import SectionWriter, StoreError, StoreSection, write_array

PRODUCTS_KEPT = 4096
"""Maximum number of decoded products in a process's cache: about 20 MB."""

_SAMPLE = 256
"""Number of products that form the dictionary for the compression of all products."""
_WINDOW = 1 << 15


def encode(product: Product) -> bytes:
    """Encode a product as bytes, uncompressed."""
    row = [getattr(product, name) for name in Product.__slots__]
    row[-1] = [(human.instruction, human.attributes, human.options) for human in product.human]
    data = msgpack.packb(row, unicode_errors="surrogatepass")
    assert isinstance(data, bytes)
    return data


def decode(data: bytes) -> Product:
    """Decode a product that `encode` made."""
    row = list(msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass"))
    row[-1] = tuple(HumanInstruction(*human) for human in row[-1])
    return Product(*row)


class CatalogueWriter:
    """A writer of products, to use as a context manager. `finish` then writes the look-up tables.

    Products that are not `loaded` are only documents of the search index. They come after all others.
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
        self._positions: dict[str, dict[str, array[int]]] = {"category": {}, "query": {}, "attribute": {}}

    def __enter__(self) -> CatalogueWriter:
        self._data.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            self._write_sample()
        self._data.__exit__(*exception)

    def add(self, product: Product, *, loaded: bool = True) -> None:
        """Add the next product. Raises ValueError if its asin occurred before."""
        if loaded:
            position = self.count
            if product.asin in self._asins:
                raise ValueError(f"asin {product.asin} occurs twice")
            self._asins[product.asin] = array("i", [position])
            self._add_position("category", product.category, position)
            self._add_position("query", product.query, position)
            for attribute in dict.fromkeys(product.attributes):
                self._add_position("attribute", attribute, position)
        self.count += 1
        row = encode(product)
        self._content.update(len(row).to_bytes(4, "little") + row)
        if self._compressor is None:
            self._sample.append(row)
            if len(self._sample) == _SAMPLE:
                self._write_sample()
        else:
            self._write(row)

    def finish(self) -> tuple[dict[str, StoreSection], str]:
        """Return the sections, and a digest of all products that does not depend on their compression.

        Call it after the context has ended.
        """
        sections = {
            "products.data": self._data.section,
            "products.offsets": write_array(self._folder, "products.offsets", np.array(self._offsets, np.int64)),
            "products.dictionary": write_array(
                self._folder, "products.dictionary", np.frombuffer(self._dictionary, np.uint8)
            ),
        }
        for kind, positions in (("asin", self._asins), *self._positions.items()):
            for name, column in _columns(positions).items():
                sections[f"{kind}.{name}"] = write_array(self._folder, f"{kind}.{name}", column)
        return sections, self._content.hexdigest()

    def _add_position(self, kind: str, name: str, position: int) -> None:
        positions = self._positions[kind]
        if name in positions:
            positions[name].append(position)
        else:
            positions[name] = array("i", [position])

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
    """A Catalogue over the sections of a store, with a cache of decoded products."""

    def __init__(self, arrays: Mapping[str, np.ndarray], loaded: int) -> None:
        self._loaded = loaded
        self._data = arrays["products.data"]
        self._offsets = arrays["products.offsets"]
        self._dictionary = arrays["products.dictionary"].tobytes()
        if not len(self._offsets) or int(self._offsets[0]) or int(self._offsets[-1]) != len(self._data):
            raise StoreError("the offsets of the products do not fit their data; build the store again")
        self._kept = lru_cache(PRODUCTS_KEPT)(self._read)
        self.position = lru_cache(2 * PRODUCTS_KEPT)(_NameTable(arrays, "asin").first)
        self.in_category = lru_cache(64)(_NameTable(arrays, "category").find)
        self.with_query = lru_cache(256)(_NameTable(arrays, "query").find)
        self.with_attribute = lru_cache(256)(_NameTable(arrays, "attribute").find)

    position: Callable[[str], int | None]
    in_category: Callable[[str], Sequence[int]]
    with_query: Callable[[str], Sequence[int]]
    with_attribute: Callable[[str], Sequence[int]]

    def __len__(self) -> int:
        return self._loaded

    def __getitem__(self, position: int) -> Product:
        """Return a product. Raises StoreError if its record is damaged."""
        if not 0 <= position < self._loaded:
            raise IndexError(position)
        return self._kept(position)

    def __iter__(self) -> Iterator[Product]:
        """Iterate over the loaded products without caching them."""
        return map(self._read, range(self._loaded))

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield asin and text of all documents of the index, including products that are not loaded."""
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
        # Unused data means that the offsets are wrong, so the beginning of the record may be wrong, too.
        if not row or decompressor.unused_data or zlib.crc32(row).to_bytes(4, "little") != record[:4]:
            raise StoreError(f"the record of product {position} is damaged; build the store again")
        return decode(row)


class Positions(Sequence[int]):
    """A sequence of plain integers over a mapped array."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        positions: int | list[int] = self._array[index].tolist()
        return positions

    def __iter__(self) -> Iterator[int]:
        return iter(self._array.tolist())


class _NameTable:
    """A table that maps names to positions. Sorted names are in one array of bytes, and positions in another array."""

    def __init__(self, arrays: Mapping[str, np.ndarray], kind: str) -> None:
        self._text = arrays[f"{kind}.names"]
        self._offsets = arrays[f"{kind}.offsets"]
        self._ends = arrays[f"{kind}.ends"]
        self._positions = arrays[f"{kind}.positions"]
        text_end, end = (int(column[-1]) if len(column) else 0 for column in (self._offsets, self._ends))
        if len(self._offsets) != len(self._ends) or (text_end, end) != (len(self._text), len(self._positions)):
            raise StoreError(f"the sections of {kind} do not fit together; build the store again")

    def find(self, name: str) -> Sequence[int]:
        name_bytes = _bytes(name)
        row = bisect_left(range(1, len(self._offsets)), name_bytes, key=self._name) + 1
        if row >= len(self._offsets) or self._name(row) != name_bytes:
            return ()
        return Positions(self._positions[int(self._ends[row - 1]) : int(self._ends[row])])

    def first(self, name: str) -> int | None:
        return next(iter(self.find(name)), None)

    def _name(self, row: int) -> bytes:
        return self._text[int(self._offsets[row - 1]) : int(self._offsets[row])].tobytes()


def _columns(positions_by_name: Mapping[str, array[int]]) -> dict[str, np.ndarray]:
    """Return the arrays of `_NameTable`. Offsets and ends begin with 0 and have one entry more than there are names."""
    rows = sorted((_bytes(name), positions) for name, positions in positions_by_name.items())
    return {
        "names": np.frombuffer(b"".join(name for name, _ in rows), np.uint8),
        "offsets": np.cumsum([0, *(len(name) for name, _ in rows)], dtype=np.int64),
        "ends": np.cumsum([0, *(len(positions) for _, positions in rows)], dtype=np.int64),
        "positions": np.concatenate([np.zeros(0, np.int32), *(np.array(part, np.int32) for _, part in rows)]),
    }


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
