"""Reading of products from the original WebShop's three files, with its cleaning rules.

A record is malformed if the original would raise an exception when it loads, indexes or shows it. There are five
differences from the original:
- The fourteen keys that the original removes can be missing.
- The file of human instructions can be missing, and so can a product's entry in the file of attributes.
- A product can have no bullets.
- Texts must be valid Unicode, because stores and messages contain UTF-8.
- All entries of lists, such as images and bullets, must be texts, even if they are never used.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .jsonstream import BrokenJson, JSONElement, elements
from .product import HumanInstruction, Product

LONGEST_ASIN = 10
NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""Value of `attributes` for a product whose attributes are unknown."""

_NOT_A_NUMBER = re.compile(r"[^\d.]")


@dataclass(frozen=True, slots=True)
class MalformedRecord:
    """A record that cannot be read."""

    place: str
    """Name of the file, number of the record, and number of the line. Both numbers start at 1."""
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


def read_products(
    products: Path,
    attributes: Path,
    human: Path | None,
    *,
    rows: int | None = None,
    on_malformed: Callable[[MalformedRecord], None],
) -> Iterator[Product]:
    """Yield the products of the original WebShop's files in catalogue order. Only one record at a time is in memory.

    Args:
        products: the list of products, such as items_shuffle.json. This and the other files can be gzipped (`.gz`).
        attributes: the attributes and synthetic instruction of each asin, such as items_ins_v2.json.
        human: the list of human instructions of each asin, such as items_human_ins.json; None for no such file.
        rows: maximum number of records to read from the list of products, including malformed ones; None: all.
        on_malformed: called with each record that cannot be read. The record is skipped, unless this function raises.
            If a file stops being valid JSON, there is a single call, and the rest of the file is ignored.

    Raises:
        OSError: a file cannot be opened.
    """
    attribute_records = _ByAsin(attributes, _described, on_malformed)
    human_records = _ByAsin(human, _instructed, on_malformed) if human is not None else None
    asins: set[str] = set()
    for number, element in _numbered(products, "list", rows, on_malformed):
        try:
            record = _object(element.value, "the record")
            asin = _text(record, "asin")
            if asin == "nan" or len(asin) > LONGEST_ASIN or asin in asins:
                continue
            product = _product(asin, record, attribute_records, human_records)
        except _UnusableError as error:
            on_malformed(MalformedRecord(f"{products.name}, record {number}, line {element.line}", str(error)))
        else:
            asins.add(asin)
            yield product


class _UnusableError(ValueError):
    """A record is malformed; the message says why."""


def _numbered(
    path: Path, kind: Literal["list", "object"], rows: int | None, on_malformed: Callable[[MalformedRecord], None]
) -> Iterator[tuple[int, JSONElement]]:
    """Yield the elements of a file with their numbers from 1. If the file is broken, report that and stop."""
    number = 0
    try:
        for number, element in enumerate(itertools.islice(elements(path, kind), rows), 1):
            yield number, element
    except BrokenJson as error:
        location = f"{path.name}, after record {number}, line {error.line}"
        on_malformed(MalformedRecord(location, f"{error.reason}; nothing more is read of this file"))


class _ByAsin:
    """The entries of a file by asin. They are on disk, because 1.2 million entries in a dict take almost a gigabyte."""

    def __init__(
        self, path: Path, clean: Callable[[Any], Any], on_malformed: Callable[[MalformedRecord], None]
    ) -> None:
        self._table = sqlite3.connect("")  # a temporary file, which is deleted with the connection
        self._table.execute("PRAGMA journal_mode = OFF")
        self._table.execute("CREATE TABLE entries (asin BLOB, entry TEXT)")
        self._table.executemany("INSERT INTO entries VALUES (?, ?)", _entries(path, clean, on_malformed))
        self._table.execute("CREATE INDEX by_asin ON entries (asin)")

    def get(self, asin: str) -> Any:
        """Return the file's last entry for a product, or None."""
        query = "SELECT entry FROM entries WHERE asin = ? ORDER BY rowid DESC LIMIT 1"
        row = self._table.execute(query, (asin.encode(),)).fetchone()
        return None if row is None else json.loads(row[0])


def _entries(
    path: Path, clean: Callable[[Any], Any], on_malformed: Callable[[MalformedRecord], None]
) -> Iterator[tuple[bytes, str]]:
    for number, (asin, value, line) in _numbered(path, "object", None, on_malformed):
        try:
            yield _valid(asin, "the asin").encode(), json.dumps(clean(value))
        except _UnusableError as error:
            on_malformed(MalformedRecord(f"{path.name}, record {number} ({asin!a}), line {line}", str(error)))


