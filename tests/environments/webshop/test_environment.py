"""webshop-v1 as an environment: outcomes, rewards, what sessions keep, and the policies."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.env_server.authoring.environment import INVALID, Limits, OptionsError, Outcome
from starpod.env_server.episodes.live_episode import LiveEpisode, Want
from starpod.env_server.episodes.state import StateError
from starpod.environments.webshop.environment import OPEN_SCORE, WebShop
from starpod.environments.webshop.shop import pages, starts
from starpod.environments.webshop.shop.actions import MAX_LENGTH
from starpod.environments.webshop.shop.options import WebShopOptions
from starpod.environments.webshop.shop.policies import plan_for
from tests.environments.webshop.memory_store import synthetic_store

SEEDS = st.integers(0, 2**63)


@pytest.fixture(autouse=True)
def stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores of a server: the generated catalogue with human goals, and with synthetic ones."""
    there = {"human": synthetic_store("human"), "synthetic": synthetic_store("synthetic")}
    monkeypatch.setattr(starts, "stores", lambda: there)


def opened(seed: int = 0, **options: Any) -> WebShop:
    """A session after reset; the default catalogue has human goals."""
    if options.get("goals") == "synthetic":
        options.setdefault("catalogue", "synthetic")
    environment = WebShop()
    environment.options = WebShopOptions.model_validate(options)
    environment.seed = seed
    environment.reset(random.Random(seed))
    return environment


def bought(environment: WebShop) -> Outcome:
    """The outcome of the expert's purchase."""
    for _ in range(30):
        outcome = environment.step(environment.expert_action())
        assert outcome.valid and outcome.effective
        if outcome.terminated:
            return outcome
    raise AssertionError("the expert does not get there")


def solvable(**options: Any) -> WebShop:
    """A session whose goal has options and can be met in full."""
    for seed in itertools.count():
        environment = opened(seed, choose="uniform", **options)
        shop = environment._cached_shop
        plan = plan_for(shop)
        if plan and plan.reward == 1.0 and len(shop.goal.options) > 1:
            return environment
    raise AssertionError


def test_a_bad_action_changes_nothing_or_ends_the_episode() -> None:
    environment = opened()
    before = environment.get_state()
    bad = ("", "buy", "click[buy now]", "click[search]", "search[]", "Click[search]", "search [a]", 7, "x" * 99_999)
    for action in (*bad, f"search[{'x' * MAX_LENGTH}]"):
        assert environment.step(action) == INVALID
        assert environment.get_state() == before
    outcome = opened(on_invalid="end").step("buy now")
    assert (outcome.terminated, outcome.valid, outcome.success, outcome.reward) == (True, False, False, 0.0)


@pytest.mark.parametrize(("rule", "valid", "effective"), [("allowed", 1, 1), ("flagged", 0, 1), ("refused", 0, 0)])
def test_searching_without_a_search_bar(rule: str, valid: int, effective: int) -> None:
    environment = opened(search_without_bar=rule)
    assert environment.step("search[lamp]").valid
    again = environment.step("search[chair]")
    assert (again.valid, again.effective) == (valid, effective)
    assert ("chair" in environment._cached_shop.state.address()) == effective


def test_what_the_original_raises_on_is_an_outcome() -> None:
    environment = opened()
    before = environment.state_key()
    outcome = environment.step(f"search[{' '.join(f'w{number}' for number in range(1100))}]")
    assert (outcome.valid, outcome.effective) == (False, False)
    assert outcome.info
    assert "1024" in outcome.info["reason"].replace(",", "")
    assert environment.state_key() == before
    assert environment.step("search[<c>]").valid
    assert "Total results: 0" in environment.observe()
    catalogue = environment._cached_store.catalogue
    first = next(product for product in map(catalogue.__getitem__, itertools.count()) if product.attributes)
    assert environment.step(f"search[<a> {first.attributes[0]}]").valid
    assert first.asin in environment.observe()


def test_a_purchase_says_everything() -> None:
    environment = solvable()
    shop = environment._cached_shop
    outcome = bought(environment)
    assert (outcome.reward, outcome.success, outcome.terminated, outcome.truncated) == (1.0, True, True, False)
    assert outcome.reward_parts and sum(outcome.reward_parts.values()) == pytest.approx(1.0)
    named = [*map("attribute: {}".format, shop.goal.attributes), *map("option: {}".format, set(shop.goal.options))]
    assert outcome.criteria and set(outcome.criteria) == {"purchase", "price", "kind", *named}
    assert all(outcome.criteria.values())
    info = outcome.info or {}
    assert info["r_att"] == info["r_option"] == info["score"] == 1.0
    assert (info["goal"], info["goal_asin"]) == (shop.goal.index, shop.goal.asin)
    assert (info["tagger"], info["catalogue"], info["catalogue_digest"]) == ("four letters", "memory", "0123")
    assert info["price"] <= shop.goal.price_upper
    assert environment.score() == 1.0
    assert environment.expert_action() is None
    assert environment.valid_actions() == []


