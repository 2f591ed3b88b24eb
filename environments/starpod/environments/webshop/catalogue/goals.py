"""The goals of a shop, human or synthetic, in the original's order: columns of numbers, a Goal made on access."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from .prices import NO_CAP, cap_candidates, draw_cap

if TYPE_CHECKING:
    from .product import Catalogue, Product

Kind = Literal["human", "synthetic"]

Caps = Literal["original", "agentgym"]
"""How price caps are chosen. `original`: one draw per instruction. `agentgym`: human instructions become one goal per
candidate cap (four without a cap where there are not two candidates), and the draws of synthetic ones start from seed
233."""

ORDER_SEED = 233
"""Fixes the order of the goals, in the original and here."""

_DRAWS_PER_GOAL = 100  # after which a selection gives up; a caller must not hold up the server


@dataclass(frozen=True, slots=True)
class Goal:
    """A purchase that an instruction asks for.

    index: its place in the goals it came from. position: that of its product in the catalogue.
    asin, category, query, name (the title), product_category: its product's.
    instruction_text: what the agent is told, with the price cap.
    attributes: what the product should be like. options: values (human) or group -> value (synthetic).
    price_upper: the cap in dollars, 1,000,000 where the text names none. weight: its share in a weighted draw.
    """

    index: int
    position: int
    asin: str
    category: str
    query: str
    name: str
    product_category: str
    instruction_text: str
    attributes: tuple[str, ...]
    price_upper: float
    options: tuple[str, ...] | dict[str, str]
    weight: float


class Goals:
    """The goals of one kind in their final order, as a sequence. Immutable, safe to read from threads.

    An instruction is one row of the columns; a synthetic one stands for a goal per combination of its product's
    options. The order says which goal of all rows an index means, so that a million goals cost megabytes.
    catalogue: the one that they were built from. arrays: the columns, perhaps memory-mapped.

    product int32 per row: position in the catalogue. record int32 per row: number of the product's human instruction.
    first int64 per row and one more: goals before it, before the shuffle. cap float64 per row: price_upper.
    weight float64 per row: weight of each of its goals. order uint32 per goal: its number before the shuffle.
    cumulative float64 per goal: sum of the weights up to and with it.
    stream uint32: state of the generator after the shuffle, where selections go on.
    """

    def __init__(self, catalogue: Catalogue, kind: Kind, arrays: Mapping[str, np.ndarray]) -> None:
        self.kind: Kind = kind
        self.arrays = arrays
        self._catalogue = catalogue

    @classmethod
    def build(
        cls,
        catalogue: Catalogue,
        kind: Kind,
        prices: Sequence[float] | np.ndarray,
        rng: random.Random,
        progress: Callable[[int], None] = lambda count: None,
        *,
        caps: Caps = "original",
    ) -> Goals:
        """The goals of a catalogue, capped by draws and in the order of seed 233.

        prices: in dollars, by position. rng: the generator as the draws of prices left it; it stays as it is, so both
        kinds can be built from the same one. progress: told the number of products done.
        An instruction without attributes gives no goal. Equal arguments give equal goals on every machine.
        """
        draws = random.Random()
        draws.setstate(rng.getstate())
        if caps == "agentgym" and kind == "synthetic":
            draws.seed(ORDER_SEED)
        product, record, cap, first, weights = array("i"), array("i"), array("d"), array("q", [0]), _Weights()
        for position in range(len(catalogue)):
            here = catalogue[position]
            rows = _human_rows(here) if kind == "human" else _synthetic_rows(here)
            for number, attributes, combinations in rows:
                for price_upper in _caps(float(prices[position]), draws, kind, caps):
                    product.append(position)
                    record.append(number)
                    cap.append(price_upper)
                    first.append(first[-1] + combinations)
                    if kind == "synthetic":
                        weights.add(attributes, combinations)
            progress(position + 1)
        columns: dict[str, np.ndarray] = {
            "product": np.array(product, np.int32),
            "record": np.array(record, np.int32),
            "first": np.array(first, np.int64),
            "cap": np.array(cap, np.float64),
            "weight": weights.weights() if kind == "synthetic" else np.ones(len(product)),
        }
        order, columns["stream"] = shuffle(first[-1], ORDER_SEED)
        return cls._with_order(catalogue, kind, columns, order)

    def __len__(self) -> int:
        return len(self.arrays["order"])

    def __getitem__(self, index: int) -> Goal:
        """The goal at an index. Raises IndexError outside 0 .. len - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"goal {index} of {len(self)}")
        number = int(self.arrays["order"][index])
        row = int(np.searchsorted(self.arrays["first"], number, side="right")) - 1
        position, price_upper = int(self.arrays["product"][row]), float(self.arrays["cap"][row])
        product = self._catalogue[position]
        price_text = "" if price_upper == NO_CAP else f", and price lower than {price_upper:.2f} dollars"
        if self.kind == "human":
            asked = product.human[int(self.arrays["record"][row])]
            text, attributes = asked.instruction.strip("."), asked.attributes
            options: tuple[str, ...] | dict[str, str] = asked.options
        else:
            text, attributes = product.instruction or "", product.instruction_attributes
            options = _combination(product, number - int(self.arrays["first"][row]))
            if options:
                text += " with " + ", and ".join(f"{name}: {value}" for name, value in options.items())
        return Goal(
            index=index,
            position=position,
            asin=product.asin,
            category=product.category,
            query=product.query,
            name=product.title,
            product_category=product.product_category,
            instruction_text=text + price_text,
            attributes=attributes,
            price_upper=price_upper,
            options=options,
            weight=float(self.arrays["weight"][row]),
        )

    def __iter__(self) -> Iterator[Goal]:
        return map(self.__getitem__, range(len(self)))

    def draw(self, rng: random.Random) -> int:
        """The index of a goal drawn by weight, by one `uniform` of `rng`. Raises ValueError where there is no goal.

        As in the original, the search is off by one: goal 0 is never drawn (unless it is the only one), each other has
        the weight of the one before it, and the last has its own besides.
        """
        if not len(self):
            raise ValueError(f"there is no {self.kind} goal to draw")
        place = rng.uniform(0, float(self.arrays["cumulative"][-1]))
        return min(int(np.searchsorted(self.arrays["cumulative"], place, side="right")) + 1, len(self) - 1)

    def select(self, keep: Callable[[int, Goal], bool] | None = None, limit: int | None = None) -> Goals:
        """The goals that `keep` (called with index and goal) lets through, then `limit` of them, at least 1, by weight.

        As in the original the draws follow the shuffle in the same random stream, the drawn goals come in the order in
        which they were drawn, and a limit that is not below their number changes nothing. Raises ValueError for a limit
        so close to their number that the rarest goals would have to be waited for.
        """
        chosen = self
        if keep is not None:
            kept = np.fromiter((keep(goal.index, goal) for goal in self), bool, len(self))
            chosen = self._with_order(self._catalogue, self.kind, self.arrays, self.arrays["order"][kept])
        if limit is not None and limit < len(chosen):
            rng = random.Random()
            rng.setstate((3, tuple(self.arrays["stream"].tolist()), None))
            drawn: dict[int, None] = {}
            for _ in range(_DRAWS_PER_GOAL * limit):
                drawn[chosen.draw(rng)] = None
                if len(drawn) == limit:
                    break
            else:
                raise ValueError(
                    f"{limit} of {len(chosen)} goals are too many to draw by weight, some come too rarely; "
                    "choose a smaller limit"
                )
            chosen = self._with_order(self._catalogue, self.kind, self.arrays, chosen.arrays["order"][list(drawn)])
        return chosen

    @classmethod
    def _with_order(
        cls, catalogue: Catalogue, kind: Kind, columns: Mapping[str, np.ndarray], order: np.ndarray
    ) -> Goals:
        rows = np.searchsorted(columns["first"], order, side="right") - 1
        cumulative = np.cumsum(columns["weight"][rows])
        return cls(catalogue, kind, {**columns, "order": order, "cumulative": cumulative})


