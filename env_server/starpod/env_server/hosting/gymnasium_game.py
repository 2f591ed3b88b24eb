"""A live Gymnasium environment, with conversion of its actions and observations."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Text
from gymnasium.utils import seeding
from PIL import Image as Pillow

from starpod.env_server.authoring.drawing import encode_png
from starpod.env_server.authoring.environment import INVALID, Outcome
from starpod.env_server.hosting.hosted import HostedGame, in_words, needs_dynamics_seed
from starpod.env_server.hosting.request import HostingRequest
from starpod.env_server.hosting.spaces import (
    Reader,
    UnsupportedSpace,
    Writer,
    is_picture,
    plain_colours,
    plain_info,
    words,
    writer,
)
from starpod.v1.untrusted import read_untrusted_json
from starpod.v1.values import JSON, Action, Image, Part


@dataclass(frozen=True, slots=True)
class SpaceConversion:
    """Conversion of an environment's actions and observations."""

    action_space: gymnasium.Space[Any]
    observation_space: gymnasium.Space[Any]
    names: tuple[str, ...]
    """Names of the actions, if there are at most 256."""
    by_name: Mapping[str, Any]
    """Elements of the action space, keyed by the action's name."""
    read: Reader
    write: Writer
    observation: str
    """Form of observations: text, json, or ansi (the environment's own drawing)."""
    info: bool
    """Whether transitions include the environment's info."""
    success_at: float | None


@dataclass(frozen=True, slots=True)
class GymnasiumFactory:
    """Factory of games with the operator's arguments. `drawn` holds the constructor's render_mode, if any."""

    request: HostingRequest
    gym_spec: EnvSpec
    drawn: Mapping[str, str]
    plan: SpaceConversion

    def begin(self, options: Mapping[str, Any], seed: int, dynamics_seed: int) -> GymnasiumGame:
        """Start a new game. Raises HostingError or UnsupportedSpace.

        Args:
            options: the caller's constructor arguments, which replace the operator's.
            seed, dynamics_seed: seeds of the start and of the random transitions, 64 bits each.
        """
        arguments = {**self.request.arguments, **options, **self.drawn}
        return GymnasiumGame(make(self.request, self.gym_spec, arguments), self.plan, seed, dynamics_seed)


def make(request: HostingRequest, gym_spec: EnvSpec, arguments: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Return the environment as gymnasium.make creates it, with its time limit. Raises HostingError."""
    try:
        return gymnasium.make(gym_spec, disable_env_checker=True, **arguments)
    except gymnasium.error.Error as error:
        raise request.fail(error) from error
    except Exception as error:
        raise request.fail(f"its constructor raised {type(error).__name__}: {error}") from error


class GymnasiumGame(HostedGame):
    """A live environment and its latest observation, which is converted when it is read."""

    def __init__(
        self, environment: gymnasium.Env[Any, Any], plan: SpaceConversion, seed: int, dynamics_seed: int
    ) -> None:
        super().__init__(plan.success_at)
        self.plan = plan
        self.environment = environment
        self.seen, self.info = environment.reset(seed=seed)
        if environment.action_space != plan.action_space:
            raise UnsupportedSpace(f"with these options the action space is {environment.action_space}")
        self.write = plan.write
        if environment.observation_space != plan.observation_space:
            self.write = writer(environment.observation_space)
        self._written: tuple[Any, list[Image]] | None = None
        if needs_dynamics_seed(seed, dynamics_seed):
            self.reseed(dynamics_seed)

    def reseed(self, seed: int) -> None:
        self.environment.unwrapped.np_random = seeding.np_random(seed)[0]

    def play(self, action: Action) -> Outcome:
        plan = self.plan
        try:
            element = plan.by_name[str(action)] if plan.names else plan.read(self._parse(action))
        except (KeyError, ValueError):
            return INVALID
        self.seen, reward, terminated, truncated, self.info = self.environment.step(element)
        self._written = None
        return self.outcome(reward, bool(terminated), bool(truncated), plain_info(self.info) if plan.info else None)

    @property
    def written(self) -> tuple[Any, list[Image]]:
        """The observation as a JSON value, and its pictures."""
        if self._written is None:
            images: list[Image] = []
            self._written = self.write(self.seen, images), images
        return self._written

    @property
    def parts(self) -> list[Part]:
        """The observation as text or JSON, followed by its pictures."""
        value, images = self.written
        if is_picture(self.environment.observation_space):
            return [*images]
        return [JSON(value) if self.plan.observation == "json" else in_words(value), *images]

    @property
    def text(self) -> str:
        """A text for people: the environment's own drawing, or else the observation in words."""
        if self.plan.observation == "ansi":
            return plain_colours(str(self.environment.render()))
        space = self.environment.observation_space
        return words(space) if is_picture(space) else in_words(self.written[0])

    def observe(self) -> str | Sequence[Part]:
        if self.plan.observation == "ansi":
            return self.text
        parts = self.parts
        return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts

    def draw(self) -> bytes:
        """Return the environment's picture as PNG."""
        return encode_png(Pillow.fromarray(np.ascontiguousarray(self.environment.render())))

    def copy(self) -> GymnasiumGame:
        clone = copy.copy(self)
        clone.environment, clone.seen, clone.info = copy.deepcopy((self.environment, self.seen, self.info))
        return clone

    def close(self) -> None:
        self.environment.close()

    def _parse(self, action: Action) -> Any:
        """Return the JSON value of an action. Raises ValueError."""
        if isinstance(action, JSON):
            return action.value
        if not isinstance(action, str):
            raise ValueError("actions are text or JSON")
        if isinstance(self.plan.action_space, Text):
            return action
        return read_untrusted_json(action)
