"""Reference policies: agents without a model that serve as baselines for learning curves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from starpod.client import Observation, Session, Want
from starpod.trainer.agents.base import Agent, Agents, Move, Stop, Task
from starpod.trainer.agents.config import REFERENCE_NAMES
from starpod.trainer.data.episode import Episode

Choose = Callable[[Observation, Sequence[str], random.Random], str | None]
"""Function that returns an action for an observation and the environment's action names; None if it knows none."""


def choose_randomly(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Choose one of the valid actions if the environment lists them, otherwise one of its action names."""
    choices = [action for action in observation.valid_actions or actions if isinstance(action, str)]
    return rng.choice(choices) if choices else None


def choose_expertly(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Choose the action of the environment's expert."""
    return observation.expert_action if isinstance(observation.expert_action, str) else None


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


def choose_walk(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Go straight to the goal of a frozen lake, without regard to holes. Needs the observation `local`."""
    towards, _ = _directions(observation)
    return rng.choice(towards)


def choose_carefully(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Go to the goal of a frozen lake around adjacent holes and walls. Needs the observation `local`."""
    towards, around = _directions(observation)
    safe = [action for action, tile in around.items() if tile not in ("O", "#")]
    return rng.choice([action for action in towards if action in safe] or safe or towards)


def choose_by_rule(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Search for the instruction in webshop and buy the first product without options (its authors' baseline)."""
    listed = [action for action in observation.valid_actions or () if isinstance(action, str)]
    searches = [action for action in listed if action.startswith("search[")]
    clicks = [action for action in listed if action.startswith("click[")]
    if len(searches) + len(clicks) != len(listed) or not listed:
        raise ValueError("the reference policy `rule` plays webshop, whose valid actions are searches and clicks")
    if "click[buy now]" in clicks:
        return "click[buy now]"
    products = [click for click in clicks if click not in ("click[back to search]", "click[< prev]", "click[next >]")]
    return next(iter([*searches, *products]), "click[back to search]")


REFERENCES: dict[str, tuple[Choose, Want]] = dict(
    zip(
        REFERENCE_NAMES,
        (
            (choose_randomly, Want(valid_actions=True)),
            (choose_walk, Want()),
            (choose_carefully, Want()),
            (choose_by_rule, Want(valid_actions=True)),
            (choose_expertly, Want(expert_action=True)),
        ),
        strict=True,
    )
)
"""Function and required observations of each reference policy, by name."""


class ReferenceAgents(Agents):
    """Agents of one of `REFERENCES`. The same seeds give the same episodes."""

    at_once = 512

    def __init__(self, name: str) -> None:
        self.name = name
        self._choose, self.want = REFERENCES[name]

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        member = f"/{session.member}" if session.member else ""
        return ReferenceAgent(self._choose, task.actions, random.Random(f"{self.name}/{session.seed}{member}"))


class ReferenceAgent(Agent):
    """Agent that chooses one action per turn from the current observation."""

    def __init__(self, choose: Choose, actions: Sequence[str], rng: random.Random) -> None:
        self._choose = choose
        self._actions = actions
        self._rng = rng

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        action = self._choose(observation, self._actions, self._rng)
        return Stop() if action is None else Move(action, [action])
