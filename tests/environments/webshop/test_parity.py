"""webshop-v1 against the recorded episodes of the original: pages in three modes, actions, rewards and their parts."""

import json
import random
from copy import deepcopy
from typing import Any

import pytest

from starpod.env_server.authoring.environment import Outcome
from starpod.environments.webshop.environment import WebShop
from starpod.environments.webshop.shop import actions, pages, starts
from starpod.environments.webshop.shop.options import WebShopOptions
from starpod.environments.webshop.shop.shop import Shop
from tests.environments.webshop.memory_store import MemoryStore, configurations, golden_store, real_store
from tests.golden import ROOT, Parity, golden

CHOSEN = {
    "attribute-search-works": "`<a> attribute` raises TypeError",
    "nothing-to-list": "`<c>` without a category raises IndexError",
    "too-many-terms-is-invalid": "more than 1,024 distinct terms raise a Java exception",
}
ERRORS = {
    "TypeError": "attribute-search-works",
    "IndexError": "nothing-to-list",
    "JavaException": "too-many-terms-is-invalid",
}


class Replay:
    """One of our sessions, led through what was recorded of the original's.

    Where the original raised, it had already taken over the new keywords and showed the old page: ours is put there
    before its next click, so that everything that follows can be compared.
    """

    def __init__(self, store: MemoryStore, goal: int, parity: Parity, **options: Any) -> None:
        self.environment = WebShop()
        self.environment.options = WebShopOptions(goals=store.goals_there.kind, goal=goal, **options)
        self.environment.reset(random.Random(0))
        self.parity = parity
        self.pending: tuple[list[str], int] | None = None
        self.deviation = ""
        self.purchases = 0

    @property
    def shop(self) -> Shop:
        return self.environment._cached_shop

    def step(self, what: str, recorded: dict[str, Any]) -> None:
        action = recorded["action"]
        name, argument = actions.parse(action)
        clicked = name == "click" and self.shop.clickable(argument) is not None
        if self.pending and clicked:
            state, shown = self.shop.state, list(self.shop.hits())
            state.keywords, state.number = self.pending
            state.drawn = shown if state.page == "search_results" else None
            self.pending = None
        before = deepcopy(self.shop.state)
        outcome = self.environment.step(action)
        if "error" in recorded:
            # After an error no product is open, so what is clicked on its page raises too: for the same reason.
            self.deviation = ERRORS.get(recorded["error"], self.deviation)
            self.parity.deviate(self.deviation)
            turned = {"next >": 1, "< prev": -1 if before.page == "search_results" else 0}.get(argument, 0)
            searched = (argument.split(" "), 1) if name == "search" else (before.keywords or [], before.number + turned)
            self.pending = searched
            self.environment._enter(self.environment._cached_store, before)
            return
        if name == "search" and outcome.valid:
            self.pending = None
        self._compare_outcome(what, outcome, recorded)
        self.compare_page(what, recorded)

    def _compare_outcome(self, what: str, outcome: Outcome, recorded: dict[str, Any]) -> None:
        self.parity.equal(f"{what} reward", outcome.reward, recorded["reward"])
        self.parity.equal(f"{what} done", outcome.terminated, recorded["done"])
        # The original says that nothing was done by an integer 0; a float comes from something that was carried out.
        self.parity.equal(f"{what} valid", outcome.valid, isinstance(recorded["reward"], float))
        if outcome.terminated:
            self.purchases += 1
            assert outcome.reward_parts is not None
            assert sum(outcome.reward_parts.values()) == pytest.approx(outcome.reward, abs=1e-12)

    def compare_purchase(self, what: str, verbose: dict[str, Any], asin: str, options: Any, price: float) -> None:
        """The details of the purchase that this session is at the end of."""
        shop = self.shop
        grade, item = shop.grade, shop.item()
        assert grade is not None
        assert item is not None
        self.parity.equal(f"{what} verbose", grade.as_info(), verbose)
        self.parity.equal(f"{what} asin", item.product.asin, asin)
        self.parity.equal(f"{what} options", shop.state.options, options)
        self.parity.equal(f"{what} price", float(shop.stock.prices[item.position]), price)

    def compare_page(self, what: str, recorded: dict[str, Any]) -> None:
        shop = self.shop
        self.parity.equal(f"{what} url", shop.state.address(), recorded["url"])
        self.parity.equal(f"{what} text", pages.text(shop), recorded["text"])
        self.parity.equal(f"{what} text_rich", pages.rich(shop), recorded["text_rich"])
        self.parity.equal(f"{what} search bar", shop.state.has_search_bar, recorded["has_search_bar"])
        self.parity.equal(f"{what} clickables", list(shop.clickables()), recorded["clickables"])
        self.parity.steps += 1