def _described(value: Any) -> tuple[Any, ...]:
    """Return attributes (None if unknown), instruction, and the instruction's attributes, from items_ins_v2.json."""
    entry = _object(value, "the entry")
    attributes = _texts(entry, "attributes") if "attributes" in entry else None
    if entry.get("instruction") is None:
        return attributes, None, ()
    names = _texts(entry, "instruction_attributes")
    if not names:
        raise _UnusableError("an instruction, but no instruction_attributes")
    return attributes, _text(entry, "instruction"), names


def _instructed(value: Any) -> list[tuple[Any, ...]]:
    """Return text, attributes and options of each instruction in an entry of items_human_ins.json."""
    if not isinstance(value, list):
        raise _UnusableError(f"the entry is {_json_type(value)}, not a list of instructions")
    return [
        (_text(entry, "instruction"), _texts(entry, "instruction_attributes"), _texts(entry, "instruction_options"))
        for entry in (_object(item, "an instruction") for item in value)
    ]


def _product(asin: str, record: dict[str, Any], described: _ByAsin, instructed: _ByAsin | None) -> Product:
    images = _texts(record, "images")
    if not images:
        raise _UnusableError("no images")
    pricing, price_tag = _pricing(record.get("pricing"))
    options, option_images = _options(_field(record, "customization_options"))
    bullets = _field(record, "small_description")
    attributes, instruction, instruction_attributes = described.get(asin) or (None, None, ())
    human = (instructed.get(asin) if instructed else None) or ()
    return Product(
        asin=asin,
        title=_text(record, "name"),
        description=_text(record, "full_description"),
        bullets=_texts(record, "small_description")
        if isinstance(bullets, list)
        else (_text(record, "small_description"),),
        category=_text(record, "category"),
        query=_text(record, "query").lower().strip(),
        product_category=_text(record, "product_category"),
        pricing=pricing,
        price_tag=price_tag,
        options=options,
        option_images=option_images,
        attributes=NO_ATTRIBUTES if attributes is None else tuple(attributes),
        image=images[0],
        instruction=instruction,
        instruction_attributes=tuple(instruction_attributes),
        human=tuple(HumanInstruction(text, tuple(wanted), tuple(chosen)) for text, wanted, chosen in human),
    )


def _pricing(value: Any) -> tuple[tuple[float, ...], str]:
    """Return one or two prices, unsorted, and their text."""
    if not value:
        return (100.0,), "$100.0"
    if not isinstance(value, str):
        raise _UnusableError(f"pricing is {_json_type(value)}, not a text")
    try:
        prices = tuple(float(_NOT_A_NUMBER.sub("", part)) for part in value.split("$")[1:])[:2]
    except ValueError:
        prices = ()
    if not prices or not all(map(math.isfinite, prices)):
        raise _UnusableError(f"no price can be read from {value!a}")
    return prices, " to ".join(f"${price}" for price in prices)


def _options(value: Any) -> tuple[dict[str, tuple[str, ...]], dict[str, str | None]]:
    """Return the values of each group, and the address of each value's picture."""
    options: dict[str, tuple[str, ...]] = {}
    images: dict[str, str | None] = {}
    for group, entries in _object(value, "customization_options").items() if value else ():
        if entries is None:
            continue
        if entries and not isinstance(entries, list):
            raise _UnusableError(f"option {group!a} is {_json_type(entries)}, not a list")
        values = []
        for item in entries:
            entry = _object(item, f"a value of option {group!a}")
            text = _text(entry, "value").strip().replace("/", " | ").lower()
            image = entry.get("image")
            values.append(text)
            images[text] = None if image is None else _text(entry, "image")
        options[_valid(group, "an option's name").lower()] = tuple(values)
    return options, images


def _field(record: dict[str, Any], key: str) -> Any:
    try:
        return record[key]
    except KeyError:
        raise _UnusableError(f"no {key}") from None


def _text(record: dict[str, Any], key: str) -> str:
    return _valid(_field(record, key), key)


def _texts(record: dict[str, Any], key: str) -> tuple[str, ...]:
    value = _field(record, key)
    if not isinstance(value, list):
        raise _UnusableError(f"{key} is {_json_type(value)}, not a list")
    return tuple(_valid(item, f"an entry of {key}") for item in value)


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _UnusableError(f"{what} is {_json_type(value)}, not an object")
    return value


def _valid(value: Any, what: str) -> str:
    """Return the value if it is a text that can be encoded as UTF-8."""
    if not isinstance(value, str):
        raise _UnusableError(f"{what} is {_json_type(value)}, not a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _UnusableError(f"{what} holds half of a surrogate pair") from None
    return value


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
