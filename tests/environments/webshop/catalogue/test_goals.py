"""Goals, prices, their order and draws, against what the original made of the same catalogues and generators."""

import bisect
import gzip
import itertools
import json
import random
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.environments.webshop.catalogue.goals import Caps, Goal, Goals, Kind, shuffle
from starpod.environments.webshop.catalogue.prices import LADDER, NO_CAP, cap_candidates, draw_cap, draw_price
from tests.environments.webshop.catalogues import asked, made_up, real, real_data, recorded
from tests.environments.webshop.in_memory import ListCatalogue, draw_prices
from tests.environments.webshop.memory_store import configurations
from tests.golden import ROOT, golden

KINDS: tuple[Kind, ...] = ("human", "synthetic")
CONFIGURATIONS = [f"c{number}" for number in range(1, 10)]


def build(catalogue: ListCatalogue, kind: Kind, seed: int = 0, caps: Caps = "original") -> Goals:
    rng = random.Random(seed)
    prices = draw_prices(catalogue, rng)
    return Goals.build(catalogue, kind, prices, rng, caps=caps)


def as_recorded(goal: Goal) -> dict[str, Any]:
    keys = ("index", "asin", "instruction_text", "price_upper", "weight")
    options = goal.options if isinstance(goal.options, dict) else list(goal.options)
    return {key: getattr(goal, key) for key in keys} | {"attributes": list(goal.attributes), "goal_options": options}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_as_recorded(name: str) -> None:
    (said,) = (each for each in configurations() if each["config"] == name)
    catalogue = recorded(said["catalogue"], said["num_products"])
    assert len(catalogue) == said["products_loaded"]
    rng = random.Random(said["random_seed_before_construction"])
    prices = draw_prices(catalogue, rng)
    with gzip.open(ROOT / "webshop_golden" / f"prices_{name}.json.gz", "rt", encoding="utf-8") as file:
        assert {product.asin: prices[at] for at, product in enumerate(catalogue)} == json.load(file)
    goals = Goals.build(catalogue, "human" if said["human_goals"] else "synthetic", prices, rng)
    if "limit_goals" in said["other_arguments"]:
        assert said["other_arguments"]["filter_goals"] == "price_upper<200"
        goals = goals.select(lambda index, goal: goal.price_upper < 200, said["other_arguments"]["limit_goals"])
    records = golden(f"goals_{name}", "webshop_golden")
    assert len(goals) == len(records) == said["goals"]
    for goal, record in zip(goals, records, strict=True):
        assert as_recorded(goal) == record
        product = catalogue[goal.position]
        assert (goal.asin, goal.name, goal.query) == (product.asin, product.title, product.query)
        assert (goal.category, goal.product_category) == (product.category, product.product_category)
    resets = [record for record in golden("resets", "webshop_golden") if record["config"] == name]
    for reset in resets:
        draws = random.Random(reset["random_seed"])
        assert "".join(draws.choices(string.ascii_lowercase, k=10)) in reset["session"]
        index = goals.draw(draws)
        assert index == reset["goal_index"]
        assert f"Instruction: {goals[index].instruction_text}" == reset["instruction_text"]
    assert resets


def test_the_order_of_all_human_goals() -> None:
    """The 13 goals of the first 1,000 products come first where the recorded order of all 12,087 is undone."""
    texts = json.loads(real_data("human_goals.json").read_text(encoding="utf-8"))
    straight = [""] * len(texts)
    for text, number in zip(texts, shuffle(len(texts), 233)[0], strict=True):
        straight[number] = text
    plain = str.maketrans("", "", "'\".")
    instructions = [each.instruction for product in real() for each in product.human]
    assert len(instructions) == 13
    for ours, theirs in zip(instructions, straight[:13], strict=True):
        assert ours.lower().translate(plain).strip() == theirs.lower().translate(plain).strip()


@given(st.integers(0, 300), st.integers(0, 2**64))
def test_the_order_is_that_of_a_shuffled_list(count: int, seed: int) -> None:
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    assert shuffle(count, seed)[0].tolist() == numbers


def weighted(weights: list[float]) -> Goals:
    """Goals of which only the weights are ever asked."""
    some = np.zeros(len(weights))
    columns = dict.fromkeys(("product", "record", "first", "cap", "weight", "stream", "order"), some)
    return Goals(ListCatalogue(()), "human", columns | {"cumulative": np.cumsum(weights)})


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30), st.integers())
def test_a_draw_is_the_originals(weights: list[float], seed: int) -> None:
    sums = [0.0, *itertools.accumulate(weights)]
    place = random.Random(seed).uniform(0, sums[-1])
    assert weighted(weights).draw(random.Random(seed)) == min(bisect.bisect(sums, place), len(sums) - 2)


def test_goal_zero_is_never_drawn_and_the_last_twice_as_often() -> None:
    rng = random.Random(0)
    drawn = [weighted([1.0] * 4).draw(rng) for _ in range(1000)]
    assert set(drawn) == {1, 2, 3}
    assert drawn.count(3) == pytest.approx(500, abs=75)
    rng = random.Random(24)
    goals = weighted([rng.randint(0, 10) for _ in range(50)])
    assert [goals.draw(rng) for _ in range(3)] == [44, 15, 36], "as the original's tests pin them"
    with pytest.raises(ValueError, match="no human goal"):
        build(ListCatalogue(()), "human").draw(random.Random(0))


@given(st.floats(0, 2000), st.integers())
def test_caps(price: float, seed: int) -> None:
    candidates = cap_candidates(price)
    assert list(candidates) == [rung for rung in LADDER if rung > price][:4]
    cap = draw_cap(price, random.Random(seed))
    assert cap == NO_CAP if len(candidates) < 2 else cap in candidates[1:]


