"""A little shop that is made by hand: a dozen products, a goal, and a search that finds what holds a word."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starpod.env_server import Limits
from starpod.environments.webshop.catalogue.goals import Goal
from starpod.environments.webshop.catalogue.product import Product
from starpod.environments.webshop.environment import WebShop
from starpod.environments.webshop.shop.shop import Shop, ShopState
from tests.environments.webshop.in_memory import ListCatalogue, StandIn

SANDAL = Product(
    asin="B07SANDALS",
    title="Larkfield Women's Open Toe Sandals with Arch Support, Non Slip Rubber Sole, Adjustable Strap",
    description="Soft straps and a cushioned sole carry you through long summer days.\nMade to be repaired.",
    bullets=("Rubber sole: grips on wet stone.", "", "Arch support - for a whole day on your feet."),
    category="fashion",
    query="women's sandals",
    product_category="Clothing, Shoes & Jewelry \u203a Women \u203a Shoes \u203a Sandals",
    pricing=(34.99, 41.5),
    price_tag="$34.99 to $41.5",
    options={
        "color": ("black", "navy blue", "dusty rose", "sand"),
        "size": ("6", "6.5", "7", "7.5 wide", "8", "8.5", "9"),
    },
    option_images={},
    attributes=("open toe", "arch support", "rubber sole"),
    image="https://images.example.com/I/sandals.jpg",
    instruction=None,
    instruction_attributes=(),
    human=(),
)


def product(number: int, category: str, title: str, price: float) -> Product:
    """A product without options."""
    return replace(
        SANDAL, asin=f"B0000000{number:02}", category=category, title=title, price_tag=f"${price}", pricing=(price,),
        query=category, options={}, product_category=f"{category.title()} \u203a Things",
        image=f"https://images.example.com/I/{number}.jpg",
    )  # fmt: skip


PRODUCTS = (
    SANDAL,
    product(1, "fashion", "Ashmore Women's Wool Cardigan, Long Sleeve, Machine Wash", 58.0),
    product(2, "electronics", "Tonefield Over-Ear Headphones with Noise Cancelling", 129.99),
    product(3, "electronics", "Compact Subwoofer with Remote Control and High Power", 662.99),
    product(4, "garden", "Oak Console Table with Storage Space, Easy Assembly, for Living Room and Hall", 214.5),
    product(5, "garden", "Linen Table Lamp, Dimmable", 39.0),
    product(6, "beauty", "Calm Oat Body Lotion, Fragrance Free, 16 Ounce", 12.49),
    product(7, "beauty", "Tea Tree Shampoo with Essential Oils", 9.99),
    product(8, "grocery", "Shelf Stable Turkey Sticks, Hickory, 12 Ounce (Pack of 3)", 12.99),
    product(9, "grocery", "Stone Ground Oat Crackers, Low Sugar", 5.49),
    product(10, "garden", "Women's Garden Gloves, Thorn Proof", 14.0),
    product(11, "toys", "A Kite for Women and Men of Every Age", 19.0),
)

GOAL = Goal(
    index=0,
    position=0,
    asin=SANDAL.asin,
    category=SANDAL.category,
    query=SANDAL.query,
    name=SANDAL.title,
    product_category=SANDAL.product_category,
    instruction_text="i am looking for open toe women's sandals with arch support, in navy blue and size 7.5 wide, "
    "and price lower than 50.00 dollars",
    attributes=("open toe", "arch support"),
    price_upper=50.0,
    options=("navy blue", "7.5 wide"),
    weight=1.0,
)


class WordSearch:
    """Finds the products whose title holds one of the words; `all` finds every one."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._titles = [product.title.lower() for product in products]

    def search(self, query: str, k: int = 50) -> list[int]:
        words = query.split()
        return [
            place for place, title in enumerate(self._titles) if "all" in words or any(word in title for word in words)
        ][:k]


@dataclass(eq=False)
class Stock:
    """A minimal store over a list of products."""

    products: Sequence[Product] = PRODUCTS
    name: str = "little"
    digest: str = "0123"
    catalogue: ListCatalogue = field(init=False)
    index: WordSearch = field(init=False)
    prices: list[float] = field(init=False)
    tagger: StandIn = field(init=False)

    def __post_init__(self) -> None:
        self.catalogue = ListCatalogue(self.products)
        self.index = WordSearch(self.products)
        self.prices = [product.pricing[0] for product in self.products]
        self.tagger = StandIn("words", lambda title: title.lower().split())

    def goals(self, kind: str, caps: str) -> list[Goal]:
        return [GOAL]


_STOCK: Any = Stock()


def little_shop(products: Sequence[Product] = PRODUCTS, goal: Goal = GOAL, *, show_attributes: bool = False) -> Shop:
    """A session on the index page."""
    return Shop(Stock(products), [goal], ShopState(0, "abc"), show_attributes=show_attributes)


class LittleWebShop(WebShop):
    """webshop-v1 over the little shop and its one goal."""

    spec = replace(WebShop.spec, title="A little shop", render_modes=("text", "html"), limits=Limits(3))

    @classmethod
    def prepare(cls) -> None:
        pass

    def reset(self, rng: random.Random) -> None:
        self._enter(_STOCK, ShopState(0, "abc"))

    def set_state(self, state: dict[str, Any]) -> None:
        self.seed, self.dynamics_seed = state["seeds"]
        self._dynamics = state["dynamics"]
        self._enter(_STOCK, ShopState(**state["shop"]), *state["past"])
