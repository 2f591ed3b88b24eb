"""One session's environment with its limits: turns in, transitions out. Knows nothing of sessions or the wire."""

from __future__ import annotations

import copy
import enum
import functools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starpod.env_server.environment import Environment, Image, Limits, Outcome, Part
from starpod.env_server.seeding import derive_seed
from starpod.env_server.state import StateError, decode, encode


class EndReason(enum.IntEnum):
    """Why an episode is over; the numbers are the protocol's."""

    NONE = 0
    TERMINAL = 1
    MAX_TURNS = 2
    MAX_ACTIONS = 3
    ENVIRONMENT_LIMIT = 4


@dataclass(frozen=True, slots=True)
class Want:
    """What observations carry beyond their own parts."""

    valid_actions: bool = False
    state_key: bool = False
    expert_action: bool = False
    score: bool = False
    image: bool = False

    @property
    def columns(self) -> bool:
        """Whether an observation with just this can travel in TransitionColumns."""
        return not (self.valid_actions or self.expert_action or self.score or self.image)


@dataclass(slots=True)
class Observation:
    """What the agent sees. `parts` is a plain str for the common case of one text."""

    parts: str | Sequence[Part]
    state_key: bytes = b""
    valid_actions: Sequence[Any] | None = None
    expert_action: Any | None = None
    score: float | None = None


@dataclass(slots=True)
class Transition:
    """The result of one turn. `outcomes` has one entry per sub-action; None stands for one that was never tried
    because the episode was over or a limit met."""

    observation: Observation
    reward: float
    outcomes: list[Outcome | None]
    end_reason: EndReason = EndReason.NONE
    success: bool | None = None
    reward_parts: Mapping[str, float] | None = None
    criteria: Mapping[str, bool] | None = None
    info: Mapping[str, Any] | None = None

    @property
    def terminated(self) -> bool:
        return self.end_reason == EndReason.TERMINAL

    @property
    def truncated(self) -> bool:
        return self.end_reason > EndReason.TERMINAL


UNKNOWN_NAME = Outcome(valid=False, effective=False)
"""The outcome of a sub-action whose name the action space does not have: never handed to the environment."""


class EpisodeOver(Exception):
    """The episode is over: reset first."""


@functools.cache
def _names(environment: type[Environment]) -> dict[str, str] | None:
    """Lower-case action name -> the name as the spec writes it; None where the set of actions is not fixed."""
    return {name.lower(): name for name in environment.spec.actions} or None


