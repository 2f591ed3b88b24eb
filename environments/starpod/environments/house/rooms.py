"""Furniture, things and tasks of a house at the start of an episode."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

CLOSED = frozenset({"cabinet", "drawer", "fridge", "microwave"})
"""Furniture with a door, which is closed at the start."""

TOOLS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
"""Furniture in which a thing is cleaned, heated or cooled."""

_ALWAYS = ("fridge", "microwave", "sinkbasin", "desk")
_FURNITURE = ("cabinet", "countertop", "drawer", "shelf", "sidetable", "diningtable", "garbagecan", "armchair")
_ABILITIES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("apple", "tomato", "potato"), ("clean", "heat", "cool")),
    **dict.fromkeys(("bread", "egg"), ("heat", "cool")),
    "lettuce": ("clean", "cool"),
    **dict.fromkeys(("mug", "plate", "bowl"), ("clean", "heat", "cool")),
    **dict.fromkeys(("fork", "knife", "spoon", "ladle"), ("clean",)),
    **dict.fromkeys(("book", "pen", "newspaper", "keychain", "watch", "vase"), ("look",)),
}
"""Kinds of tasks that each kind of thing allows, besides placing it."""
THINGS = tuple(_ABILITIES)

TASKS = ("place", "place_two", "clean", "heat", "cool", "look")

_PLACES = {
    "look": ("armchair", "shelf", "sidetable", "desk", "drawer", "diningtable"),
    "kitchen": ("cabinet", "countertop", "drawer", "shelf", "sidetable", "diningtable", "garbagecan", "fridge"),
}


_PLURALS = {
    "potato": "potatoes",
    "tomato": "tomatoes",
    "knife": "knives",
    "watch": "watches",
    "bread": "loaves of bread",
    "lettuce": "heads of lettuce",
}


def _a(name: str) -> str:
    return f"an {name}" if name[:1] in "aeiou" else f"a {name}"


class HouseTask(NamedTuple):
    """A household task, such as ("clean", "mug", "shelf")."""

    kind: str
    """One of TASKS."""
    thing: str
    target: str
    """Kind of furniture; "" for `look`."""

    @property
    def change(self) -> str:
        """The change that the task asks for: clean, heat or cool, or ""."""
        return self.kind if self.kind in TOOLS else ""

    def ask(self) -> str:
        """Return the task in words."""
        location = f"in or on {_a(self.target)}"
        match self.kind:
            case "place":
                return f"put {_a(self.thing)} {location}"
            case "place_two":
                return f"put two {_PLURALS.get(self.thing, self.thing + 's')} {location}"
            case "look":
                return f"look at {_a(self.thing)} under the desklamp"
        return f"put {_a(self.thing)} {location} after you {self.kind}ed it"


def possible_tasks(kind: str) -> list[HouseTask]:
    """Return all tasks of a kind, in a fixed order."""
    if kind == "look":
        return [HouseTask(kind, thing, "") for thing, abilities in _ABILITIES.items() if "look" in abilities]
    tasks = []
    for thing, abilities in _ABILITIES.items():
        if kind in ("place", "place_two") or kind in abilities:
            places = _PLACES["look" if "look" in abilities else "kitchen"]
            tasks += [HouseTask(kind, thing, place) for place in places if place != TOOLS.get(kind)]
    return tasks


class FurnishedHouse(NamedTuple):
    """A house at the start of an episode."""

    task: HouseTask
    places: tuple[str, ...]
    """Names of the furniture."""
    things: dict[str, str]
    """Place of each thing."""


def kind_of(name: str) -> str:
    """Return the name without its number: `apple` for `apple 2`."""
    return name.rpartition(" ")[0]


def draw_house(rng: random.Random, tasks: list[HouseTask], furniture: int, things: int) -> FurnishedHouse:
    """Draw a house in which one of the tasks can be done, but is not done at the start.

    Args:
        furniture: number of pieces of furniture besides fridge, microwave, sink, desk and target.
        things: number of things besides the task's things.
    """
    task = rng.choice(tasks)
    kinds = [*_ALWAYS, *rng.choices(_FURNITURE, k=furniture)]
    if task.target and task.target not in kinds:
        kinds.append(task.target)
    places = tuple(_numbered(sorted(kinds)))
    count = {"place_two": 2}.get(task.kind, 1)
    other_things = [thing for thing in THINGS if thing != task.thing]
    names = _numbered([task.thing] * (count + rng.randint(0, 1)) + sorted(rng.choices(other_things, k=things)))
    positions = {}
    for name in names:
        kind = kind_of(name)
        fitting = _PLACES["look" if "look" in _ABILITIES[kind] else "kitchen"]
        free_places = [
            place
            for place in places
            if kind_of(place) in fitting and (kind != task.thing or kind_of(place) != task.target)
        ]
        fallback = "sinkbasin" if task.target == "desk" else "desk"  # both are in every house
        positions[name] = rng.choice(free_places or [place for place in places if kind_of(place) == fallback])
    return FurnishedHouse(task, places, positions)


def _numbered(kinds: list[str]) -> list[str]:
    """Number equal kinds: `apple`, `apple`, `mug` become `apple 1`, `apple 2`, `mug 1`."""
    return [f"{kind} {number}" for kind, group in itertools.groupby(kinds) for number, _ in enumerate(group, 1)]
