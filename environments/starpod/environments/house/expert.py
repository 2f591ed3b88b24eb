"""Expert of the house: looks where it has not looked yet until it has seen what it needs, then does the task."""

from __future__ import annotations

from .rooms import CLOSED, TOOLS, kind_of
from .state import State


def next_action(state: State) -> str | None:
    """The next action; None once the task is done. It uses nothing that the player has not seen."""
    task = state.task
    if state.done():
        return None
    held = state.held
    if held and kind_of(held) != task.thing:
        return _at(state, state.at if state.is_open(state.at) else "", f"put {held} in {state.at}") or _put_away(state)
    if held:
        if task.kind == "look":
            return _at(state, "desk 1", "use desklamp 1")
        if task.change and held not in state.changed[task.change]:
            place = f"{TOOLS[task.change]} 1"
            return _at(state, place, f"{task.change} {held} with {place}", opened=False)
        target = next(place for place in state.places if kind_of(place) == task.target)
        return _at(state, target, f"put {held} in {target}")
    for thing, place in state.things.items():
        if kind_of(thing) == task.thing and place in state.seen and kind_of(place) != task.target:
            return _at(state, place, f"take {thing} from {place}")
    # What lies at the target and still has to be changed is taken again.
    for thing, place in state.things.items():
        if (
            kind_of(thing) == task.thing
            and place in state.seen
            and task.change
            and thing not in state.changed[task.change]
        ):
            return _at(state, place, f"take {thing} from {place}")
    unseen = next((place for place in state.places if place not in state.seen), None)
    return None if unseen is None else _at(state, unseen, "look")


def _at(state: State, place: str, action: str, opened: bool = True) -> str:
    """The action, or what comes first: going there and opening it. Empty for no place."""
    if not place:
        return ""
    if state.at != place:
        return f"go to {place}"
    if opened and kind_of(place) in CLOSED and place not in state.opened:
        return f"open {place}"
    return action


def _put_away(state: State) -> str:
    """Puts down what is in the hand where that needs no more than going there."""
    place = next(place for place in state.places if state.is_open(place))
    return _at(state, place, f"put {state.held} in {place}")
