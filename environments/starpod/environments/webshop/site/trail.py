"""Histories of sessions: the pages that the site showed, and the actions taken on the site."""

from __future__ import annotations

import html
import re
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass
from typing import Any

from .service import SessionPage, SessionTurn

_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)
_SESSIONS = 1000
_STEPS = 100


@dataclass(slots=True)
class Seen:
    """A page of a session."""

    epoch: int
    step: int
    title: str
    action: str = ""
    """Action that led to the page; "" if it was not taken on the site."""


class Trail:
    """The latest pages of the latest sessions, oldest first. Steps taken between two visits to the site are missing."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, deque[Seen]] = OrderedDict()
        self._actions: dict[str, tuple[SessionTurn, str]] = {}

    def act(self, session: str, place: SessionTurn, action: str) -> None:
        """Record an action that was taken at a step.

        Args:
            session: id of the session. One that the trail has forgotten is skipped.
        """
        if session in self._sessions:
            self._actions[session] = (place, action)

    def see(self, session: str, page: SessionPage) -> None:
        """Record a page that was shown."""
        steps = self._sessions.setdefault(session, deque(maxlen=_STEPS))
        self._sessions.move_to_end(session)
        while len(self._sessions) > _SESSIONS:
            oldest_session, _ = self._sessions.popitem(last=False)
            self._actions.pop(oldest_session, None)
        place = page.place
        if self.last(session) == place:
            return
        match = _TITLE.search(page.html)
        title = html.unescape(match[1]).strip().removesuffix(" - WebShop") if match else "?"
        previous_place, action = self._actions.get(session, (None, ""))
        was_last = previous_place == SessionTurn(place.epoch, place.index - 1)
        steps.append(Seen(place.epoch, place.index, title, action if was_last else ""))

    def last(self, session: str) -> SessionTurn | None:
        """Return the step of the latest page, or None."""
        steps = self._sessions.get(session)
        return SessionTurn(steps[-1].epoch, steps[-1].step) if steps else None

    def of(self, session: str) -> list[dict[str, Any]]:
        """Return the history of a session as plain values, oldest first."""
        return [asdict(step) for step in self._sessions.get(session, ())]
