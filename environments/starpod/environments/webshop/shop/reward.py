"""The graded reward of a purchase, computed as in the original WebShop."""

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
    """The reward of a purchase and its parts.

    The weights `w_att`, `w_option` and `w_price` are the goal's numbers of attributes and options, and 1 for the price,
    each divided by `attributes + options + 1`.
    """

    reward: float
    """r_type * (matched attributes + matched options + r_price) / (attributes + options + 1); from 0 to 1."""
    r_type: float
    """1, 0.5, 0.1 or 0, depending on `query_match`, `category_match` and `title_score`."""
    r_att: float
    """Share of the goal's attributes that are matched."""
    w_att: float
    query_match: bool
    category_match: bool
    title_score: float
    """Share of the nouns in the goal product's title that also occur in the purchased product's title."""
    r_price: bool
    """Whether the price is within the cap."""
    w_price: float
    r_option: float | None
    """Share of the goal's options that are matched; None, like `w_option`, for a goal without options."""
    w_option: float | None
    tagger: str
    """Name of the tagger that found the nouns."""

    def as_info(self) -> dict[str, Any]:
        """Return the parts under the original WebShop's names; option parts only if the goal has options."""
        names = ("r_type", "r_att", "w_att", "query_match", "category_match", "title_score")
        options = ("r_option", "w_option") if self.r_option is not None else ()
        return {name: getattr(self, name) for name in (*names, *options, "r_price", "w_price")}

    def parts(self) -> dict[str, float]:
        """Return the contributions of attributes, options and price. Their sum is the reward, except for rounding."""
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
    """Grade a purchase.

    Args:
        goal_product: the product from which the goal was made.
        price: price of `product` in dollars.
        options: chosen options (group -> value).

    Raises:
        ValueError: the goal has no attributes or no positive price cap. The original WebShop cannot grade it either.
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
    """Return which of the goal's attributes and options (`group: value`, or only a value) a purchase matches."""
    attributes = {name: _matched_attributes(product, (name,), ratio) == 1 for name in goal.attributes}
    values, pairs = options.values(), goal.options
    if isinstance(pairs, Mapping):
        return attributes, {
            f"{name}: {value}": _matched_options(values, {name: value}, ratio) == 1 for name, value in pairs.items()
        }
    return attributes, {value: _matched_options(values, (value,), ratio) == 1 for value in pairs}


@lru_cache(maxsize=1 << 14)
def _levels(product_category: str) -> frozenset[str]:
    return frozenset(level.strip() for level in product_category.split("\u203a"))


def _title_score(purchased: tuple[str, ...], wanted: tuple[str, ...]) -> float:
    """Return the number of distinct nouns in common, divided by the number of the goal's nouns, counting repeats.

    A title with a repeated noun therefore scores below 1 even when compared with itself.
    """
    return len(set(purchased) & set(wanted)) / len(wanted) if wanted else 0.2


def _r_type(query_match: bool, category_match: bool, title_score: float) -> float:
    """Return the factor for the kind of product: 0 if the titles share no noun, even if query or category match."""
    if title_score < 0.1:
        return 0.1 if title_score else 0.0
    return 1.0 if query_match or category_match or title_score > 0.2 else 0.5


def _matched_attributes(product: Product, wanted: tuple[str, ...], ratio: Ratio) -> int:
    """Count the wanted attributes that match one of the product's attributes or occur literally in its texts."""
    unmatched = [
        attribute for attribute in wanted if not any(matches(value, attribute, ratio) for value in product.attributes)
    ]
    if not unmatched:
        return len(wanted)
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return len(wanted) - sum(not any(attribute in text for text in texts) for attribute in unmatched)


def _matched_options(chosen: Iterable[str], wanted: tuple[str, ...] | Mapping[str, str], ratio: Ratio) -> int:
    """Count the wanted options that match a chosen value. The groups of chosen values are ignored."""
    values = [normalise(value) for value in chosen]
    goals = (
        [normalise_pair(name, value) for name, value in wanted.items()]
        if isinstance(wanted, Mapping)
        else [normalise(value) for value in wanted]
    )
    return sum(any(matches(value, goal, ratio) for value in values) for goal in goals)
