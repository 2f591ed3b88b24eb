"""An environment with its limits: turns in, transitions out. It does not depend on sessions or the wire."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from starpod.env_server.authoring.environment import UNKNOWN_NAME as UNKNOWN_NAME
from starpod.env_server.authoring.environment import (
    BadResult,
    Busy,
    Concurrency,
    Environment,
    EnvironmentOptions,
    Limits,
    MachineLost,
    OptionsError,
    Outcome,
    Unavailable,
    derive_seed,
    digest_observation,
)
from starpod.env_server.episodes.effects import EffectFailed, Journal, UselessReply
from starpod.env_server.episodes.results import TurnDetails, expect_number, expect_outcome, expect_text, merge
from starpod.env_server.episodes.state import StateError, decode, encode
from starpod.v1.values import MAX_REWARD, EndReason, Image, Part
from starpod.v1.values import Want as Want


class Extras(NamedTuple):
    """Fields of an observation that the caller may request, and `agent_id`, which is set if several agents play."""

    valid_actions: Sequence[Any] | None = None
    expert_action: Any | None = None
    score: float | None = None
    agent_id: str = ""


Pictures = dict[bytes, bytes]
"""PNG images keyed by state key plus observation digest. Members of a group with equal states share one image."""


class ObservedState(NamedTuple):
    """Observation of the agent. `parts` is a plain str in the common case of one text."""

    parts: str | Sequence[Part]
    state_key: bytes = b""
    extras: Extras | None = None


class TurnResult(NamedTuple):
    """The result of one turn, with the observation's fields inlined.

    It is a tuple, with rare fields in `extras` and `details`, because one is created per step.
    """

    parts: str | Sequence[Part]
    state_key: bytes
    """State key of the observation; empty if not wanted."""
    extras: Extras | None
    reward: float
    """Sum of the sub-actions' rewards."""
    outcomes: list[Outcome | None]
    """One outcome per sub-action. None marks a sub-action that was not tried, because the episode was over or a limit
    was reached."""
    end_reason: EndReason = EndReason.NONE
    """Why the episode ended; NONE if it continues."""
    success: bool | None = None
    """Whether the episode succeeded; None if it continues or success is unknown."""
    details: TurnDetails | None = None

    @property
    def is_immutable(self) -> bool:
        """Whether the transition is immutable: it contains only a text, numbers and flags."""
        return type(self.parts) is str and self.extras is None and self.details is None

    @property
    def observation(self) -> ObservedState:
        return ObservedState(self.parts, self.state_key, self.extras)

    @property
    def terminated(self) -> bool:
        return self.end_reason == EndReason.TERMINAL

    @property
    def truncated(self) -> bool:
        return self.end_reason > EndReason.TERMINAL


class EpisodeEnded(Exception):
    """The episode is over: reset first."""


class TooLate(RuntimeError):
    """The environment raised Busy or Unavailable after changing its state. This is a bug unless the turn is undone."""

    def __init__(self, error: Busy | Unavailable) -> None:
        super().__init__(
            f"raised {type(error).__name__} ({error}) after the turn had changed the state; raise it before any "
            "change, or set slow_render in the spec, which undoes turns (in class inline only those with an image)"
        )
        self.error = error


_UNLIMITED = 2**62
_NONE = EndReason.NONE  # looking up an enum's member is slower than all other work that ends a turn
_new_tuple = tuple.__new__


