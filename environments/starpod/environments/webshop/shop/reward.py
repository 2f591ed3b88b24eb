"""The graded reward of a purchase, part by part, as the original computes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .matching import Ratio, matches, normalise, normalise_pair

if TYPE_CHECKING:
    from starpod.environments.webshop.catalogue.goals import Goal
    from starpod.environments.webshop.catalogue.product import Product
    from starpod.environments.webshop.search.nouns import Tagger


@dataclass(frozen=True, slots=True)
class Grade:
    """The reward of a purchase, part by part.

    reward: r_type * (matched attributes + matched options + r_price) / (attributes + options + 1), in [0, 1].
    r_type: 1, 0.5, 0.1 or 0, from query_match, category_match and title_score (the share of the goal's nouns found).
    r_att, r_option: matched share of the goal's attributes and options; r_option is None for a goal without options.
    w_att, w_option, w_price: the share of each count in the denominator, None as above.
    tagger: name of the tagger that found the nouns.
    """

    reward: float
    r_type: float
    r_att: float
    w_att: float
    query_match: bool
    category_match: bool
    title_score: float
    r_price: bool
    w_price: float
    r_option: float | None
    w_option: float | None
    tagger: str

    def as_info(self) -> dict[str, Any]:
        """The parts under the original's names; those of options only where the goal has some."""
        names = ("r_type", "r_att", "w_att", "query_match", "category_match", "title_score")
        options = ("r_option", "w_option") if self.r_option is not None else ()
        return {name: getattr(self, name) for name in (*names, *options, "r_price", "w_price")}

    def parts(self) -> dict[str, float]:
        """Shares of attributes, options and price in the reward; their sum is the reward, but for rounding."""
        return {
            "attributes": self.r_type * self.r_att * self.w_att,
            "options": self.r_type * (self.r_option or 0.0) * (self.w_option or 0.0),
            "price": self.r_type * self.r_price * self.w_price,
        }


def grade(
    product: Product,
    goal: Goal,
    goal_product: Product,
    price: float,
    options: Mapping[str, str],
    tagger: Tagger,
    ratio: Ratio = "difflib",
) -> Grade:
    """Grades the purchase of `product` at `price` dollars with the chosen `options` (group -> value).

    Raises ValueError for a goal without attributes or without a positive cap, which the original cannot grade either.
    """
    if not goal.attributes:
        raise ValueError(f"goal {goal.index} ({goal.asin}) has no attributes, so no purchase can be graded by it")
    if not goal.price_upper > 0:
        raise ValueError(f"goal {goal.index} ({goal.asin}) has the price cap {goal.price_upper}; it must be above 0")
    query_match = product.query == goal.query
    category_match = len(_levels(product.product_category) & _levels(goal.product_category)) >= 2
    title_score = _title_score(tagger.nouns(product.title), tagger.nouns(goal_product.title))
    r_type = _r_type(query_match, category_match, title_score)
    r_price = price <= goal.price_upper
    attributes, wanted = _matched_attributes(product, goal.attributes, ratio), len(goal.attributes)
    chosen, wanted_options = _matched_options(options.values(), goal.options, ratio), len(goal.options)
    total = wanted + wanted_options + 1
    return Grade(
        reward=(attributes + chosen + r_price) / total * r_type,
        r_type=r_type,
        r_att=attributes / wanted,
        w_att=wanted / total,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
        r_price=r_price,
        w_price=1 / total,
        r_option=chosen / wanted_options if wanted_options else None,
        w_option=wanted_options / total if wanted_options else None,
        tagger=tagger.name,
    )


def checklist(
    product: Product, goal: Goal, options: Mapping[str, str], ratio: Ratio = "difflib"
) -> tuple[dict[str, bool], dict[str, bool]]:
    """Which of the goal's attributes, and which of its options (`group: value`, or a value alone), a purchase has."""
    attributes = {wanted: _matched_attributes(product, (wanted,), ratio) == 1 for wanted in goal.attributes}
    chosen, pairs = options.values(), goal.options
    if isinstance(pairs, Mapping):
        return attributes, {
            f"{name}: {value}": _matched_options(chosen, {name: value}, ratio) == 1 for name, value in pairs.items()
        }
    return attributes, {value: _matched_options(chosen, (value,), ratio) == 1 for value in pairs}


@lru_cache(maxsize=1 << 14)
def _levels(product_category: str) -> frozenset[str]:
    return frozenset(level.strip() for level in product_category.split("\u203a"))


def _title_score(purchased: tuple[str, ...], wanted: tuple[str, ...]) -> float:
    """Distinct common nouns over the goal's nouns with repeats, so that a title compared with itself can miss 1."""
    return len(set(purchased) & set(wanted)) / len(wanted) if wanted else 0.2


def _r_type(query_match: bool, category_match: bool, title_score: float) -> float:
    """A title with nothing in common is worth nothing, whatever query and category say."""
    if title_score < 0.1:
        return 0.1 if title_score else 0.0
    return 1.0 if query_match or category_match or title_score > 0.2 else 0.5


def _matched_attributes(product: Product, wanted: tuple[str, ...], ratio: Ratio) -> int:
    """Counts the attributes that are among the product's, or in its texts word for word."""
    missing = [
        attribute for attribute in wanted if not any(matches(given, attribute, ratio) for given in product.attributes)
    ]
    if not missing:
        return len(wanted)
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return len(wanted) - sum(not any(attribute in text for text in texts) for attribute in missing)


def _matched_options(chosen: Iterable[str], wanted: tuple[str, ...] | Mapping[str, str], ratio: Ratio) -> int:
    """Counts the options that some chosen value matches. Group names play no part, except in the goal's pairs."""
    values = [normalise(value) for value in chosen]
    goals = (
        [normalise_pair(name, value) for name, value in wanted.items()]
        if isinstance(wanted, Mapping)
        else [normalise(value) for value in wanted]
    )
    return sum(any(matches(value, goal, ratio) for value in values) for goal in goals)