class Episode:
    """An environment instance between two resets, with its limits.

    Every method leaves the episode as it was if the arguments are wrong. An exception out of the environment's own
    code may leave it in any state: the caller gives the session up.
    """

    __slots__ = ("actions", "end_reason", "environment", "limits", "names", "seed", "turns")

    def __init__(self, environment: Environment, limits: Limits) -> None:
        self.environment = environment
        self.limits = limits
        self.names = _names(type(environment))
        self.seed = 0
        self.turns = 0
        self.actions = 0
        self.end_reason = EndReason.NONE

    def reset(self, seed: int, dynamics_seed: int) -> None:
        """Starts an episode. `seed` fixes the initial state, `dynamics_seed` the random transitions (64-bit each)."""
        environment = self.environment
        environment._dynamics = None
        environment.dynamics_seed = dynamics_seed
        self.seed = seed
        self.turns = self.actions = 0
        self.end_reason = EndReason.NONE
        environment.reset(random.Random(derive_seed(seed, "start")))

    def turn(self, actions: Sequence[Any], want: Want) -> Transition:
        """Plays the sub-actions in order until one ends the episode or a limit is met.

        Raises EpisodeOver if the episode has ended.
        """
        if self.end_reason:
            raise EpisodeOver
        environment, limits, names = self.environment, self.limits, self.names
        budget = len(actions)
        if limits.max_actions_per_turn:
            budget = min(budget, limits.max_actions_per_turn)
        if limits.max_actions:
            budget = min(budget, limits.max_actions - self.actions)
        reward = 0.0
        outcomes: list[Outcome | None] = []
        success: bool | None = None
        end = EndReason.NONE
        parts = criteria = info = None
        for action in actions:
            if end or budget <= 0:
                outcomes.append(None)
                continue
            if names is not None:
                name = names.get(action) or names.get(action.strip().lower()) if isinstance(action, str) else None
                if name is None:
                    outcomes.append(UNKNOWN_NAME)
                    continue
                action = name
            outcome = environment.step(action)
            budget -= 1
            self.actions += 1
            outcomes.append(outcome)
            reward += outcome.reward
            success = outcome.success
            if outcome.reward_parts is not None:
                parts = dict(parts or {})
                for part, value in outcome.reward_parts.items():
                    parts[part] = parts.get(part, 0.0) + value
            if outcome.criteria is not None:
                criteria = {**(criteria or {}), **outcome.criteria}
            if outcome.info is not None:
                info = {**(info or {}), **outcome.info}
            if outcome.terminated:
                end = EndReason.TERMINAL
            elif outcome.truncated:
                end = EndReason.ENVIRONMENT_LIMIT
        if not math.isfinite(reward):
            raise ValueError(f"{type(environment).__name__}.step returned a reward that is not finite: {reward}")
        self.turns += 1
        if not end:
            if limits.max_actions and self.actions >= limits.max_actions:
                end = EndReason.MAX_ACTIONS
            elif limits.max_turns and self.turns >= limits.max_turns:
                end = EndReason.MAX_TURNS
        if end:
            self.end_reason = end
            if success is None and end is not EndReason.TERMINAL:
                success = False
        else:
            success = None
        return Transition(self.observe(want), reward, outcomes, end, success, parts, criteria, info)

    def observe(self, want: Want) -> Observation:
        """What the agent sees now, with what is wanted of valid actions, state key, expert action, score and image."""
        environment = self.environment
        observation = Observation(environment.observe(), environment.state_key() if want.state_key else b"")
        if not want.columns:
            if want.valid_actions and not self.end_reason:
                observation.valid_actions = environment.valid_actions()
            if want.expert_action and not self.end_reason:
                observation.expert_action = environment.expert_action()
            if want.score:
                observation.score = environment.score()
            if want.image:
                frame = environment.render("png")
                assert isinstance(frame, bytes)
                parts = observation.parts
                observation.parts = [*([parts] if isinstance(parts, str) else parts), Image(frame)]
        return observation

    def fork(self, dynamics_seed: int | None) -> Episode:
        """An independent copy; with `dynamics_seed` it gets a new stream of transitions, else a copy of the present one."""
        environment = self.environment
        twin = type(environment)()
        twin.options = environment.options
        twin.set_state(copy.deepcopy(environment.get_state()))
        if dynamics_seed is not None:
            twin.dynamics_seed = dynamics_seed
            twin._dynamics = None
        episode = Episode(twin, self.limits)
        episode.seed, episode.turns, episode.actions = self.seed, self.turns, self.actions
        episode.end_reason = self.end_reason
        return episode

    def save(self) -> bytes:
        """The whole episode as bytes. Raises StateError if the environment's state cannot be encoded."""
        environment = self.environment
        return encode(
            {
                "options": environment.options.model_dump(mode="json"),
                "limits": [self.limits.max_turns, self.limits.max_actions_per_turn, self.limits.max_actions],
                "seed": self.seed,
                "turns": self.turns,
                "actions": self.actions,
                "end_reason": int(self.end_reason),
                "state": environment.get_state(),
            }
        )

    @classmethod
    def load(cls, environment: type[Environment], data: bytes) -> Episode:
        """The episode that `save` wrote. Raises StateError if the bytes are not one of this environment."""
        saved = decode(data)
        try:
            instance = environment()
            instance.options = environment.Options.model_validate(saved["options"])
            instance.set_state(saved["state"])
            episode = cls(instance, Limits(*saved["limits"]))
            episode.seed, episode.turns, episode.actions = saved["seed"], saved["turns"], saved["actions"]
            episode.end_reason = EndReason(saved["end_reason"])
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise StateError(f"not a saved episode of {environment.spec.id}: {error!r}") from error
        return episode