def test_a_poor_purchase_is_paid_in_part() -> None:
    environment = solvable(goals="synthetic")
    twins = [solvable(goals="synthetic", reward="binary"), solvable(goals="synthetic", reward_scale=10.0)]
    outcomes = []
    for each in (environment, *twins):
        while each._cached_shop.state.page != "item_page":
            each.step(each.expert_action())
        outcomes.append(each.step("click[Buy Now]"))
    graded, binary, scaled = outcomes
    assert 0 < graded.reward < 1
    assert graded.success is binary.success is scaled.success is False
    assert (binary.reward, binary.reward_parts) == (0.0, {"solved": 0.0})
    assert scaled.reward == pytest.approx(10 * graded.reward)
    for outcome in outcomes:
        assert outcome.reward_parts is not None
        assert sum(outcome.reward_parts.values()) == pytest.approx(outcome.reward)
    assert graded.criteria
    assert not any(met for name, met in graded.criteria.items() if name.startswith("option: "))
    assert bought(solvable(preset="verl_agent", catalogue="synthetic", split="all")).reward == 10.0


@settings(max_examples=15)
@given(seed=SEEDS, choices=SEEDS, goals=st.sampled_from(["human", "synthetic"]))
def test_listed_actions_are_valid_and_the_rest_of_the_rules_hold(seed: int, choices: int, goals: str) -> None:
    environment, rng = opened(seed, goals=goals, show_attrs=bool(seed % 2)), random.Random(choices)
    for _ in range(12):
        listed = environment.valid_actions()
        assert len(set(listed)) == len(listed) > 0
        key, seen = environment.state_key(), environment.observe()
        outcome = environment.step(rng.choice(listed))
        assert outcome.valid
        assert 0 <= outcome.reward <= 1
        assert outcome.effective == (environment.state_key() != key) or "<r>" in seen
        assert 0 <= environment.score() <= 1
        if outcome.terminated:
            assert environment.score() == outcome.reward
            assert environment.valid_actions() == []
            break
        assert environment.score() <= OPEN_SCORE


def test_earlier_steps_are_shown_in_turn() -> None:
    environment = opened(num_prev_obs=2, num_prev_actions=1)
    seen = [environment.observe()]
    for action in ("search[lamp]", "nonsense", "click[next >]"):
        environment.step(action)
        seen.append(pages.text(environment._cached_shop))
    assert environment.observe() == " [SEP] ".join([seen[1], seen[2], "click[next >]", seen[3]])
    only_actions = opened(num_prev_actions=3)
    only_actions.step("search[lamp]")
    assert only_actions.observe() == f"search[lamp] [SEP] {pages.text(only_actions._cached_shop)}"


@pytest.mark.parametrize("mode", WebShop.spec.observation_modes)
def test_every_mode_shows_the_same_page(mode: str) -> None:
    environment = opened(observation=mode)
    environment.step("search[lamp]")
    shown = environment.observe()
    assert ("Total results" in shown) == (mode != "url")
    assert ("<html" in shown) == (mode == "html")
    assert environment.render("text") == pages.rich(environment._cached_shop)
    assert "<html" in str(environment.render("html"))


def test_state_keys_are_of_the_state_alone() -> None:
    one, other = opened(1, goal=5), opened(2, goal=5)
    assert one.state_key() == other.state_key() != opened(1, goal=6).state_key()
    one.step("search[lamp]")
    first = one._cached_shop.listing().entries[0].asin
    for action in (f"click[{first}]", "click[< prev]"):
        one.step(action)
    other.step("search[Lamp]")
    assert one.state_key() == other.state_key()  # what was opened is not shown in mode text
    rich, fresh = opened(1, goal=5, observation="text_rich"), opened(1, goal=5, observation="text_rich")
    for action in ("search[lamp]", f"click[{first}]", "click[< prev]"):
        rich.step(action)
    fresh.step("search[lamp]")
    assert rich.observe() != fresh.observe()
    assert rich.state_key() != fresh.state_key()


