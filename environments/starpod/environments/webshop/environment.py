"""webshop-v1: find and buy the product that an instruction describes, in a shop of up to a million products."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from starpod.env_server import (
    INVALID,
    Environment,
    EnvironmentSpec,
    Limits,
    Outcome,
    Unavailable,
    digest,
)

from .search.bm25 import TooManyTerms
from .shop import actions, pages
from .shop.options import WebShopOptions
from .shop.policies import expert_action
from .shop.presentation import present
from .shop.purchase import purchase_outcome
from .shop.shop import Shop, ShopState
from .shop.starts import choose_goal, goals_of, open_stores, store_named
from .store.sections import StoreError
from .store.served import give_stores

if TYPE_CHECKING:
    from .store.store import Store

logger = logging.getLogger(__name__)

OPEN_SCORE = 0.99
"""Maximum of `score` before the purchase, because only a purchase solves the task."""

_PAID = {
    "graded": "It is paid by how many of attributes, options and price are as asked, and by the kind of the product.",
    "binary": "It is paid only if the kind of product and every attribute, option and the price are as asked.",
}
_CHANGED = Outcome()
_UNCHANGED = Outcome(effective=False)


@dataclass(slots=True)
class PastPages:
    """Earlier pages and actions of an episode, which observations show again."""

    page_count: int
    """Number of pages that are shown."""
    action_count: int
    """Number of actions that are shown."""
    pages: list[str]
    """The last pages, oldest first."""
    actions: list[str]

    @property
    def is_shown(self) -> bool:
        return bool(self.page_count or self.action_count)

    def remember(self, page: str, action: str) -> None:
        """Keep the current page and the action that is about to be executed."""
        self.pages = [*self.pages, page][-self.page_count :] if self.page_count else []
        self.actions = [*self.actions, action][-self.action_count :] if self.action_count else []

    def texts(self) -> list[str]:
        """Return earlier pages and actions alternately, oldest first: a page, the action on it, the next page, ..."""
        past_texts: list[str] = []
        for age in range(max(len(self.pages), len(self.actions)), 0, -1):
            past_texts += [texts[-age] for texts in (self.pages, self.actions) if age <= len(texts)]
        return past_texts


class WebShop(Environment):
    """A session in a store. The seed selects the goal; the dynamics seed only determines what `search[<r>]` draws."""

    spec = EnvironmentSpec(
        id="webshop-v1",
        version="1.0.0",
        title="WebShop",
        instructions=(
            "You shop for one product. The instruction says what it should be like, which options to choose and what "
            "it may cost. Search, look through the results, open a product, choose its options, and buy it: the first "
            "purchase ends the task. Actions are search[words] and click[text], where the text is that of a button, a "
            "product's number or an option's value on the page, for example click[Buy Now]."
        ),
        grammar=(
            "search[words] or click[text]; the text is one that the page offers, in any case; the names are in lower "
            f"case, what follows the last ] is ignored, and an action has one line and at most {actions.MAX_LENGTH} "
            "characters"
        ),
        observation_modes=("text", "text_rich", "html", "url"),
        render_modes=("text", "html", "png"),
        limits=Limits(max_turns=15, max_actions_per_turn=1, max_actions=15),
        slow_render=True,
    )
    Options = WebShopOptions
    options: WebShopOptions

    _cached_store: Store
    _cached_shop: Shop
    _past: PastPages

    @classmethod
    def use_stores(cls, stores: Sequence[str]) -> bool:
        """Use these stores, each NAME=PATH; the first is the default."""
        give_stores(stores)
        return True

    @classmethod
    def prepare(cls) -> None:
        """Open the stores. Without Chromium, remove the render mode png and log the reason."""
        try:
            open_stores()
        except StoreError as error:
            raise Unavailable(str(error)) from error
        if problem := _missing_for_pictures():
            logger.warning("%s draws no png: %s", cls.spec.id, problem)
            cls.spec = replace(cls.spec, render_modes=tuple(mode for mode in cls.spec.render_modes if mode != "png"))

    def reset(self, rng: random.Random) -> None:
        options = self.options
        store = store_named(options.catalogue)
        goals = goals_of(store, options.goals, options.caps, options.limit_goals)
        session, goal = choose_goal(options, goals, rng, self.seed)
        self._enter(store, ShopState(goal, session))

    def _enter(
        self, store: Store, state: ShopState, past_pages: Sequence[str] = (), past_actions: Sequence[str] = ()
    ) -> None:
        options = self.options
        self._past = PastPages(options.num_prev_obs, options.num_prev_actions, [*past_pages], [*past_actions])
        self._cached_store = store
        self._cached_shop = Shop(
            store,
            goals_of(store, options.goals, options.caps, options.limit_goals),
            state,
            show_attributes=options.show_attrs,
            page_size=options.page_size,
            ratio=options.ratio,
            stream=lambda: self.dynamics,
        )

    def step(self, action: Any) -> Outcome:
        if type(action) is not str or len(action) > actions.MAX_LENGTH:
            return self._invalid()
        if self._past.is_shown:
            self._past.remember(_page(self._cached_shop, self.options), action)
        shop = self._cached_shop
        name, argument = actions.parse(action)
        try:
            if name == "click" and argument:
                has_changed = shop.click(argument)
                if has_changed is None:
                    return self._invalid()
                if shop.state.page == "done":
                    return purchase_outcome(shop, self._cached_store, self.options)
                return _CHANGED if has_changed else _UNCHANGED
            if name == "search" and argument:
                rule = self.options.search_without_bar
                is_barred = rule != "allowed" and not shop.state.has_search_bar
                if is_barred and rule == "refused":
                    return self._invalid()
                has_changed = shop.search(argument)
                if is_barred:
                    return self._invalid(effective=has_changed)
                return _CHANGED if has_changed else _UNCHANGED
        except TooManyTerms as error:
            return self._invalid({"reason": str(error)})
        return self._invalid()

    def _invalid(self, info: Mapping[str, Any] | None = None, effective: bool = False) -> Outcome:
        if self.options.on_invalid == "end":
            return Outcome(terminated=True, success=False, valid=False, effective=effective, info=info)
        return Outcome(valid=False, effective=effective, info=info) if effective or info else INVALID

    def instructions(self) -> str:
        return f"{self.spec.instructions} {_PAID[self.options.reward]}"

    # --- what the agent sees -------------------------------------------------------------------------------------

    def observe(self) -> str:
        options, shop = self.options, self._cached_shop
        if options.presentation != "original":
            return present(shop, options.presentation)
        page = _page(shop, options)
        earlier_texts = self._past.texts()
        return pages.SEPARATOR.join([*earlier_texts, page]) if earlier_texts else page

    def valid_actions(self) -> list[str]:
        shop = self._cached_shop
        choices = [actions.click(text) for text in shop.clickables() if text != "search"]
        if shop.state.has_search_bar:
            choices.append(actions.search(shop.goal.instruction_text))
        return [action for action in choices if action is not None]

    def state_key(self) -> bytes:
        """Return a digest of page and goal. Products opened earlier are included only if the observation shows them."""
        state = self._cached_shop.state
        opened = sorted(state.opened) if self.options.observation in ("text_rich", "html") else None
        options = sorted(state.options.items())
        page = (state.page, state.keywords, state.number, state.drawn, state.asin, state.sub_page, options, opened)
        goal = self._cached_shop.goal
        return digest(repr((self._cached_store.digest, goal.asin, goal.instruction_text, goal.options, page)))

    def expert_action(self) -> str | None:
        return expert_action(self._cached_shop)

    def score(self) -> float:
        """Return the reward for buying the open product (times 0.99 until it is bought), or 0 if none is open."""
        shop = self._cached_shop
        if not shop.state.asin:
            return 0.0
        reward = shop.appraise().reward
        return reward if shop.state.page == "done" else OPEN_SCORE * reward

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return _png(self._cached_shop)
        return _html(self._cached_shop) if mode == "html" else pages.rich(self._cached_shop)

    # --- snapshots -----------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        return {
            "catalogue": [self._cached_store.name, self._cached_store.digest],
            "shop": self._cached_shop.state.as_dict(),
            "past": [list(self._past.pages), list(self._past.actions)],
            "seeds": [self.seed, self.dynamics_seed],
            "dynamics": self._dynamics,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state. Raises ValueError if it belongs to another catalogue than this server's."""
        name, digest = state["catalogue"]
        store = store_named(self.options.catalogue)
        if store.digest != digest:
            raise ValueError(
                f"it is of catalogue {name!r} with digest {digest}, and this server's {store.name!r} has digest "
                f"{store.digest}; start the server with the same store"
            )
        self.seed, self.dynamics_seed = state["seeds"]
        self._dynamics = state["dynamics"]
        self._enter(store, ShopState(**state["shop"]), *state["past"])


def _page(shop: Shop, options: WebShopOptions) -> str:
    mode = options.observation
    return _html(shop) if mode == "html" else pages.show(shop, mode)


def _html(shop: Shop) -> str:
    from .shop.markup import render_html

    return render_html(shop)


def _missing_for_pictures() -> str:
    """Return what this machine lacks to draw a page as a PNG, or "" if nothing is missing."""
    if find_spec("selenium") is None:
        return "it needs the package selenium; from a clone of the repository: pip install '.[browser]'"
    from .browser.config import BrowserConfig

    try:
        BrowserConfig.from_environment()
    except Unavailable as error:
        return str(error)
    return ""


def _png(shop: Shop) -> bytes:
    from .browser import png

    return png(shop)
