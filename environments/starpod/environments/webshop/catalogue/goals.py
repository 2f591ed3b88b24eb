"""The goals of a shop, human or synthetic, in the original WebShop's order. They are stored as columns of numbers."""

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
"""How price caps are chosen. `original`: one draw per instruction. `agentgym`: each human instruction gives one goal
per candidate cap, or four goals without a cap if it has fewer than two candidates. Draws for synthetic goals use seed
233."""

ORDER_SEED = 233
"""Seed for shuffling the goals, as in the original WebShop."""

_DRAWS_PER_GOAL = 100  # a selection fails after this many draws per goal, so that it cannot block the server


@dataclass(frozen=True, slots=True)
class Goal:
    """A purchase that an instruction asks for. The fields `asin` to `product_category` describe the goal's product."""

    index: int
    """Index of the goal among all goals."""
    position: int
    """Position of the product in the catalogue."""
    asin: str
    category: str
    query: str
    name: str
    """Title of the product."""
    product_category: str
    instruction_text: str
    """Instruction for the agent, including the price cap."""
    attributes: tuple[str, ...]
    """Attributes that the product should have."""
    price_upper: float
    """Price cap in dollars; 1,000,000 if the instruction names none."""
    options: tuple[str, ...] | dict[str, str]
    """Options to choose: values (human goals) or group -> value (synthetic goals)."""
    weight: float
    """Relative probability in a weighted draw."""


class Goals:
    """The goals of one kind, in their final order. The sequence is immutable and safe to use from many threads.

    Each instruction is one row of the columns. The row of a synthetic instruction has one goal per combination of its
    product's options. Goals are made on access, so that a million of them take only megabytes. As in the
    original WebShop, goals are shuffled once after they are built.

    Args:
        catalogue: the catalogue that the goals were built from.
        kind: "human" or "synthetic".
        arrays: the columns, which may be memory-mapped:
            product int32[rows]: position in the catalogue.
            record int32[rows]: index of the product's human instruction.
            first int64[rows + 1]: index of the row's first goal before the shuffle.
            cap float64[rows]: price_upper.
            weight float64[rows]: weight of each goal of the row.
            order uint32[goals]: index of each goal before the shuffle.
            cumulative float64[goals]: cumulative sum of the weights.
            stream uint32: random state after the shuffle, from which selections draw.
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
        """Build the goals of a catalogue. Instructions without attributes are skipped.

        Args:
            prices: price of each product in dollars, by position.
            rng: random state after the draws of prices. It is copied, so both kinds can be built from the same state.
            progress: called with the number of products done.

        Returns:
            The goals. Equal arguments give equal goals on every machine.
        """
        draws = random.Random()
        draws.setstate(rng.getstate())
        if caps == "agentgym" and kind == "synthetic":
            draws.seed(ORDER_SEED)
        product, record, cap, starts, weights = array("i"), array("i"), array("d"), array("q", [0]), _Weights()
        for position in range(len(catalogue)):
            item = catalogue[position]
            rows = _human_rows(item) if kind == "human" else _synthetic_rows(item)
            for number, attributes, combinations in rows:
                for price_upper in _caps(float(prices[position]), draws, kind, caps):
                    product.append(position)
                    record.append(number)
                    cap.append(price_upper)
                    starts.append(starts[-1] + combinations)
                    if kind == "synthetic":
                        weights.add(attributes, combinations)
            progress(position + 1)
        columns: dict[str, np.ndarray] = {
            "product": np.array(product, np.int32),
            "record": np.array(record, np.int32),
            "first": np.array(starts, np.int64),
            "cap": np.array(cap, np.float64),
            "weight": weights.weights() if kind == "synthetic" else np.ones(len(product)),
        }
        order, columns["stream"] = shuffle(starts[-1], ORDER_SEED)
        return cls._with_order(catalogue, kind, columns, order)

    def __len__(self) -> int:
        return len(self.arrays["order"])

    def __getitem__(self, index: int) -> Goal:
        """Return the goal at an index. Raises IndexError outside 0 .. len - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"goal {index} of {len(self)}")
        number = int(self.arrays["order"][index])
        row = int(np.searchsorted(self.arrays["first"], number, side="right")) - 1
        position, price_upper = int(self.arrays["product"][row]), float(self.arrays["cap"][row])
        product = self._catalogue[position]
        price_text = "" if price_upper == NO_CAP else f", and price lower than {price_upper:.2f} dollars"
        if self.kind == "human":
            human = product.human[int(self.arrays["record"][row])]
            text, attributes = human.instruction.strip("."), human.attributes
            options: tuple[str, ...] | dict[str, str] = human.options
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
        """Draw the index of a goal by weight, with one `uniform` of `rng`. Raises ValueError if there are no goals.

        As in the original WebShop, the search is off by one. Goal 0 is never drawn (unless it is the only one), every
        other goal has the weight of its predecessor, and the last one has its own weight in addition.
        """
        if not len(self):
            raise ValueError(f"there is no {self.kind} goal to draw")
        return int(self._find(np.array([rng.random()]))[0])

    def _find(self, draws: np.ndarray) -> np.ndarray:
        """Return the goals' indices that uniform draws from [0, 1) select. Draws and indices have the same shape."""
        cumulative = self.arrays["cumulative"]
        indices: np.ndarray = np.searchsorted(cumulative, draws * cumulative[-1], side="right") + 1
        return indices.clip(max=len(self) - 1)

    def select(self, keep: Callable[[int, Goal], bool] | None = None, limit: int | None = None) -> Goals:
        """Select the goals for which `keep(index, goal)` is true, and draw `limit` of them by weight.

        As in the original WebShop, the draws continue the random stream that shuffled the goals, and the result is in
        the order of the draws. All selected goals are returned if there are at most `limit` of them.

        Raises:
            ValueError: the limit is so close to the number of goals that rare goals would take too many draws.
        """
        goals = self
        if keep is not None:
            mask = np.fromiter((keep(goal.index, goal) for goal in self), bool, len(self))
            goals = self._with_order(self._catalogue, self.kind, self.arrays, self.arrays["order"][mask])
        if limit is not None and limit < len(goals):
            stream = self.arrays["stream"]
            rng = np.random.RandomState()  # the generator of random.Random, for many draws at once
            rng.set_state(("MT19937", stream[:-1], int(stream[-1]), 0, 0.0))
            indices: dict[int, None] = {}
            for _ in range(_DRAWS_PER_GOAL):
                indices.update(dict.fromkeys(goals._find(rng.random_sample(limit)).tolist()))
                if len(indices) >= limit:
                    break
            else:
                raise ValueError(
                    f"{limit} of {len(goals)} goals are too many to draw by weight, some come too rarely; "
                    "choose a smaller limit"
                )
            goals = self._with_order(
                self._catalogue, self.kind, self.arrays, goals.arrays["order"][list(indices)[:limit]]
            )
        return goals

    @classmethod
    def _with_order(
        cls, catalogue: Catalogue, kind: Kind, columns: Mapping[str, np.ndarray], order: np.ndarray
    ) -> Goals:
        rows = np.searchsorted(columns["first"], order, side="right") - 1
        cumulative = np.cumsum(columns["weight"][rows])
        return cls(catalogue, kind, {**columns, "order": order, "cumulative": cumulative})


