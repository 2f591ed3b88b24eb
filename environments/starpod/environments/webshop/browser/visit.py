"""A visit to a session's page in a browser: clicks, typed text, scrolling, and reading of the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starpod.env_server import INVALID, Outcome
from starpod.environments.webshop.shop import actions

from .chromium import Browser
from .view import PageView, look

WINDOWS = {"desktop": (1280, 800), "phone": (390, 844)}
"""Width and height of each kind of window, in CSS pixels."""
_SCROLL = 0.8
"""Distance of one scroll, as a share of the window's height."""
_UNCHANGED = Outcome(effective=False)

_OPEN = """
const field = document.getElementById("search_input");
if (field && arguments[0] !== null) field.value = arguments[0];
window.scrollTo(0, arguments[1]);
"""
_CLICK = "window.__shown[arguments[0]].click();"
_FILL = "window.__shown[arguments[0]].value = arguments[1];"
_SEND = "window.__shown[arguments[0]].form.requestSubmit();"
_SCROLL_TO = "window.scrollTo(0, arguments[0]);"
_CAUGHT = """
let sent = null;
document.addEventListener("submit", (event) => {
  event.preventDefault();
  sent = Object.fromEntries(new FormData(event.target, event.submitter));
}, {once: true});
%s
return sent;
"""
"""Runs a script and returns the form that it sends. Nothing leaves the browser, which therefore needs no server."""


@dataclass
class Visit:
    """One visit to a session's page, in a window of the size that WINDOWS names."""

    browser: Browser
    window: str
    html: Callable[[], str]
    """Returns the session's page."""
    submit: Callable[[str], Outcome]
    """Executes the action of a form of the page."""
    outcome: Outcome | None = None
    """Outcome of the form that was sent during the visit."""

    def open(self, typed: str | None, scroll: int) -> PageView:
        """Open the page in the state in which it was left: with the typed text and the scroll position."""
        self.browser.resize(*WINDOWS[self.window], mobile=self.window == "phone")
        self.browser.show(self.html())
        self._run(_OPEN, typed, scroll)
        return look(self.browser)

    def click(self, view: PageView, name: str) -> Outcome:
        index = view.find(name)
        if index is None or view.elements[index].disabled:
            return INVALID
        return self._send(_CLICK, index) if view.elements[index].sends else _UNCHANGED

    def search(self, view: PageView, words: str) -> Outcome:
        index = view.find_field("search_query")
        if index is None or not words.strip():
            return INVALID
        self._run(_FILL, index, words)
        return self._send(_SEND, index)

    def type(self, view: PageView, field: str, words: str) -> Outcome:
        """Replace the text of a field of the page.

        Args:
            field: number, name or label of the field.
        """
        index = view.find_field(field)
        if index is None:
            return INVALID
        self._run(_FILL, index, words)
        return _UNCHANGED if view.elements[index].value == words else Outcome()

    def scroll(self, view: PageView, direction: str) -> Outcome:
        if direction not in ("up", "down"):
            return INVALID
        step = round(_SCROLL * view.height) * (1 if direction == "down" else -1)
        position = min(max(view.scroll + step, 0), max(view.page - view.height, 0))
        self._run(_SCROLL_TO, position)
        return Outcome() if position != view.scroll else _UNCHANGED

    def back(self, view: PageView) -> Outcome:
        """Click the page's own button for going back."""
        name = next((name for name in ("< prev", "back to search") if view.find(name) is not None), None)
        return INVALID if name is None else self.click(view, name)

    def _run(self, script: str, *arguments: object) -> None:
        self.browser.driver.execute_script(script, *arguments)

    def _send(self, script: str, index: int) -> Outcome:
        """Run a script that sends a form, execute the form, and show the page that follows."""
        form: dict[str, str] | None = self.browser.driver.execute_script(_CAUGHT % script, index)
        if form is None:
            return _UNCHANGED
        action = form.get("action") or actions.search(form.get("search_query", "")) or "search[]"
        self.outcome = self.submit(action)
        self.browser.show(self.html())
        return self.outcome
