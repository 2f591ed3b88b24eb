"""webshop-browser-v1: the shop of webshop-v1, which the agent uses through a web browser."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import Field

from starpod.env_server import INVALID, Concurrency, EnvironmentSpec, Limits, Outcome, digest
from starpod.environments.webshop.environment import WebShop
from starpod.environments.webshop.shop import actions
from starpod.environments.webshop.shop.options import WebShopOptions

from .chromium import Browser
from .pool import shared_pool
from .view import PageView, look
from .visit import Visit

Result = TypeVar("Result")

_ACTION = re.compile(r"(click|type|search|scroll)\[(.*)\]|(back)(?:\[\])?", re.DOTALL)
_SEEN: dict[bytes, str] = {}
"""Cache of observations, by a digest of what the browser loads."""
_SEEN_LOCK = threading.Lock()
_MAX_SEEN = 2048


class WebShopBrowserOptions(WebShopOptions):
    """Options of webshop-v1, and an option for the window's size. Options for the text of pages have no effect here."""

    window: Literal["desktop", "phone"] = Field(
        default="desktop", description="The size of the window: 1280 x 800 or 390 x 844 pixels."
    )


class WebShopBrowser(WebShop):
    """A session of webshop-v1 that is played through a browser.

    Browsers are shared: each turn opens the session's page in a free browser. The state of a session therefore consists
    of the state of webshop-v1, the scroll position, and text that was typed into the search field but not sent yet.
    """

    spec = EnvironmentSpec(
        id="webshop-browser-v1",
        version="1.0.0",
        title="WebShop in a browser",
        instructions=(
            "You shop for one product in a web browser. The instruction on the page says what the product should be "
            "like, which options to choose and what it may cost; the first purchase ends the task. You see the part of "
            "the page that is in view; what can be clicked or typed into has a number in brackets. Actions: "
            "click[text], click[#number], search[words], type[field, words] without sending it, scroll[down], "
            "scroll[up], back."
        ),
        grammar=(
            "click[text], click[#number], search[words], type[field or #number, words], scroll[down], scroll[up] or "
            f"back; at most {actions.MAX_LENGTH} characters"
        ),
        render_modes=("text", "html", "png"),
        limits=Limits(max_turns=30, max_actions_per_turn=1, max_actions=30),
        concurrency=Concurrency.THREAD,
        slow_render=True,
    )
    Options = WebShopBrowserOptions
    options: WebShopBrowserOptions

    _scroll: int
    _typed: str | None

    @classmethod
    def prepare(cls) -> None:
        """Open the stores. Raises Unavailable if Chromium, its driver or a package is missing."""
        shared_pool()
        super().prepare()

    def reset(self, rng: random.Random) -> None:
        super().reset(rng)
        self._scroll, self._typed = 0, None

    def step(self, action: Any) -> Outcome:
        """Execute an action. If it raises Busy, the state is unchanged."""
        if not isinstance(action, str) or len(action) > actions.MAX_LENGTH:
            return INVALID
        match = _ACTION.fullmatch(action.strip())
        if match is None:
            return INVALID
        state = self.get_state()
        return self._visit(
            lambda visit, view: self._act(visit, view, match[1] or match[3], match[2] or ""),
            undo=lambda: self.set_state(state),
        )

    def _act(self, visit: Visit, view: PageView, name: str, argument: str) -> Outcome:
        match name:
            case "click":
                outcome = visit.click(view, argument)
            case "search":
                outcome = visit.search(view, argument)
            case "scroll":
                outcome = visit.scroll(view, argument.strip().lower())
            case "back":
                outcome = visit.back(view)
            case _:
                field, _, text = argument.partition(",")
                outcome = visit.type(view, field, text.strip())
                if outcome.valid:
                    self._typed = text.strip()
        if visit.outcome is not None:
            self._typed = None  # the page changed
        if outcome.effective:
            view = look(visit.browser)
        self._scroll = view.scroll
        self._saw(view)
        return outcome

    # --- visits ---------------------------------------------------------------------------------------------------

    def html(self) -> str:
        """Return the page that the browser loads."""
        page = super().render("html")
        assert isinstance(page, str)
        return page

    def submit(self, action: str) -> Outcome:
        """Execute the action of a form of the page."""
        return super().step(action)

    def _visit(self, work: Callable[[Visit, PageView], Result], undo: Callable[[], None] = lambda: None) -> Result:
        """Open the page in the state in which it was left, and run `work`. Raises Busy."""

        def run(browser: Browser) -> Result:
            visit = Visit(browser, self.options.window, self.html, self.submit)
            return work(visit, visit.open(self._typed, self._scroll))

        return shared_pool().run(run, undo)

    # --- observations --------------------------------------------------------------------------------------------

    def observe(self) -> str:
        """Return the visible text. Sessions with the same page, such as forks and members of a group, share a cache."""
        return _SEEN.get(self._page_key()) or self._saw(self._visit(lambda visit, view: view))

    def _saw(self, view: PageView) -> str:
        key = self._page_key()
        with _SEEN_LOCK:
            _SEEN[key] = view.text
            if len(_SEEN) > _MAX_SEEN:
                del _SEEN[next(iter(_SEEN))]
        return view.text

    def _page_key(self) -> bytes:
        return digest(repr((self.html(), self.options.window, self._scroll, self._typed)))

    def render(self, mode: str = "text") -> str | bytes:
        if mode == "png":
            return self._visit(lambda visit, view: visit.browser.screenshot())
        return self.html() if mode == "html" else self.observe()

    def valid_actions(self) -> list[str]:
        return [*super().valid_actions(), "scroll[down]", "scroll[up]"]

    def state_key(self) -> bytes:
        return digest(repr((super().state_key(), self.options.window, self._scroll, self._typed)))

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "window": [self._scroll, self._typed]}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._scroll, self._typed = state["window"]