class _Weights:
    """The weights of synthetic goals: the mean of 1 / (number of goals that ask for it) over a goal's attributes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._goals = array("q")  # by attribute
        self._attributes = array("i")  # of all rows, one after the other
        self._ends = array("q")

    def add(self, attributes: tuple[str, ...], goals: int) -> None:
        for attribute in attributes:
            number = self._numbers.setdefault(attribute, len(self._numbers))
            if number == len(self._goals):
                self._goals.append(0)
            self._goals[number] += goals
            self._attributes.append(number)
        self._ends.append(len(self._attributes))

    def weights(self) -> np.ndarray:
        weights = np.empty(len(self._ends))
        start = 0
        for row, end in enumerate(self._ends):
            total = 0.0  # added in order: `sum` rounds otherwise from Python 3.12 on
            for number in self._attributes[start:end]:
                total += 1.0 / self._goals[number] if self._goals[number] else 0.0
            weights[row] = total / (end - start)
            start = end
        return weights


def _human_rows(product: Product) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """Number, attributes and goals of each instruction of a product."""
    return ((number, asked.attributes, 1) for number, asked in enumerate(product.human) if asked.attributes)


def _synthetic_rows(product: Product) -> Iterator[tuple[int, tuple[str, ...], int]]:
    if product.instruction is not None and product.instruction_attributes:
        yield 0, product.instruction_attributes, math.prod(len(values) for values in product.options.values())


def _caps(price: float, rng: random.Random, kind: Kind, caps: Caps) -> Sequence[float]:
    """The caps of one instruction's goals."""
    if caps == "agentgym" and kind == "human":
        candidates = cap_candidates(price)
        return candidates if len(candidates) > 1 else [NO_CAP] * 4
    return [draw_cap(price, rng)]


def _combination(product: Product, number: int) -> dict[str, str]:
    """The options of the n-th goal of a product: groups in order of their names, the last varying fastest."""
    options = {}
    for name in sorted(product.options, reverse=True):
        number, place = divmod(number, len(product.options[name]))
        options[name] = product.options[name][place]
    return dict(reversed(options.items()))


def shuffle(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The order (uint32) into which Python's generator of this seed shuffles 0 .. count - 1, and the words of its state
    afterwards."""
    rng = random.Random(seed)
    numbers = array("I", range(count))
    rng.shuffle(numbers)
    return np.array(numbers, np.uint32), np.array(rng.getstate()[1], np.uint32)
