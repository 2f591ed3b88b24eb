"""Reference policies: agents without a model, for comparison with learning curves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from starpod.client import Observation, Session, Want
from starpod.trainer.agents.base import Agent, Agents, Move, Stop, Task
from starpod.trainer.agents.config import REFERENCE_NAMES
from starpod.trainer.data.episode import Episode

Choose = Callable[[Observation, Sequence[str], random.Random], str | None]
"""An action for an observation, given the environment's action names; None where the policy has none."""


def choose_randomly(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Any of the actions that are valid now, where the environment lists them, else any of its names."""
    choices = [action for action in observation.valid_actions or actions if isinstance(action, str)]
    return rng.choice(choices) if choices else None


def choose_expertly(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """The action of the environment's own expert."""
    return observation.expert_action if isinstance(observation.expert_action, str) else None


def _directions(observation: Observation) -> tuple[list[str], dict[str, str]]:
    """Of a frozen lake's `local` observation: the ways to the goal, and what lies in each direction."""
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
    """Straight to the goal, blind to holes. Frozen lake, observation `local`."""
    towards, _ = _directions(observation)
    return rng.choice(towards)


def choose_carefully(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """To the goal, but never into a hole beside it; sideways where both ways are holes. Likewise."""
    towards, around = _directions(observation)
    safe = [action for action, tile in around.items() if tile not in ("O", "#")]
    return rng.choice([action for action in towards if action in safe] or safe or towards)


def choose_by_rule(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """In a shop, the baseline of its authors: search for the instruction, buy the first product as it is."""
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
"""By name: how it chooses, and what it asks of the environment."""


class ReferenceAgents(Agents):
    """One of `REFERENCES`, an action a turn. The same seeds give the same episodes."""

    at_once = 512

    def __init__(self, name: str) -> None:
        self.name = name
        self._choose, self.want = REFERENCES[name]

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        member = f"/{session.member}" if session.member else ""
        return ReferenceAgent(self._choose, task.actions, random.Random(f"{self.name}/{session.seed}{member}"))


class ReferenceAgent(Agent):
    """Chooses one action a turn from the observation alone."""

    def __init__(self, choose: Choose, actions: Sequence[str], rng: random.Random) -> None:
        self._choose = choose
        self._actions = actions
        self._rng = rng

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        action = self._choose(observation, self._actions, self._rng)
        return Stop() if action is None else Move(action, [action])
