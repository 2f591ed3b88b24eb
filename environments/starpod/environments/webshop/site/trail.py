"""History of sessions as the site has seen them: the page at each step, and the actions taken through the site."""

from __future__ import annotations

import html
import re
from collections import OrderedDict, deque
from dataclasses import asdict, dataclass
from typing import Any

from .service import Page, Place

_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)
_SESSIONS = 1000
_STEPS = 100


@dataclass(slots=True)
class Seen:
    """A page that a session showed. `action`: what led there, where it was taken through the site."""

    epoch: int
    step: int
    title: str
    action: str = ""


class Trail:
    """The latest pages of the latest sessions, oldest first. Steps that happened between two looks are missing."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, deque[Seen]] = OrderedDict()
        self._actions: dict[str, tuple[Place, str]] = {}

    def act(self, session: str, place: Place, action: str) -> None:
        """An action that was taken at this place."""
        if session in self._sessions:
            self._actions[session] = (place, action)

    def see(self, session: str, page: Page) -> None:
        """A page as it was shown."""
        steps = self._sessions.setdefault(session, deque(maxlen=_STEPS))
        self._sessions.move_to_end(session)
        while len(self._sessions) > _SESSIONS:
            forgotten, _ = self._sessions.popitem(last=False)
            self._actions.pop(forgotten, None)
        place = page.place
        if self.last(session) == place:
            return
        found = _TITLE.search(page.html)
        title = html.unescape(found[1]).strip().removesuffix(" - WebShop") if found else "?"
        before, action = self._actions.get(session, (None, ""))
        led_here = before == Place(place.epoch, place.index - 1)
        steps.append(Seen(place.epoch, place.index, title, action if led_here else ""))

    def last(self, session: str) -> Place | None:
        """The place of the latest page that was seen."""
        steps = self._sessions.get(session)
        return Place(steps[-1].epoch, steps[-1].step) if steps else None

    def of(self, session: str) -> list[dict[str, Any]]:
        """The history of a session, oldest first, as plain values."""
        return [asdict(seen) for seen in self._sessions.get(session, ())]