@settings(max_examples=15)
@given(seed=SEEDS, choices=SEEDS, turns=st.integers(0, 8), past=st.integers(0, 2))
def test_forks_and_snapshots_continue_equally(seed: int, choices: int, turns: int, past: int) -> None:
    rng = random.Random(choices)

    def play(episode: LiveEpisode, count: int, rng: random.Random) -> list[Any]:
        seen: list[Any] = []
        for _ in range(count):
            if not episode.end_reason:
                listed = [*(episode.environment.valid_actions() or ()), "search[<r>]", "nonsense"]
                seen.append(episode.turn([rng.choice(listed)], Want(state_key=True, score=True)))
        return seen

    environment = WebShop()
    environment.options = WebShopOptions(num_prev_obs=past, num_prev_actions=past)
    original = LiveEpisode(environment, Limits())
    original.reset(seed, seed + 1)
    play(original, turns, rng)
    twin, saved = original.fork(None), original.save()
    restored = LiveEpisode.load(WebShop, saved)
    lucky = original.fork(seed + 2)
    expected = play(original, 6, random.Random(choices))
    assert twin.save() == saved
    assert play(twin, 6, random.Random(choices)) == expected
    assert play(restored, 6, random.Random(choices)) == expected
    assert lucky.environment.dynamics_seed == seed + 2
    assert len(saved) < 16_000


def test_random_products_are_drawn_from_the_dynamics_seed_alone() -> None:
    def drawn(seed: int, dynamics_seed: int) -> list[int]:
        environment = opened(seed, goal=3)
        environment.dynamics_seed = dynamics_seed
        environment.step("search[<r>]")
        return list(environment._cached_shop.hits())

    assert drawn(1, 1) == drawn(2, 1) != drawn(1, 2)


def test_a_snapshot_of_another_catalogue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = opened()
    episode = LiveEpisode(environment, Limits())
    episode.reset(1, 1)
    saved = episode.save()
    monkeypatch.setattr(environment._cached_store, "digest", "4567")
    with pytest.raises(StateError, match="digest 0123"):
        LiveEpisode.load(WebShop, saved)


def test_catalogues_are_named() -> None:
    assert opened(catalogue="human").observe() == opened().observe()
    with pytest.raises(OptionsError, match=r"catalogue '/etc'; .* human, synthetic"):
        opened(catalogue="/etc")


@pytest.mark.parametrize("goals", ["human", "synthetic"])
def test_the_expert_meets_what_can_be_met(goals: str) -> None:
    solved, tried = 0, 30
    for seed in range(tried):
        environment = opened(seed, goals=goals, choose="uniform")
        shop = environment._cached_shop
        outcome = bought(environment)
        solved += outcome.reward == 1.0
        if outcome.reward < 1.0:
            item = shop.item_at(shop.goal.position)
            assert outcome.reward >= max(shop.worth(item, options).reward for options in every_choice(item))
    assert solved > 0.85 * tried


def every_choice(item: Any) -> Iterator[dict[str, str]]:
    """Every way to choose options of a product."""
    groups: dict[str, list[str]] = {}
    for clickable in item.clickables.values():
        if clickable.kind == "option":
            groups.setdefault(clickable.value, []).append(clickable.text)
    for values in itertools.product(*([None, *values] for values in groups.values())):
        yield {group: value for group, value in zip(groups, values, strict=True) if value}


@settings(max_examples=15)
@given(seed=SEEDS, choices=SEEDS)
def test_the_expert_finds_its_way_from_anywhere(seed: int, choices: int) -> None:
    environment, rng = opened(seed), random.Random(choices)
    for _ in range(rng.randrange(12)):
        listed = [*environment.valid_actions(), "search[<r>]", "search[search_results item_page]"]
        environment.step(rng.choice([action for action in listed if action != "click[buy now]"]))
    plan = plan_for(environment._cached_shop)
    assert plan is not None
    assert bought(environment).reward == plan.reward


@pytest.mark.parametrize("size", [1, 3, 50])
def test_pages_of_any_size_show_the_same_results_and_the_expert_finds_its_way(size: int) -> None:
    usual, other = (opened(3, page_size=each)._cached_shop for each in (10, size))
    shown: dict[int, list[int]] = {}
    for shop in (usual, other):
        shop.search("lamp shirt")
        hits = shown.setdefault(shop.page_size, [])
        while page := shop.listing().positions:
            assert len(page) == shop.page_size or len(hits) + len(page) == len(shop.hits())
            hits += page
            shop.click("next >")
    assert len(shown[10]) == 50 and shown[size] == shown[10]
    assert bought(opened(3, page_size=size)).reward == bought(opened(3)).reward