def test_a_price_is_drawn_only_from_two() -> None:
    rng = random.Random(5)
    before = rng.getstate()
    assert draw_price((3.5,), rng) == 3.5
    assert rng.getstate() == before
    assert draw_price((9.0, 3.0), rng) == random.Random(5).uniform(9.0, 3.0)


values = st.lists(st.text("xyz", max_size=2), max_size=3).map(tuple)
options = st.dictionaries(
    st.text("abc", max_size=2), st.lists(st.text("xyz", max_size=2), max_size=3).map(tuple), max_size=3
)


@given(st.lists(options, max_size=4))
def test_every_combination_of_options_is_a_goal(groups: list[dict[str, tuple[str, ...]]]) -> None:
    asked_for: dict[str, Any] = {"instruction_attributes": ("soft",)}
    products = [
        made_up(asin=str(number), options=dict(each), instruction=f"Find {number}", **asked_for)
        for number, each in enumerate(groups)
    ]
    expected = []
    for number, each in enumerate(groups):
        for combination in itertools.product(*(each[name] for name in sorted(each))):
            chosen = [*zip(sorted(each), combination, strict=True)]
            text = f"Find {number}" + (" with " if chosen else "")
            expected.append((text + ", and ".join(f"{name}: {value}" for name, value in chosen), chosen))
    random.Random(233).shuffle(expected)
    goals = build(ListCatalogue(products), "synthetic")
    ours = [(goal.instruction_text.split(", and price")[0], [*dict(goal.options).items()]) for goal in goals]
    assert ours == expected
    assert {goal.weight for goal in goals} == ({1 / len(expected)} if expected else set())


def test_instructions_that_give_no_goal() -> None:
    products = [
        made_up(asin="a", human=(asked("Full stops go.."), asked("nothing asked", ()))),
        made_up(asin="b", instruction="nothing asked"),
        made_up(asin="c", instruction="no such option", instruction_attributes=("soft",), options={"size": ()}),
        made_up(asin="d", instruction="Keep this.", instruction_attributes=("soft",), pricing=(985.0,)),
    ]
    human, synthetic = (list(build(ListCatalogue(products), kind)) for kind in KINDS)
    assert [goal.instruction_text.split(",")[0] for goal in human] == ["Full stops go"]
    kept = [(goal.instruction_text, goal.price_upper, goal.weight) for goal in synthetic]
    assert kept == [("Keep this.", NO_CAP, 1.0)]


def test_agentgyms_human_goals_have_every_cap() -> None:
    catalogue = ListCatalogue(
        [made_up(human=(asked("cheap"),)), made_up(asin="b", pricing=(985.0,), human=(asked("dear"),))]
    )
    goals = build(catalogue, "human", caps="agentgym")
    expected = [(f"cheap, and price lower than {cap}.00 dollars", float(cap)) for cap in (20, 30, 40, 50)]
    assert sorted((goal.instruction_text, goal.price_upper) for goal in goals) == expected + [("dear", NO_CAP)] * 4
    assert [goal.index for goal in goals] == [*range(8)]


def test_agentgyms_synthetic_goals_do_not_depend_on_the_seed_but_by_price() -> None:
    catalogue = ListCatalogue([product for product in recorded("1k") if len(product.pricing) == 1])
    first, second = ([*build(catalogue, "synthetic", seed, "agentgym")] for seed in (1, 2))
    assert first == second
    original = [*build(catalogue, "synthetic", 1)]
    assert [goal.asin for goal in original] == [goal.asin for goal in first]
    assert [goal.price_upper for goal in original] != [goal.price_upper for goal in first]


def test_a_selection_keeps_what_it_is_asked_to() -> None:
    goals = build(recorded("1k"), "synthetic")
    kept = goals.select(lambda index, goal: goal.price_upper < 50 and index % 2 == 0)
    cheap = [goal.instruction_text for goal in goals if goal.price_upper < 50 and goal.index % 2 == 0]
    assert [goal.instruction_text for goal in kept] == cheap
    assert [goal.index for goal in kept] == [*range(len(kept))]
    assert [*kept.select(limit=len(kept))] == [*kept]
    few = kept.select(limit=7)
    assert len({goal.instruction_text for goal in few}) == len(few) == 7
    assert [*kept.select(limit=7)] == [*few]


def test_a_selection_draws_goal_after_goal_from_the_stream_that_shuffled_them() -> None:
    products = [made_up(asin=str(number), human=(asked(f"wish {number}"),)) for number in range(50)]
    goals = build(ListCatalogue(products), "human")
    rng = random.Random(233)
    rng.shuffle([*range(50)])
    drawn: dict[int, None] = {}
    while len(drawn) < 40:
        drawn[goals.draw(rng)] = None
    assert [goal.asin for goal in goals.select(limit=40)] == [goals[index].asin for index in drawn]


def test_a_limit_that_waits_for_the_rarest_goals_is_refused() -> None:
    rare = made_up(asin="b", instruction="Find rare", instruction_attributes=("rare",))
    common = made_up(
        instruction="Find common",
        instruction_attributes=("common",),
        options={"size": tuple(map(str, range(100))), "color": tuple(map(str, range(100)))},
    )
    goals = build(ListCatalogue([rare, common]), "synthetic")
    assert len(goals.select(limit=100)) == 100
    with pytest.raises(ValueError, match="too many to draw by weight"):
        goals.select(lambda index, goal: goal.asin == "b" or index < 9).select(limit=9)