class _Weights:
    """The weights of synthetic goals: the mean of 1 / (number of goals with the attribute) over a goal's attributes."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._goals = array("q")  # number of goals by attribute
        self._attributes = array("i")  # attributes of all rows, concatenated
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
            total = 0.0  # not `sum`, which rounds differently from Python 3.12 on
            for number in self._attributes[start:end]:
                total += 1.0 / self._goals[number] if self._goals[number] else 0.0
            weights[row] = total / (end - start)
            start = end
        return weights


def _human_rows(product: Product) -> Iterator[tuple[int, tuple[str, ...], int]]:
    """Return index, attributes and number of goals of each human instruction of a product."""
    return ((number, human.attributes, 1) for number, human in enumerate(product.human) if human.attributes)


def _synthetic_rows(product: Product) -> Iterator[tuple[int, tuple[str, ...], int]]:
    if product.instruction is not None and product.instruction_attributes:
        yield 0, product.instruction_attributes, math.prod(len(values) for values in product.options.values())


def _caps(price: float, rng: random.Random, kind: Kind, caps: Caps) -> Sequence[float]:
    if caps == "agentgym" and kind == "human":
        candidates = cap_candidates(price)
        return candidates if len(candidates) > 1 else [NO_CAP] * 4
    return [draw_cap(price, rng)]


def _combination(product: Product, number: int) -> dict[str, str]:
    """Return the options of the n-th goal of a product. Groups are sorted by name, and the last one varies fastest."""
    options = {}
    for name in sorted(product.options, reverse=True):
        number, index = divmod(number, len(product.options[name]))
        options[name] = product.options[name][index]
    return dict(reversed(options.items()))


def shuffle(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle 0 .. count - 1 with Python's random generator. Return the order and the generator's state, as uint32."""
    rng = random.Random(seed)
    numbers = array("I", range(count))
    rng.shuffle(numbers)
    return np.array(numbers, np.uint32), np.array(rng.getstate()[1], np.uint32)