class LiveEpisode:
    """An episode of an environment instance, with its limits.

    Every method leaves the episode unchanged if its arguments are wrong. An exception from the environment's code may
    leave it in any state, and the session is then lost.
    """

    __slots__ = ("actions", "end_reason", "environment", "limits", "names", "seed", "several", "turns")

    def __init__(self, environment: Environment, limits: Limits) -> None:
        self.environment = environment
        self.limits = limits
        self.names = environment.spec.action_set
        self.several = type(environment).agent_id is not Environment.agent_id
        self.seed = 0
        self.turns = 0
        self.actions = 0
        self.end_reason = EndReason.NONE

    def reset(self, seed: int, dynamics_seed: int) -> None:
        """Start an episode. `seed` fixes the initial state, `dynamics_seed` the random transitions (64 bits each)."""
        environment = self.environment
        # Set these first, so that attributes have the same order as in a copy and equal states give equal bytes.
        self.seed = environment.seed = seed
        environment._dynamics = None
        environment.dynamics_seed = dynamics_seed
        self.turns = self.actions = 0
        self.end_reason = EndReason.NONE
        environment.reset(random.Random(derive_seed(seed, "start")))

    def turn(self, actions: Sequence[Any], want: Want) -> TurnResult:
        """Execute the sub-actions in order, until one ends the episode or a limit is reached.

        Raises:
            EpisodeEnded: the episode has ended.
            Busy: the environment raised it before anything changed.
            Unavailable: the environment raised it before anything changed.
        """
        if self.end_reason:
            raise EpisodeEnded
        environment, limits, names = self.environment, self.limits, self.names
        step = environment.step
        action_count = before = self.actions
        max_count = action_count + (limits.max_actions_per_turn or _UNLIMITED)
        if limits.max_actions and limits.max_actions < max_count:
            max_count = limits.max_actions
        turns = self.turns
        reward = 0.0
        outcomes: list[Outcome | None] = []
        success: bool | None = None
        end = _NONE
        details: TurnDetails | None = None
        try:
            for action in actions:
                if action_count >= max_count or end:
                    outcomes.append(None)
                    continue
                if names and (type(action) is not str or action not in names):
                    action = self._spell(action)
                    if action is None:
                        outcomes.append(UNKNOWN_NAME)
                        continue
                outcome = step(action)
                outcomes.append(outcome)
                action_count += 1
                action_reward, terminated, truncated, success, _, _, reward_parts, criteria, info = outcome
                if not -MAX_REWARD <= action_reward <= MAX_REWARD:
                    expect_number("step", "a reward of", action_reward, MAX_REWARD)
                reward += action_reward
                if info is not None or reward_parts is not None or criteria is not None:
                    if outcome is UNKNOWN_NAME:  # checked only if there is info, so that other steps pay nothing
                        action_count -= 1
                    else:
                        details = merge(details, outcome)
                if terminated:
                    end = EndReason.TERMINAL
                elif truncated:
                    end = EndReason.ENVIRONMENT_LIMIT
            if not -MAX_REWARD <= reward <= MAX_REWARD:
                expect_number("step", "rewards that add up to", reward, MAX_REWARD)
            self.turns = turns + 1
            self.actions = action_count
            if not end:
                if action_count >= limits.max_actions > 0:
                    end = EndReason.MAX_ACTIONS
                elif turns + 1 == limits.max_turns:
                    end = EndReason.MAX_TURNS
                if end and (last := environment.cut_short()) is not None:
                    reward, success = reward + last.reward, last.success
                    details = merge(details, last)
                    if outcomes and (played := outcomes[-1]):
                        outcomes[-1] = played._replace(reward=played.reward + last.reward)
            if end:
                self.end_reason = end
                if success is None and end is not EndReason.TERMINAL:
                    success = False
            else:
                success = None
            state_key = environment.state_key() if want.state_key else b""
            if want.text_only and not self.several:
                parts, extras = environment.observe(), None
            else:
                parts, extras = self._extras(want)
            # Half the cost of calling TurnResult, which matters once per step.
            return _new_tuple(TurnResult, (parts, state_key, extras, reward, outcomes, end, success, details))
        except (Busy, Unavailable) as error:
            if action_count == before and turns == self.turns:
                raise
            raise TooLate(error) from error
        except (OptionsError, StateError) as error:  # a call that fails in this way changes nothing, but this one has
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        except (TypeError, ValueError) as error:
            if outcomes:
                expect_outcome(outcomes[-1], error)
            raise

    def undoable_turn(self, actions: Sequence[Any], want: Want) -> TurnResult:
        """Execute a turn of an environment with `slow_render`. Busy or Unavailable leave the episode unchanged.

        The state is copied first. A copy takes little time compared with drawing or waiting. Turns of class `inline`
        without an image do neither, so they are not undone.
        """
        if not want.image and self.environment.spec.concurrency is Concurrency.INLINE:
            return self.turn(actions, want)
        before = self.fork(None)
        try:
            return self.turn(actions, want)
        except TooLate as error:
            self._go_back(before)
            raise error.error from None

    def recorded_turn(self, actions: Sequence[Any], want: Want, journal: Journal) -> TurnResult:
        """Execute a turn of an environment with `effects`. A call that fails leaves the episode unchanged.

        Args:
            journal: records the replies to external calls, and supplies those already recorded.
        """
        before = self.fork(None)
        try:
            with journal.recording(self.environment, self.turns):
                return self.turn(actions, want)
        except (EffectFailed, UselessReply):
            self._go_back(before)
            raise

    def observe(self, want: Want, pictures: Pictures | None = None) -> ObservedState:
        """Return the current observation with the wanted optional fields.

        `pictures` holds pictures of other members of the group. Matching ones are reused, and new ones are added.
        """
        environment = self.environment
        state_key = environment.state_key() if want.state_key else b""
        if want.text_only and not self.several:
            return ObservedState(environment.observe(), state_key)
        parts, extras = self._extras(want, pictures)
        return ObservedState(parts, state_key, extras)

    def render(self, mode: str) -> str | bytes:
        """Return one frame. Raises BadResult if it is not what the mode asks for."""
        picture = self.environment.render(mode)
        expected = bytes if mode == "png" else str
        if not isinstance(picture, expected):
            raise BadResult("render", f"{type(picture).__name__}, not {expected.__name__}")
        return picture if isinstance(picture, bytes) else expect_text("render", picture)

    def _go_back(self, before: LiveEpisode) -> None:
        self.environment, self.turns, self.actions = before.environment, before.turns, before.actions
        self.end_reason = before.end_reason

    def _spell(self, action: Any) -> str | None:
        """Return the action's name in the spec's spelling, ignoring case, or None if it is not an action."""
        if not isinstance(action, str):
            return None
        action = action.strip()
        if len(action) > self.environment.spec.longest_name:
            return None
        lower_case = action.lower()
        return next((name for name in self.environment.spec.actions if name.lower() == lower_case), None)

    def _extras(self, want: Want, pictures: Pictures | None = None) -> tuple[str | Sequence[Part], Extras]:
        environment, live = self.environment, not self.end_reason
        parts = environment.observe()
        if want.image:
            picture_key = environment.state_key() + digest_observation(parts) if pictures is not None else b""
            frame = pictures.get(picture_key) if pictures else None
            if frame is None:
                data = self.render("png")
                assert isinstance(data, bytes)
                frame = data
                if pictures is not None:
                    pictures[picture_key] = frame
            parts = [*([parts] if isinstance(parts, str) else parts), Image(frame)]
        return parts, Extras(
            environment.valid_actions() if want.valid_actions and live else None,
            environment.expert_action() if want.expert_action and live else None,
            expect_number("score", "", environment.score()) if want.score else None,
            environment.agent_id(),
        )

    def fork(self, dynamics_seed: int | None) -> LiveEpisode:
        """Return an independent copy. `dynamics_seed`, if not None, reseeds the random transitions of the copy."""
        environment = self.environment.copy()
        if dynamics_seed is not None:
            environment.dynamics_seed = dynamics_seed
            environment._dynamics = None
        episode = LiveEpisode(environment, self.limits)
        episode.seed, episode.turns, episode.actions = self.seed, self.turns, self.actions
        episode.end_reason = self.end_reason
        return episode

    def save(self) -> bytes:
        """Return the whole episode as bytes. Raises StateError if the environment's state cannot be encoded."""
        environment = self.environment
        return encode(
            {
                # Save only options that were given: validators may check model_fields_set, and refuse some options
                # beside others.
                "options": environment.options.model_dump(mode="json", exclude_unset=True),
                "limits": [self.limits.max_turns, self.limits.max_actions_per_turn, self.limits.max_actions],
                "seed": self.seed,
                "dynamics_seed": environment.dynamics_seed,
                "turns": self.turns,
                "actions": self.actions,
                "end_reason": int(self.end_reason),
                "state": environment.get_state(),
            }
        )

    @classmethod
    def load(cls, environment: type[Environment], data: bytes) -> LiveEpisode:
        """Return the episode that `save` wrote. Raises StateError if the bytes are not an episode of this class."""
        saved = SavedEpisode.read(environment, data)
        instance = environment()
        instance.options, instance.seed = saved.options, saved.seed
        try:
            instance.set_state(saved.state)
            if instance.options is not saved.options or any(_is_code(environment, name) for name in vars(instance)):
                raise ValueError("the state has invalid contents")
        except (Busy, MachineLost):  # not because of the bytes
            raise
        except BaseException as error:  # the environment's code runs on untrusted bytes here
            raise StateError(f"not a saved episode of {environment.spec.id}: {error!r}") from error
        episode = cls(instance, saved.limits)
        episode.seed, episode.turns, episode.actions = saved.seed, saved.turns, saved.actions
        episode.end_reason = saved.end_reason
        return episode


