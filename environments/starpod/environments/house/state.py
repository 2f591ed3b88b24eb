"""The state of a house, and the effects of actions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .rooms import CLOSED, TOOLS, HouseTask, kind_of

_NAME = r"([a-z]+ [0-9]{1,3})"
_PATTERNS = {
    "go": re.compile(rf"go to {_NAME}"),
    "open": re.compile(rf"open {_NAME}"),
    "close": re.compile(rf"close {_NAME}"),
    "take": re.compile(rf"take {_NAME} from {_NAME}"),
    "put": re.compile(rf"(?:put|move) {_NAME} (?:in/on|in|on|to) {_NAME}"),
    "change": re.compile(rf"(clean|heat|cool) {_NAME} with {_NAME}"),
    "use": re.compile(r"use desklamp 1"),
    "look": re.compile(r"look|inventory"),
}


class Nothing(Exception):
    """Raised if an action cannot be done here."""


@dataclass
class State:
    """The positions and states of all things and of the player."""

    task: HouseTask
    places: tuple[str, ...]
    things: dict[str, str]
    """Place of each thing; "" for the held thing."""
    at: str = ""
    """Place of the player; "" at the start."""
    held: str = ""
    lit: str = ""
    """The thing that was looked at under the lamp."""
    opened: set[str] = field(default_factory=set)
    """Furniture with an open door."""
    seen: set[str] = field(default_factory=set)
    """Places whose contents the player has seen."""
    changed: dict[str, set[str]] = field(default_factory=lambda: {change: set() for change in TOOLS})
    """Things that were cleaned, things that were heated, and things that were cooled."""

    def is_open(self, place: str) -> bool:
        """Return whether the contents of a place can be reached."""
        return bool(place) and (kind_of(place) not in CLOSED or place in self.opened)

    def inside(self, place: str) -> list[str]:
        """Return the things in or on a place."""
        return [thing for thing, location in self.things.items() if location == place]

    def act(self, action: str) -> str:
        """Execute an action and return its text. Raises Nothing if it cannot be done."""
        for name, pattern in _PATTERNS.items():
            if match := pattern.fullmatch(action):
                text: str = getattr(self, f"_{name}")(action, *match.groups())
                return text
        raise Nothing

    def _go(self, action: str, place: str) -> str:
        if place not in self.places or place == self.at:
            raise Nothing
        self.at = place
        return f"You are at the {place}. {self.view()}"

    def view(self) -> str:
        """Return the text for what the player sees at the current place."""
        if not self.at:
            return f"Around you are: {', '.join(self.places)}."
        if not self.is_open(self.at):
            return f"The {self.at} is closed."
        self.seen.add(self.at)
        things = self.inside(self.at)
        lamp = ["desklamp 1"] if self.at == "desk 1" else []
        contents = f"You see {', '.join([*things, *lamp])}." if things or lamp else "There is nothing."
        return f"It is open. {contents}" if kind_of(self.at) in CLOSED else contents

    def _open(self, action: str, place: str) -> str:
        if place != self.at or self.is_open(place):
            raise Nothing
        self.opened.add(place)
        return f"You open the {place}. {self.view()}"

    def _close(self, action: str, place: str) -> str:
        if place != self.at or place not in self.opened:
            raise Nothing
        self.opened.remove(place)
        return f"You close the {place}."

    def _take(self, action: str, thing: str, place: str) -> str:
        if self.held or place != self.at or not self.is_open(place) or self.things.get(thing) != place:
            raise Nothing
        self.things[thing], self.held = "", thing
        return f"You take the {thing} from the {place}."

    def _put(self, action: str, thing: str, place: str) -> str:
        if not self.held or self.held != thing or place != self.at or not self.is_open(place):
            raise Nothing
        self.things[thing], self.held = place, ""
        return f"You put the {thing} in or on the {place}."

    def _change(self, action: str, change: str, thing: str, place: str) -> str:
        if self.held != thing or place != self.at or kind_of(place) != TOOLS[change]:
            raise Nothing
        self.changed[change].add(thing)
        for opposite in ({"heat": "cool", "cool": "heat"}.get(change, ""),):
            self.changed.get(opposite, set()).discard(thing)
        return f"You {change} the {thing} with the {place}."

    def _use(self, action: str) -> str:
        if self.at != "desk 1" or self.held == self.lit != "":
            raise Nothing
        self.lit = self.held
        return f"The desklamp shines on the {self.held}." if self.held else "The desklamp shines."

    def _look(self, action: str) -> str:
        if action == "inventory":
            return f"You hold the {self.held}." if self.held else "Your hands are empty."
        return self.view()

    def choices(self) -> list[str]:
        """Return all actions that can be done now."""
        at, held = self.at, self.held
        actions = [f"go to {place}" for place in self.places if place != at]
        if kind_of(at) in CLOSED:
            actions.append(f"{'close' if at in self.opened else 'open'} {at}")
        if self.is_open(at):
            actions += [f"put {held} in {at}"] if held else [f"take {thing} from {at}" for thing in self.inside(at)]
        if held:
            actions += [f"{change} {held} with {at}" for change, tool in TOOLS.items() if tool == kind_of(at)]
        if at == "desk 1" and not self.held == self.lit != "":
            actions.append("use desklamp 1")
        return [*actions, "look", "inventory"]

    def stages(self) -> dict[str, bool]:
        """Return the checklist of the task, in order."""
        task = self.task
        candidates = [thing for thing in self.things if kind_of(thing) == task.thing]
        changed_things = [thing for thing in candidates if not task.change or thing in self.changed[task.change]]
        placed = [thing for thing in changed_things if task.target and kind_of(self.things[thing]) == task.target]
        is_taken = kind_of(self.held) == task.thing
        if task.kind == "look":
            is_lit = bool(self.lit) and kind_of(self.lit) == task.thing
            return {"taken": is_taken or is_lit, "lit": is_lit}
        if task.kind == "place_two":
            return {
                "first_taken": is_taken or bool(placed),
                "first_placed": bool(placed),
                "second_taken": (is_taken and bool(placed)) or len(placed) > 1,
                "second_placed": len(placed) > 1,
            }
        changed = {f"{task.change}ed": bool(changed_things)} if task.change else {}
        return {
            "taken": is_taken or bool(placed) or (bool(task.change) and bool(changed_things)),
            **changed,
            "placed": bool(placed),
        }

    def done(self) -> bool:
        """Return whether the task is done."""
        return all(self.stages().values())