def use(monkeypatch: pytest.MonkeyPatch, store: MemoryStore) -> None:
    """Makes the store the only one of this server."""
    monkeypatch.setattr(starts, "stores", lambda: {store.name: store})


def test_golden_episodes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parity, purchases = Parity(CHOSEN), 0
    settings = {each["config"]: each for each in configurations()}
    for episode in golden("episodes", "webshop_golden"):
        store = golden_store(episode["config"])
        use(monkeypatch, store)
        purchases += replay_episode(store, settings[episode["config"]], episode, parity)
        parity.episodes += 1
    # The recordings come in two halves, and not every error occurs in both; test_environment.py has all of them.
    parity.chosen = {name: why for name, why in CHOSEN.items() if name in parity.deviations}
    parity.report(f"webshop, {purchases} purchases", capsys)


def replay_episode(store: MemoryStore, settings: dict[str, Any], episode: dict[str, Any], parity: Parity) -> int:
    """Compares every step of an episode; returns the number of purchases."""
    other = settings["other_arguments"]
    options = {"show_attrs": settings["show_attrs"]}
    options |= {name: other[name] for name in ("num_prev_obs", "num_prev_actions") if name in other}
    replays: list[Replay] = []
    for recorded in episode["steps"]:
        what = f"{episode['id']} {recorded['t']} {recorded.get('action', 'reset')!r}"
        if "reset" in recorded:
            replays.append(replay := Replay(store, recorded["goal_index"], parity, **options))
            replay.shop.state.session = other.get("session_prefix", "") + str(recorded["reset"])
            parity.equal(
                f"{what} goal", f"Instruction: {replay.shop.goal.instruction_text}", recorded["instruction_text"]
            )
            replay.compare_page(what, recorded)
        else:
            if recorded.get("random_seed") is not None:
                replay.environment._dynamics = random.Random(recorded["random_seed"])
            replay.step(what, recorded)
        if bought := recorded.get("purchase"):
            replay.compare_purchase(what, bought["verbose"], bought["asin"], bought["options"], bought["price"])
            parity.equal(f"{what} goal", replay.shop.goal.index, bought["goal_index"])
        if "state" in recorded:
            parity.equal(f"{what} state", replay.environment.observe(), recorded["state"])
    return sum(replay.purchases for replay in replays)


def test_real_transcripts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "webshop_data" / "original_env_transcripts.jsonl"
    if not path.is_file():
        pytest.skip(f"no data at {path}")
    parity, purchases = Parity({}), 0
    for line in path.read_text().splitlines():
        episode = json.loads(line)
        store = real_store("synthetic" if episode["kind"].startswith("synthetic") else "human")
        use(monkeypatch, store)
        replay = Replay(store, episode["index"], parity)
        what = f"{episode['kind']} {episode['index']}"
        for recorded in episode["steps"]:
            recorded |= recorded.pop("available")
            if recorded["action"] is None:
                replay.compare_page(what, recorded)
            else:
                replay.step(f"{what} {recorded['action']!r}", recorded)
        if episode["reward_info"]:
            asin, options = episode["final_asin"], episode["final_options"]
            replay.compare_purchase(what, episode["reward_info"], asin, options, episode["price"])
        purchases += replay.purchases
        parity.episodes += 1
    parity.report(f"webshop, real products, {purchases} purchases", capsys)