@dataclass(frozen=True, slots=True)
class SavedEpisode:
    """A validated saved episode. Reading it runs none of the environment's code except its options' validators."""

    options: EnvironmentOptions
    limits: Limits
    seed: int
    dynamics_seed: int
    turns: int
    actions: int
    end_reason: EndReason
    state: Any

    @classmethod
    def read(cls, environment: type[Environment], data: bytes) -> SavedEpisode:
        """Read a saved episode. Raises StateError if the bytes are not an episode of this environment."""
        fields = decode(data)
        try:
            max_turns, max_actions_per_turn, max_actions = (_whole(limit, 32) for limit in fields["limits"])
            return cls(
                environment.Options.model_validate(fields["options"]),
                Limits(max_turns, max_actions_per_turn, max_actions),
                _whole(fields["seed"], 64),
                _whole(fields["dynamics_seed"], 64),
                _whole(fields["turns"], 31),
                _whole(fields["actions"], 31),
                EndReason(fields["end_reason"]),
                fields["state"],
            )
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise StateError(f"not a saved episode of {environment.spec.id}: {error!r}") from error


def _whole(value: Any, bits: int) -> int:
    if type(value) is not int or not 0 <= value < 2**bits:
        raise ValueError(f"not a whole number of {bits} bits")
    return value


def _is_code(environment: type[Environment], name: str) -> bool:
    """Return whether an instance attribute of this name would hide a method or the description of its class."""
    return name in ("spec", "Options") or callable(getattr(environment, name, None))
