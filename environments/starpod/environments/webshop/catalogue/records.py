"""The original's three files as products: its cleaning rules, its quirks, and what it would have crashed on.

A record is malformed where the original would have raised an exception on it, at loading, at indexing or when it is
shown. Otherwise everything is as in the original, except that
- the fourteen keys that it removes need not be there;
- the file of human instructions need not be there, nor a product in the file of attributes;
- a product may have no bullets at all;
- texts must be valid Unicode, since stores and messages hold UTF-8;
- of an address list, a bullet list and the like each entry must be a text, also where it is never looked at.
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

from .jsonstream import BrokenJson, Element, elements
from .product import HumanInstruction, Product

LONGEST_ASIN = 10
NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""The attributes of a product of which nothing is known."""

_NOT_A_NUMBER = re.compile(r"[^\d.]")


@dataclass(frozen=True, slots=True)
class Malformed:
    """A record that could not be read: where (file, record from 1, line from 1), and why."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


def read_products(
    products: Path,
    attributes: Path,
    human: Path | None,
    *,
    rows: int | None = None,
    on_malformed: Callable[[Malformed], None],
) -> Iterator[Product]:
    """Yields the products of the original's files in catalogue order; one record at a time is in memory.

    Args:
        products: Such as items_shuffle.json, a list of products.
        attributes: Such as items_ins_v2.json, an object: asin -> attributes and synthetic instruction.
        human: Such as items_human_ins.json, an object: asin -> list of human instructions. None for no such file.
            Each file may be packed: `.json.gz`.
        rows: The list of products is cut to this many records before anything is left out of it.
        on_malformed: Called with each record that cannot be read; the record is skipped, unless this raises. What
            follows a place where a file is no JSON any more cannot be read, which it is told once.

    Raises:
        OSError: A file cannot be opened.
    """
    described = _ByAsin(attributes, _described, on_malformed)
    instructed = _ByAsin(human, _instructed, on_malformed) if human is not None else None
    seen: set[str] = set()
    for number, element in _numbered(products, "list", rows, on_malformed):
        try:
            record = _object(element.value, "the record")
            asin = _text(record, "asin")
            if asin == "nan" or len(asin) > LONGEST_ASIN or asin in seen:
                continue
            product = _product(asin, record, described, instructed)
        except _UnusableError as error:
            on_malformed(Malformed(f"{products.name}, record {number}, line {element.line}", str(error)))
        else:
            seen.add(asin)
            yield product


class _UnusableError(ValueError):
    """A record that cannot be used; the message says why."""


def _numbered(
    path: Path, kind: Literal["list", "object"], rows: int | None, on_malformed: Callable[[Malformed], None]
) -> Iterator[tuple[int, Element]]:
    """The elements of a file, counted from 1, up to the end or to where it breaks."""
    number = 0
    try:
        for number, element in enumerate(itertools.islice(elements(path, kind), rows), 1):
            yield number, element
    except BrokenJson as error:
        place = f"{path.name}, after record {number}, line {error.line}"
        on_malformed(Malformed(place, f"{error.reason}; nothing more is read of this file"))


class _ByAsin:
    """Entries of a file by product, kept on disk: a dict of 1.2 million entries would take most of a gigabyte."""

    def __init__(self, path: Path, clean: Callable[[Any], Any], on_malformed: Callable[[Malformed], None]) -> None:
        self._table = sqlite3.connect("")  # a private file, which goes with the connection
        self._table.execute("PRAGMA journal_mode = OFF")
        self._table.execute("CREATE TABLE said (asin BLOB, what TEXT)")
        self._table.executemany("INSERT INTO said VALUES (?, ?)", _entries(path, clean, on_malformed))
        self._table.execute("CREATE INDEX by_asin ON said (asin)")

    def get(self, asin: str) -> Any:
        """The file's last entry about a product; None if there is none."""
        query = "SELECT what FROM said WHERE asin = ? ORDER BY rowid DESC LIMIT 1"
        found = self._table.execute(query, (asin.encode(),)).fetchone()
        return None if found is None else json.loads(found[0])


def _entries(
    path: Path, clean: Callable[[Any], Any], on_malformed: Callable[[Malformed], None]
) -> Iterator[tuple[bytes, str]]:
    for number, (asin, value, line) in _numbered(path, "object", None, on_malformed):
        try:
            yield _valid(asin, "the asin").encode(), json.dumps(clean(value))
        except _UnusableError as error:
            on_malformed(Malformed(f"{path.name}, record {number} ({asin!a}), line {line}", str(error)))


def _described(value: Any) -> tuple[Any, ...]:
    """Attributes (None for none said), instruction and its attributes of an entry of items_ins_v2.json."""
    entry = _object(value, "the entry")
    attributes = _texts(entry, "attributes") if "attributes" in entry else None
    if entry.get("instruction") is None:
        return attributes, None, ()
    wanted = _texts(entry, "instruction_attributes")
    if not wanted:
        raise _UnusableError("an instruction, but no instruction_attributes")
    return attributes, _text(entry, "instruction"), wanted


def _instructed(value: Any) -> list[tuple[Any, ...]]:
    """Text, attributes and options of each instruction in an entry of items_human_ins.json."""
    if not isinstance(value, list):
        raise _UnusableError(f"the entry is {_kind(value)}, not a list of instructions")
    return [
        (_text(entry, "instruction"), _texts(entry, "instruction_attributes"), _texts(entry, "instruction_options"))
        for entry in (_object(each, "an instruction") for each in value)
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
    """One or two prices, never sorted, and their text."""
    if not value:
        return (100.0,), "$100.0"
    if not isinstance(value, str):
        raise _UnusableError(f"pricing is {_kind(value)}, not a text")
    try:
        prices = tuple(float(_NOT_A_NUMBER.sub("", part)) for part in value.split("$")[1:])[:2]
    except ValueError:
        prices = ()
    if not prices or not all(map(math.isfinite, prices)):
        raise _UnusableError(f"no price can be read from {value!a}")
    return prices, " to ".join(f"${price}" for price in prices)


def _options(value: Any) -> tuple[dict[str, tuple[str, ...]], dict[str, str | None]]:
    """Group -> values, and value -> address of its picture."""
    options: dict[str, tuple[str, ...]] = {}
    images: dict[str, str | None] = {}
    for group, entries in _object(value, "customization_options").items() if value else ():
        if entries is None:
            continue
        if entries and not isinstance(entries, list):
            raise _UnusableError(f"option {group!a} is {_kind(entries)}, not a list")
        values = []
        for each in entries:
            entry = _object(each, f"a value of option {group!a}")
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
        raise _UnusableError(f"{key} is {_kind(value)}, not a list")
    return tuple(_valid(each, f"an entry of {key}") for each in value)


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _UnusableError(f"{what} is {_kind(value)}, not an object")
    return value


def _valid(value: Any, what: str) -> str:
    """The value, if it is a text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise _UnusableError(f"{what} is {_kind(value)}, not a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _UnusableError(f"{what} holds half of a surrogate pair") from None
    return value


def _kind(value: Any) -> str:
    """The name of a value's type in JSON."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
