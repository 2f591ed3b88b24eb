"""The graded reward, part by part, against recorded calls, recorded episodes and real sessions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.environments.webshop.catalogue.goals import Goal
from starpod.environments.webshop.catalogue.product import Product
from starpod.environments.webshop.shop.reward import Grade, checklist, grade
from tests.environments.webshop.catalogues import made_up, real_sessions
from tests.environments.webshop.in_memory import StandIn
from tests.golden import golden

PATH = "a \u203a b \u203a c"
ATTRIBUTES = ("tea tree", "essential oils", "natural ingredients")


def goal_for(product: Product, **fields: Any) -> Goal:
    """A goal that wants this product; `fields` say what else."""
    goal = Goal(
        index=7, position=0, asin=product.asin, category=product.category, query=product.query, name=product.title,
        product_category=product.product_category, instruction_text="", attributes=("soft",), price_upper=40.0,
        options=(), weight=1.0,
    )  # fmt: skip
    return replace(goal, **fields)


def goal_of(record: Mapping[str, Any]) -> Goal:
    """A goal as the original keeps it."""
    options = record["goal_options"]
    return Goal(
        index=0, position=0, asin=record["asin"], category="", query=record["query"], name=record["name"],
        product_category=record["product_category"], instruction_text="", attributes=tuple(record["attributes"]),
        price_upper=record["price_upper"], options=options if isinstance(options, dict) else tuple(options), weight=1.0,
    )  # fmt: skip


def nouns(table: Mapping[str, Sequence[str]]) -> StandIn:
    return StandIn("table", table.__getitem__)


def test_calls_as_recorded() -> None:
    records = golden("rewards", "webshop_golden")
    refused = set()
    for record in records:
        bought, wanted = record["product"], record["goal"]
        product = made_up(
            asin=bought["asin"], title=bought["Title"], query=bought["query"], attributes=tuple(bought["Attributes"]),
            product_category=bought["product_category"], description=bought["Description"],
            bullets=tuple(bought["BulletPoints"]),
        )  # fmt: skip
        target = made_up(asin=wanted["asin"], title=wanted["name"])
        tagger = nouns({bought["Title"]: record["product_nouns"], wanted["name"]: record["goal_nouns"]})
        purchase = (product, goal_of(wanted), target, record["price"], record["options"], tagger)
        if "error" in record:
            with pytest.raises(ValueError, match=wanted["asin"]):
                grade(*purchase)
            refused.add(record["error"])
            continue
        ours = grade(*purchase)
        assert (ours.reward, ours.as_info()) == (record["reward"], record["info"]), record["id"]
        assert grade(*purchase, ratio="levenshtein").reward == record["reward"], record["id"]
    assert refused == {"ZeroDivisionError", "TypeError"}  # the original crashed; ours says goal and reason


def test_the_arithmetic_of_real_sessions() -> None:
    """Products made up to earn the recorded parts earn the recorded reward."""
    sessions = real_sessions()
    for session in sessions:
        goal, info, content = goal_of(session["goal"]), session["reward_info"], session["content"]
        wanted, found = next(
            (total, count)
            for total in range(1, 40)
            for count in range(total + 1)
            if count / total == info["title_score"]
        )
        product = made_up(
            title="bought",
            query=goal.query if info["query_match"] else "other",
            product_category=goal.product_category if info["category_match"] else "other",
            attributes=goal.attributes[: round(info["r_att"] * len(goal.attributes))],
        )
        tagger = nouns({"bought": [str(n) for n in range(found)], goal.name: [str(n) for n in range(wanted)]})
        ours = grade(product, goal, made_up(title=goal.name), content["price"], content["options"], tagger)
        assert ours.reward == session["reward"]
        assert {key: value for key, value in ours.as_info().items() if not key.startswith("w_")} == info


@pytest.mark.parametrize(
    ("query", "path", "shared", "r_type"),
    [
        ("q", "x", 10, 1.0),
        ("other", "x", 3, 1.0),
        ("other", "x", 2, 0.5),  # 0.2 is not above 0.2
        ("other", "c \u203a a", 2, 1.0),
        ("other", "a \u203a a \u203a x", 2, 0.5),
        ("q", "x", 1, 1.0),  # 0.1 is not below 0.1
        ("q", PATH, 0, 0.0),
    ],
)
def test_type(query: str, path: str, shared: int, r_type: float) -> None:
    target = made_up(title="goal", query="q", product_category=PATH)
    product = made_up(title="bought", query=query, product_category=path, attributes=("soft",))
    words = [str(n) for n in range(10)]
    ours = grade(product, goal_for(target), target, 1.0, {}, nouns({"goal": words, "bought": words[:shared]}))
    assert (ours.r_type, ours.title_score, ours.tagger) == (r_type, shared / 10, "table")


def test_category_match() -> None:
    target = made_up(product_category=PATH)
    for path, match in (
        ("b \u203a c \u203a a", True),
        ("d \u203a e \u203a f", False),
        ("a \u203a d \u203a b", True),
        ("a\u203ab", True),
        ("a \u203a a \u203a d", False),
        ("", False),
    ):
        ours = grade(made_up(product_category=path), goal_for(target), target, 1.0, {}, nouns({"": ("x",)}))
        assert ours.category_match is match, path


def test_a_title_can_miss_itself_and_one_without_nouns_is_worth_a_fifth() -> None:
    lamp, none = made_up(title="Floor Lamp Lamp", query="q"), made_up(title="12", query="q")
    table = nouns({"Floor Lamp Lamp": ("floor", "lamp", "lamp"), "12": ()})
    assert grade(lamp, goal_for(lamp), lamp, 1.0, {}, table).title_score == 2 / 3
    ours = grade(lamp, goal_for(none, query="other"), none, 1.0, {}, table)
    assert (ours.title_score, ours.r_type) == (0.2, 0.5)
    assert grade(none, goal_for(lamp), lamp, 1.0, {}, table).reward == 0.0


TEXTS = {
    "bullets": ("This shampoo has essential oils and smells like lemons",),
    "description": "Best shampoo on the market, made with Natural Ingredients",
}


@pytest.mark.parametrize(
    ("attributes", "texts", "matched"),
    [
        (("tea tree", "essential oil", "natural ingredients"), {}, 3),
        (("essential oil", "natural ingredients"), {}, 2),
        ((), TEXTS, 2),
        ((), {"title": "Tea Tree Oil"}, 1),
        ((), {"bullets": ("with tea", "tree oil")}, 1),  # the bullets are joined by a blank
        (("tea bag", "earl gray", "lipton"), {"description": "English breakfast tea"}, 0),
    ],
)
def test_attributes(attributes: tuple[str, ...], texts: dict[str, Any], matched: int) -> None:
    product = made_up(attributes=attributes, **texts)
    target = made_up()
    ours = grade(product, goal_for(target, attributes=ATTRIBUTES), target, 1.0, {}, nouns({product.title: (), "": ()}))
    assert ours.r_att == matched / 3


THREE = ("grey", "XL", "pack of 12")


@pytest.mark.parametrize(
    ("wanted", "chosen", "share"),
    [
        (THREE, ("pack of 12", "grey", "XL"), 1.0),
        (THREE, ("pack of 12", "blue", "XL"), 2 / 3),
        (("cool powder snow", "XL", "pack of 12"), ("pack of 12", "powder snow", "XL"), 1.0),
        ((), ("grey",), None),
        (("grey",), (), 0.0),
        ({"color": "light blue"}, ("blue",), 1.0),
        ({"color": "w |  stand"}, ("w |  stand",), 0.0),  # bought it is 'tan', wanted it is a pair
        ({"size": "large"}, ("x-large",), 0.0),
        ({"size": "x-large"}, ("large",), 1.0),
        (("x-large",), ("xx-large",), 1.0),
        (("",), ("",), 0.0),
    ],
)
def test_options(wanted: Any, chosen: tuple[str, ...], share: float | None) -> None:
    target = made_up(attributes=("soft",))
    options = {str(place): value for place, value in enumerate(chosen)}
    ours = grade(target, goal_for(target, options=wanted), target, 1.0, options, nouns({"": ()}))
    assert ours.r_option == share
    assert ("r_option" in ours.as_info()) == ("w_option" in ours.as_info()) == (share is not None)


def test_whole_rewards_pinned_by_the_originals_tests() -> None:
    table = nouns({"Name": ("name",), "Cord": ("cord", "power", "system"), "Other": ("power",) * 7})
    product = made_up(title="Name", query="q", product_category=PATH, attributes=ATTRIBUTES)
    options = {"color": "grey", "size": "XL"}
    goal = goal_for(product, attributes=ATTRIBUTES, options=options)
    bare = replace(product, attributes=(), description="made with natural ingredients")
    more = replace(goal, options=options | {"amount": "pack of 12"})
    assert grade(product, goal, product, 35.0, options, table).reward == 1.0
    assert grade(bare, goal, product, 35.0, options, table).reward == pytest.approx(2 / 3)
    assert grade(bare, more, product, 35.0, options, table).reward == pytest.approx(0.5714, abs=1e-4)
    other = replace(bare, title="Other", query="other", product_category="a \u203a d \u203a e")
    cord = replace(product, title="Cord")
    wide = nouns({"Other": ("power",), "Cord": ("power", "b", "c", "d", "e", "f")})
    assert grade(other, more, cord, 35.0, options, wide).reward == pytest.approx(0.2857, abs=1e-4)
    assert grade(product, goal, product, 40.0, options, table).r_price is True
    assert grade(product, goal, product, 40.01, options, table).r_price is False


def test_what_cannot_be_graded_names_goal_and_reason() -> None:
    product = made_up(asin="B00000000X")
    for fields, reason in (({"attributes": ()}, "no attributes"), ({"price_upper": 0.0}, "price cap 0.0")):
        with pytest.raises(ValueError, match=rf"goal 7 \(B00000000X\) .*{reason}"):
            grade(product, goal_for(product, **fields), product, 1.0, {}, nouns({"": ()}))


words = st.sampled_from("soft grey blue large x-large oil tree tan".split())
texts = st.lists(words, max_size=4).map(" ".join)


@st.composite
def purchases(draw: st.DrawFn) -> tuple[Product, Goal, Product, float, dict[str, str], StandIn]:
    title, name = draw(texts), draw(texts)
    paths = st.sampled_from(["a", PATH, "b \u203a a"])
    product, target = (
        made_up(title=text, query=draw(words), product_category=draw(paths), description=draw(texts),
                attributes=tuple(draw(st.lists(texts, max_size=3))))
        for text in (title, name)
    )  # fmt: skip
    wanted = draw(st.one_of(st.lists(texts, max_size=3).map(tuple), st.dictionaries(words, texts, max_size=3)))
    attributes = tuple(draw(st.lists(texts, min_size=1, max_size=3)))
    goal = goal_for(target, options=wanted, attributes=attributes)
    table = nouns({text: text.split() for text in (title, name)})
    return product, goal, target, draw(st.floats(0, 80)), draw(st.dictionaries(words, texts, max_size=3)), table


@given(purchases())
def test_parts_make_the_reward_and_a_checklist_ticks_what_the_grade_counts(purchase: Any) -> None:
    product, goal, target, price, options, table = purchase
    asked = goal.options if isinstance(goal.options, dict) else tuple(dict.fromkeys(goal.options))
    goal = replace(goal, attributes=tuple(dict.fromkeys(goal.attributes)), options=asked)
    ours: Grade = grade(product, goal, target, price, options, table)
    assert 0 <= ours.reward <= 1
    assert sum(ours.parts().values()) == pytest.approx(ours.reward)
    assert ours.w_att + (ours.w_option or 0) + ours.w_price == pytest.approx(1)
    attributes, chosen = checklist(product, goal, options)
    assert sum(attributes.values()) / len(attributes) == ours.r_att
    assert (sum(chosen.values()) / len(chosen) if chosen else None) == ours.r_option


@given(purchases())
def test_the_goal_itself_is_worth_everything_but_what_its_nouns_repeat(purchase: Any) -> None:
    _, goal, target, *_, table = purchase
    bought = replace(target, attributes=goal.attributes)
    values = goal.options.values() if isinstance(goal.options, dict) else goal.options
    options = {str(place): value for place, value in enumerate(values)}
    ours = grade(bought, goal, target, 1.0, options, table)
    named = target.title.split()
    assert ours.title_score == (len(set(named)) / len(named) if named else 0.2)
    assert ours.r_type == 1.0
    assert ours.r_att == 1.0
