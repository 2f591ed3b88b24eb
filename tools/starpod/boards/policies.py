"""Reference policies for frozen_lake and webshop, registered in the entry-point group `starpod.references`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from starpod.client import Observation


def _directions(observation: Observation) -> tuple[list[str], dict[str, str]]:
    """Parse a frozen lake's `local` observation: the directions towards the goal, and the tile in each direction."""
    words = observation.text.split()
    if len(words) != 12:
        raise ValueError(
            "the reference policies `walk` and `careful` read the local observation of frozen_lake, "
            f"not {observation.text!r}"
        )
    return [word for word in words[6:8] if word != "-"], dict(
        zip(("Left", "Down", "Right", "Up"), words[8:], strict=True)
    )


def walk(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Go straight to the goal of a frozen lake, without regard to holes.

    Args:
        observation: must have the format `local`; others raise ValueError.
    """
    directions, _ = _directions(observation)
    return rng.choice(directions)


def careful(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Go to the goal of a frozen lake, avoiding adjacent holes and walls.

    Args:
        observation: must have the format `local`; others raise ValueError.
    """
    directions, neighbours = _directions(observation)
    safe_actions = [action for action, tile in neighbours.items() if tile not in ("O", "#")]
    return rng.choice([action for action in directions if action in safe_actions] or safe_actions or directions)


def rule(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Play webshop like its authors' baseline: search for the instruction, buy the first result, choose no options.

    Args:
        observation: must list webshop's valid actions; others raise ValueError.
    """
    valid_actions = [action for action in observation.valid_actions or () if isinstance(action, str)]
    searches = [action for action in valid_actions if action.startswith("search[")]
    clicks = [action for action in valid_actions if action.startswith("click[")]
    if len(searches) + len(clicks) != len(valid_actions) or not valid_actions:
        raise ValueError("the reference policy `rule` plays webshop, whose valid actions are searches and clicks")
    if "click[buy now]" in clicks:
        return "click[buy now]"
    products = [click for click in clicks if click not in ("click[back to search]", "click[< prev]", "click[next >]")]
    return next(iter([*searches, *products]), "click[back to search]")
