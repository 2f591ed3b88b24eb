"""A visit to a session's page in a browser: clicks, typed text, scrolling, and reading of the page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from selenium.common.exceptions import TimeoutException

from starpod.env_server import INVALID, Outcome

from .chromium import Browser
from .loopback import shared_loopback
from .view import View, look

_SCROLL = 0.8
"""Distance of one scroll, as a share of the window's height."""
_WAIT_SECONDS = 10.0
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
_LOADED = "return document.readyState === 'complete' && !window.__shown;"


class Session(Protocol):
    """The visited session: its page, and the execution of its forms."""

    def html(self) -> str: ...
    def submit(self, action: str) -> Outcome: ...


@dataclass
class Visit:
    """One visit to a session's page."""

    browser: Browser
    session: Session
    size: tuple[int, int]
    mobile: bool
    outcome: Outcome | None = None
    """Outcome of the form that was sent during the visit. Further forms are ignored."""
    _error: BaseException | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def opened(self, typed: str | None, scroll: int) -> Iterator[View]:
        """Open the page in the state in which it was left: with the typed text and the scroll position."""
        self.browser.resize(*self.size, mobile=self.mobile)
        with shared_loopback().showing(self) as address:
            self.browser.driver.get(address)
            self.browser.driver.execute_script(_OPEN, typed, scroll)
            yield look(self.browser)

    # --- requests of the page, on a thread of the Loopback -------------------------------------------------------

    def page(self) -> str:
        return self.session.html()

    def act(self, action: str) -> None:
        with self._lock:
            if self.outcome is None and self._error is None:
                try:
                    self.outcome = self.session.submit(action)
                except BaseException as error:
                    self._error = error

    # --- actions of the agent ------------------------------------------------------------------------------------

    def click(self, view: View, name: str) -> Outcome:
        index = view.find(name)
        if index is None or view.elements[index].disabled:
            return INVALID
        if not view.elements[index].sends:
            return _UNCHANGED
        self._run(_CLICK, index)
        return self._sent()

    def search(self, view: View, words: str) -> Outcome:
        index = view.find_field("search_query")
        if index is None or not words.strip():
            return INVALID
        self._run(_FILL, index, words)
        self._run(_SEND, index)
        return self._sent()

    def type(self, view: View, field: str, words: str) -> Outcome:
        index = view.find_field(field)
        if index is None:
            return INVALID
        self._run(_FILL, index, words)
        return _UNCHANGED if view.elements[index].value == words else Outcome()

    def scroll(self, view: View, direction: str) -> Outcome:
        if direction not in ("up", "down"):
            return INVALID
        step = round(_SCROLL * view.height) * (1 if direction == "down" else -1)
        position = min(max(view.scroll + step, 0), max(view.page - view.height, 0))
        self._run(_SCROLL_TO, position)
        return Outcome() if position != view.scroll else _UNCHANGED

    def back(self, view: View) -> Outcome:
        """Click the page's own button for going back."""
        name = next((name for name in ("< prev", "back to search") if view.find(name) is not None), None)
        return INVALID if name is None else self.click(view, name)

    def _run(self, script: str, *arguments: object) -> None:
        self.browser.driver.execute_script(script, *arguments)

    def _sent(self) -> Outcome:
        """Wait until the form was executed and the next page has loaded. Raises TimeoutException."""
        limit = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < limit:
            if self._error is not None:
                raise self._error
            if self.outcome is not None and self.browser.driver.execute_script(_LOADED):
                return self.outcome
            time.sleep(0.01)
        raise TimeoutException("the page did not send its form, or the next one did not load")
