"""Generation of products in the original WebShop's raw schema."""

from __future__ import annotations

import random as randoms
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .names import Random, asin, code, common_name, name, pick, small, two
from .people import human_record, instruction
from .vocabulary import DEPARTMENTS, DRAWN, ORDERED, ROLES, UNUSED, Attribute, Kind
from .wording import Wording, anecdotes, capital, figures, fill, title

Records = tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]
"""The record of a product, its entry of attributes, and its human instructions (possibly none)."""

PICTURED = ("Color", "Style", "Scent")
"""Groups of options whose values have pictures and prices."""
_SHARES = (0.238, 0.467, 0.683, 0.883)
"""Cumulative probabilities of the departments, from the original WebShop's first thousand products."""
_ATTRIBUTES = (0.18, 0.37, 0.56, 0.695, 0.815, 0.88, 0.92, 0.96)
"""Cumulative probabilities of 0, 1, 2, ... attributes."""
_LINES = 48
"""Maximum number of product lines per kind that are remembered, so that later products can belong to them."""
_BRANDS = 512
"""Maximum number of brands per department that are remembered, so that later product lines can belong to them."""
_INSTRUCTED = 10_000
"""Half of the products below this index have human instructions. Of the later products, 1 in 100 has them."""


@dataclass(slots=True)
class ProductLine:
    """A product line: products of one brand that differ in a few attributes, options and details."""

    brand: str
    series: str
    noun: str
    attributes: tuple[Attribute, ...]
    made: str
    price: float
    options: tuple[str, ...]


