"""Expert for the house: it searches unseen places until it has seen what it needs, then does the task."""

from __future__ import annotations

from .rooms import CLOSED, TOOLS, kind_of
from .state import State


def next_action(state: State) -> str | None:
    """Return the next action, or None if the task is done. It only uses what the player has seen."""
    task = state.task
    if state.done():
        return None
    held = state.held
    if held and kind_of(held) != task.thing:
        return _approach(state, state.at if state.is_open(state.at) else "", f"put {held} in {state.at}") or _put_away(
            state
        )
    if held:
        if task.kind == "look":
            return _approach(state, "desk 1", "use desklamp 1")
        if task.change and held not in state.changed[task.change]:
            place = f"{TOOLS[task.change]} 1"
            return _approach(state, place, f"{task.change} {held} with {place}", opened=False)
        target = next(place for place in state.places if kind_of(place) == task.target)
        return _approach(state, target, f"put {held} in {target}")
    for thing, place in state.things.items():
        if kind_of(thing) == task.thing and place in state.seen and kind_of(place) != task.target:
            return _approach(state, place, f"take {thing} from {place}")
    # Take a thing from the target again if it still has to be cleaned, heated or cooled.
    for thing, place in state.things.items():
        if (
            kind_of(thing) == task.thing
            and place in state.seen
            and task.change
            and thing not in state.changed[task.change]
        ):
            return _approach(state, place, f"take {thing} from {place}")
    unseen_place = next((place for place in state.places if place not in state.seen), None)
    return None if unseen_place is None else _approach(state, unseen_place, "look")


def _approach(state: State, place: str, action: str, opened: bool = True) -> str:
    """Return the action, or the step that must come first: going to `place` or opening it. "" if `place` is ""."""
    if not place:
        return ""
    if state.at != place:
        return f"go to {place}"
    if opened and kind_of(place) in CLOSED and place not in state.opened:
        return f"open {place}"
    return action


def _put_away(state: State) -> str:
    """Put the held thing in the first open place."""
    place = next(place for place in state.places if state.is_open(place))
    return _approach(state, place, f"put {state.held} in {place}")
