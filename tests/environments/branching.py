"""Environments in which it is known what a search must find."""

import random

from starpod.env_server import Environment, EnvironmentSpec, Limits, Outcome

SCORES = {"": 0.0, "a": 0.6, "b": 0.5, "aa": 0.1, "ab": 0.2, "ba": 0.9, "bb": 0.4}


class Tree(Environment):
    """Two actions, three turns; a state is worth what SCORES says of its first two, or nothing if the third was `b`."""

    spec = EnvironmentSpec(
        id="tree-v1", version="1.0.0", title="A tree", actions=("a", "b"), limits=Limits(max_turns=3)
    )

    def reset(self, rng: random.Random) -> None:
        self.path = ""

    def step(self, action: str) -> Outcome:
        self.path += action
        return Outcome(reward=0.0, terminated=len(self.path) == 3)

    def render(self, mode: str = "text") -> str:
        return f"at {self.path}"

    def score(self) -> float:
        return 0.0 if self.path[2:] == "b" else SCORES[self.path[:2]]


class Coin(Environment):
    """Each turn a coin falls; who called it is paid."""

    spec = EnvironmentSpec(
        id="coin-v1", version="1.0.0", title="A coin", actions=("a", "b"), limits=Limits(max_turns=4)
    )

    def reset(self, rng: random.Random) -> None:
        self.fallen = ""

    def step(self, action: str) -> Outcome:
        self.fallen += self.dynamics.choice("ab")
        return Outcome(reward=float(action == self.fallen[-1]))

    def render(self, mode: str = "text") -> str:
        return f"fell {self.fallen}"

    def score(self) -> float:
        return 0.0


class Chain(Environment):
    """An environment of six turns, solved by six times `a`. After `b` it cannot be solved any more, but continues."""

    spec = EnvironmentSpec(
        id="chain-v1", version="1.0.0", title="A chain", actions=("a", "b"), limits=Limits(max_turns=6)
    )

    def reset(self, rng: random.Random) -> None:
        self.path = ""

    def step(self, action: str) -> Outcome:
        self.path += action
        if len(self.path) < 6:
            return Outcome(reward=0.0)
        won = self.path == "a" * 6
        return Outcome(reward=float(won), terminated=True, success=won)

    def render(self, mode: str = "text") -> str:
        return f"at {self.path}"

    def score(self) -> float:
        return 0.0 if "b" in self.path else len(self.path) / 6