class Maker:
    """A generator of the products of one seed. Its memory is bounded for any number of products."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = randoms.Random(seed).random
        self._wordings: dict[str, Wording] = {}
        self._lines: dict[str, list[ProductLine]] = {}
        self._brands: dict[str, list[str]] = {}

    def products(self, count: int) -> Iterator[Records]:
        """Generate the first `count` products."""
        for number in range(count):
            yield self._product(number)

    def _product(self, number: int) -> Records:
        random = self._random
        kinds = DEPARTMENTS[bisect(_SHARES, random())]
        kind = kinds[int(random() * len(kinds))]
        wording = self._wordings.get(kind.query)
        if wording is None:
            position = sum(map(len, DEPARTMENTS[: DEPARTMENTS.index(kinds)])) + kinds.index(kind)
            wording = self._wordings[kind.query] = Wording(kind, position)
        line = self._line(kind)
        has = self._attributes(kind, line)
        product_asin = asin(number, self._seed)
        model = code(random)
        prices = self._prices(line)
        options = self._options(line)
        in_title = has[: 1 + int(random() * 3)]
        record = {
            "name": self._title(kind, line, in_title, model),
            "full_description": self._description(kind, wording, line, model),
            "pricing": "".join(f"${price:,.2f}" for price in prices),
            "images": [f"https://images.example.com/I/{product_asin}-{n}.jpg" for n in range(1 + int(random() * 8))],
            "product_category": kind.path,
            "average_rating": round(5 - 2.5 * small(random), 1) if random() < 0.64 else "",
            "small_description": self._bullets(kind, wording, line, has[len(in_title) :]),
            "customization_options": self._customization(options, product_asin, prices),
            "asin": product_asin,
            "category": kind.category,
            "query": kind.query,
            "page": 1 + int(random() * 400),
            **UNUSED,
            "brand": f"Brand: {line.brand}",
        }
        if random() < 0.2:
            record["model"] = model
        return record, self._entry(kind, has), self._human(number, product_asin, line, has, options)

    def _line(self, kind: Kind) -> ProductLine:
        """Choose the line of a product: an earlier one, or a new one of an earlier or a new brand."""
        random = self._random
        lines = self._lines.setdefault(kind.query, [])
        if lines and random() < 0.55:
            return lines[int(random() * len(lines))]
        brands = self._brands.setdefault(kind.category, [])
        if not brands or random() < 0.6:
            label = name(random)
            draw = random()
            brand = label.upper() if draw < 0.25 else f"{label} {capital(name(random))}" if draw < 0.35 else label
            _remember(random, brands, brand, _BRANDS)
        else:
            brand = pick(random, brands)
        pool = list(kind.attributes)
        low, high = kind.price
        line = ProductLine(
            brand=brand,
            series=common_name(random),
            noun=pick(random, kind.nouns),
            attributes=tuple(pool.pop(int(random() * len(pool))) for _ in range(min(9, len(pool) - 2))),
            made=pick(random, kind.made),
            price=low + (high - low) * small(random),
            options=tuple(generator for generator, share in kind.options if random() < share),
        )
        _remember(random, lines, line, _LINES)
        return line

    def _attributes(self, kind: Kind, line: ProductLine) -> list[Attribute]:
        """Choose a product's attributes: some of the line's attributes, of which one is often replaced."""
        random = self._random
        has = list(line.attributes[: bisect(_ATTRIBUTES, random())])
        if has and random() < 0.6:
            attribute = kind.attributes[int(random() * len(kind.attributes))]
            if attribute not in has:
                has[int(random() * len(has))] = attribute
        return has

    def _prices(self, line: ProductLine) -> list[float]:
        """Draw no price, one price, or the ends of a range. A few records list the ends in the wrong order."""
        random = self._random
        draw = random()
        if draw < 0.09:
            return []
        price = line.price * (0.7 + 0.6 * random())
        ending = (0.99, 0.99, 0.99, 0.95, 0.0, 0.49, 0.89)[int(random() * 7)]
        low = max(1, int(price)) + ending
        if draw < 0.907:
            return [low]
        high = low + 1 + int(price * random())
        return [low, high] if draw < 0.997 else [high, low]

    def _options(self, line: ProductLine) -> dict[str, list[str]]:
        """Choose the groups of options, and the values of each group."""
        random = self._random
        options: dict[str, list[str]] = {}
        for generator in line.options:
            if random() < 0.12:
                continue
            count = 1 + int(20 * small(random))
            if generator in ORDERED:
                group, values = ORDERED[generator]
                start = int(random() * max(1, len(values) - count + 1))
                options[group] = list(values[start : start + count])
            else:
                group, values = DRAWN[generator]
                start, step = int(random() * len(values)), 1 + int(random() * (len(values) - 1) / count)
                choices = [values[(start + n * step) % len(values)] for n in range(min(count, len(values)))]
                options[group] = self._coded(choices) if group == "Color" and random() < 0.2 else choices
        return options

    def _coded(self, colors: list[str]) -> list[str]:
        """Add codes to colors, such as K17-Black, as sellers with many colors do."""
        random = self._random
        if random() < 0.5:
            letter = "ABCDEFGHK"[int(random() * 9)]
            start = int(random() * 90)
            return [f"{letter}{start + n}-{color}" for n, color in enumerate(colors)]
        return [f"{color}{int(random() * 9000) + 100}" for color in colors]

    def _customization(self, options: dict[str, list[str]], product_asin: str, prices: list[float]) -> Any:
        """Return the options in the form of a record; "" for none."""
        random = self._random
        groups: dict[str, list[dict[str, Any]] | None] = {}
        draw = random()
        price = prices[0] if prices else 0
        for group, values in options.items():
            selected_index = int(draw * len(values))
            if group in PICTURED:
                groups[group] = [
                    {
                        "is_selected": n == selected_index,
                        "url": None if n == selected_index else f"https://www.example.com/dp/{product_asin}?v={n}",
                        "value": value,
                        "price_string": f"${price:,.2f}" if price else "",
                        "price": price,
                        "image": f"https://images.example.com/I/{product_asin}-{group[0]}{n}.jpg",
                    }
                    for n, value in enumerate(values)
                ]
            else:
                groups[group] = [
                    {"is_selected": n == selected_index, "is_available": True, "value": value, "asin": product_asin}
                    for n, value in enumerate(values)
                ]
        if random() < 0.1:
            groups["Color" if "Color" not in groups else "Pattern Name"] = None
        return groups or ""

    def _title(self, kind: Kind, line: ProductLine, product_attributes: list[Attribute], model: str) -> str:
        random = self._random
        by_role: dict[str, list[str]] = {role: [] for role in ROLES}
        for attribute in product_attributes:
            by_role[attribute.role].append(title(attribute.text))
        parts = [line.brand]
        if random() < 0.35:
            parts.append(line.series)
        parts += by_role["is"][:1]
        shows_make = random() < 0.4
        if shows_make:
            parts.append(title(line.made))
        parts.append(title(line.noun))
        if by_role["has"]:
            parts.append("with " + " and ".join(by_role["has"]))
        if by_role["for"]:
            parts.append("for " + " and ".join(by_role["for"]))
        details = by_role["is"][1:]
        part, part2 = two(random, kind.parts)
        make = pick(random, kind.made)
        if random() < 0.75 and not (shows_make and make == line.made):
            details.append(title(make))
        if random() < 0.6:
            details.append(title(f"{part2} and {part}"))
        if random() < 0.55:
            details.append(title(pick(random, kind.does).removeprefix("is ")))
        if random() < 0.3:
            details.append(model)
        if kind.category == "grocery" and random() < 0.3:
            details.append(f"Pack of {2 + int(random() * 11)}")
        elif kind.category == "fashion" and random() < 0.3:
            details.append(pick(random, DRAWN["color"][1]))
        return ", ".join([" ".join(parts), *details])

    def _description(self, kind: Kind, wording: Wording, line: ProductLine, model: str) -> str:
        """Write a description: "" for 30 % of the products, else sentences about the kind and a few unique ones."""
        random = self._random
        if random() < 0.3:
            return ""
        sentences = [f"{line.brand} {line.series} {line.noun}."]
        sentences += wording.text(random, 4 + int(17 * small(random)))
        if random() < 0.7:
            sentences.insert(1 + int(random() * 3), figures(random, kind, model))
        sentences += anecdotes(random, kind.query, line.series)
        return fill(" ".join(sentences), kind, line.noun)

    def _bullets(self, kind: Kind, wording: Wording, line: ProductLine, attributes: list[Attribute]) -> Any:
        """Write bullets for attributes that are not in the title, and others. A few records get a text instead."""
        random = self._random
        bullets = [pick(random, wording.about[attribute]) for attribute in attributes]
        while len(bullets) < 7 and random() < (1 if len(bullets) < 2 else 0.72):
            bullets.insert(int(random() * (len(bullets) + 1)), pick(random, wording.bullets))
        if random() < 0.016:
            return fill("".join(bullets), kind, line.noun)
        return [fill(bullet, kind, line.noun) for bullet in bullets]

    def _entry(self, kind: Kind, product_attributes: list[Attribute]) -> dict[str, Any]:
        """Return an entry of items_ins_v2.json."""
        random = self._random
        entry: dict[str, Any] = {"attributes": [attribute.text for attribute in product_attributes]}
        if len(product_attributes) > 1 and random() < 0.64:
            subset = [attribute for attribute in product_attributes if random() < 0.6]
            if len(subset) < 2:
                subset = product_attributes[:2]
            by_role = {role: ", ".join(item.text for item in subset if item.role == role) for role in ROLES}
            entry["instruction"] = " ".join(
                ["Find me", *filter(None, [by_role["is"]]), kind.query]
                + [f"with {by_role['has']}"] * bool(by_role["has"])
                + [f"for {by_role['for']}"] * bool(by_role["for"])
            )
            entry["instruction_attributes"] = [attribute.text for attribute in subset]
        return entry

    def _human(
        self,
        number: int,
        product_asin: str,
        line: ProductLine,
        product_attributes: list[Attribute],
        options: dict[str, list[str]],
    ) -> list[dict[str, Any]]:
        random = self._random
        draw = random()
        if not product_attributes or draw >= (0.55 if number < _INSTRUCTED else 0.01):
            return []
        attributes = [attribute.text for attribute in product_attributes]
        return [
            human_record(
                product_asin,
                instruction(random, line.brand, line.noun, product_attributes, options),
                attributes,
                options,
            )
            for _ in range(2 if random() < 0.1 else 1)
        ]


def _remember(random: Random, items: list[Any], new: Any, max_items: int) -> None:
    """Add an item to a list. If the list is full, replace a random item."""
    if len(items) < max_items:
        items.append(new)
    else:
        items[int(random() * max_items)] = new
