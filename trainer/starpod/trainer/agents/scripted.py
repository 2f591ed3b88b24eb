"""Reference policies: agents without a model that serve as baselines for learning curves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import entry_points

from starpod.client import Action, Observation, Session, Want
from starpod.trainer.agents.base import Agent, Agents, Move, Stop, Task
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.user_file import UserFunction
from starpod.trainer.data.episode import Episode
from starpod.trainer.prompts.grammar import SEPARATOR
from starpod.v1.spelling import nearest
from starpod.v1.values import action_text

Choose = Callable[[Observation, Sequence[str], random.Random], str | None]
"""Function that returns an action for an observation and the environment's action names; None if it knows no action."""


def choose_randomly(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Return one of the valid actions if they are listed, else one of the action names; None if there is none."""
    choices = [action for action in observation.valid_actions or actions if isinstance(action, str)]
    return rng.choice(choices) if choices else None


def choose_expertly(observation: Observation, actions: Sequence[str], rng: random.Random) -> str | None:
    """Return the action of the environment's expert; None if it knows none."""
    return observation.expert_action if isinstance(observation.expert_action, str) else None


GROUP = "starpod.references"
"""Entry-point group of reference policies that know an environment. Each is a function of the type `Choose`."""
REFERENCES: dict[str, tuple[Choose, Want]] = {
    "random": (choose_randomly, Want(valid_actions=True)),
    "expert": (choose_expertly, Want(expert_action=True)),
}
"""Reference policies that can play any environment, by name: function and required parts of observations."""


def reference_names() -> list[str]:
    """Return the names of all reference policies."""
    return [*REFERENCES, *sorted(entry.name for entry in entry_points(group=GROUP))]


def find_reference(name: str) -> tuple[Choose, Want]:
    """Return the function and the required observations of a reference policy. Raises ConfigError if it is unknown."""
    if name in REFERENCES:
        return REFERENCES[name]
    for entry in entry_points(group=GROUP, name=name):
        return partial(UserFunction(f"reference policy {name}", entry.load()), ""), Want(valid_actions=True)
    raise ConfigError(
        f"no reference policy {name!r}{nearest(name, reference_names())} (packages register theirs in the entry-point "
        f"group {GROUP})"
    )


class ReferenceAgents(Agents):
    """Agents of a reference policy. The same seeds give the same episodes."""

    at_once = 512

    def __init__(self, name: str) -> None:
        self.name = name
        self._choose, self.want = find_reference(name)

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


class GivenTurn(Agent):
    """Agent that plays one turn that was chosen elsewhere: by a person at a page, or in a record."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self._actions = actions

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        return Move(f" {SEPARATOR} ".join(map(action_text, self._actions)), self._actions)
