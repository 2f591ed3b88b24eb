"""Base class of environments: an author writes one class with `spec`, `reset`, `step` and `render`.

    class Doors(Environment):
        spec = EnvironmentSpec(id="doors-v1", version="1.0.0", title="Two doors", actions=("left", "right"))

        def reset(self, rng):
            self.prize = rng.choice(self.spec.actions)

        def step(self, action):
            return Outcome(reward=float(action == self.prize), terminated=True, success=action == self.prize)

        def render(self, mode="text"):
            return "Behind one of two doors is a prize."

The server takes care of sessions, turns, limits, retries, forks, snapshots and the wire.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from starpod.v1.values import JSON, Image, Part


class Concurrency(enum.Enum):
    """Place where an environment's steps run."""

    INLINE = "inline"
    """Steps run in the event loop. Use this if steps take microseconds and never wait."""
    THREAD = "thread"
    """Steps run on a thread of the server's pool. Use this if steps wait or release the interpreter lock."""
    PROCESS = "process"
    """Each session has its own process. Use this for code that may crash, leak memory or hang, or is not trusted."""
    CONTAINER = "container"
    """Each session has its own container. The methods run on threads without a time limit, and the environment sets its
    own limits. `close` removes the container."""


class OptionsError(ValueError):
    """`reset` raises this if no start state fits the options. The message says how to fix the options.

    The caller gets an INVALID_ARGUMENT error, not an error of the environment.
    """


class Unavailable(Exception):
    """`prepare` raises this if a requirement is missing. `render` raises it if only the requested mode needs it.

    The message says what is missing and how to install it.
    """


class Busy(Exception):
    """A resource of the environment is in use or not ready, and the same call may succeed later.

    `reset`, `render` and `observe` may raise it. `step` may raise it as long as it has changed nothing. The caller
    gets RESOURCE_EXHAUSTED with the delay after which to retry. The episode does not fail and the session is unchanged.

    Attributes:
        message: which resource is busy.
        retry_after: seconds after which the caller retries.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class MachineLost(Exception):
    """A resource outside of this process that held the episode, such as its container, is gone.

    Any method may raise it. The session is lost, and the caller gets the message as the cause.
    """


class EnvironmentOptions(BaseModel):
    """Base class of an environment's options: a frozen pydantic model whose fields have defaults and descriptions.

    Unknown options are refused. Describe returns its JSON Schema. `model_config` is pydantic's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def changed(self, *names: str) -> list[str]:
        """Return the named options that differ from their defaults, to check options that exclude each other.

        Options are compared with their defaults, because a caller that records all options passes defaults explicitly.
        """
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one episode; 0 means no limit."""

    max_turns: int = 0
    """Maximum number of turns of an episode."""
    max_actions_per_turn: int = 0
    """Maximum number of sub-actions executed in one turn; further ones are dropped."""
    max_actions: int = 0
    """Maximum number of sub-actions of an episode."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that an action may call."""

    name: str
    """Name that a call uses."""
    description: str
    """What the tool does, for the agent."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Description of a tensor action."""

    dtype: str
    """Element type, for example float32."""
    shape: tuple[int, ...] = ()
    """Length of each dimension; -1 allows any length."""
    minimum: float | None = None
    """Smallest allowed element; None means no bound."""
    maximum: float | None = None
    """Largest allowed element; None means no bound."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Description of an environment. Describe returns it."""

    id: str
    """`name-vN`. N is increased if rewards, observations or rules change incompatibly."""
    version: str
    """Semantic version, MAJOR.MINOR.PATCH."""
    title: str
    """Human-readable name."""
    instructions: str = ""
    """Instructions for the agent."""
    actions: tuple[str, ...] = ()
    """Names of all actions, if the set is fixed. Matching ignores case; `step` receives the name as written here."""
    grammar: str = ""
    """Description of how to write an action, for people and prompts, if the actions have no fixed names."""
    tools: tuple[Tool, ...] = ()
    """Tools that an action may call."""
    tensor: TensorSpec | None = None
    """Description of tensor actions; None if actions are not tensors."""
    observation_modes: tuple[str, ...] = ()
    """Values of the option `observation`, if the environment has that option."""
    fully_observed: bool = False
    """True if each observation contains everything relevant, so that a policy needs no memory."""
    render_modes: tuple[str, ...] = ("text",)
    """Modes of `render`: text, html and png."""
    limits: Limits = Limits()
    """Default limits of an episode. A caller may override them."""
    concurrency: Concurrency = Concurrency.INLINE
    """Place where steps run."""
    deterministic: bool = True
    """True if version, seeds, options and actions determine every observation."""
    fork: bool = True
    """True if a live episode can be copied by `copy`."""
    snapshot: bool = True
    """True if a live episode can be serialised by `get_state`."""
    restores: str = ""
    """Other versions whose snapshots this version can restore, for example ">=1.1.0,<1.4.0"."""
    slow_reset: bool = False
    """True if `reset` must run on a thread although steps are inline, for example because it searches for a start."""
    slow_render: bool = False
    """True if drawing takes long or may raise Busy. `render` and turns that show an image then run on a thread, and a
    turn is undone if it raises Busy. Class `inline` does so only for turns that show an image."""
    step_timeout: float = 60.0
    """Seconds after which a step in a process counts as hung and its session as lost."""
    effects: bool = False
    """True if `reset` and `step` call `effect`. Steps then run on a thread."""
    action_set: frozenset[str] = field(init=False, repr=False)
    """The names in `actions`, computed once."""
    longest_name: int = field(init=False, repr=False)
    """Length of the longest action name, in characters."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "action_set", frozenset(self.actions))
        object.__setattr__(self, "longest_name", max(map(len, self.actions), default=0))


class Outcome(NamedTuple):
    """Result of one sub-action."""

    reward: float = 0.0
    """A finite number. The turn's reward is the sum over its sub-actions."""
    terminated: bool = False
    """True if the task itself ended."""
    truncated: bool = False
    """True if a limit of the environment ended the episode. Never True together with `terminated`."""
    success: bool | None = None
    """Whether the task is solved; None while that is undecided or if the environment cannot tell."""
    valid: bool = True
    """False if the action made no sense in this state. This is not an error, because a policy learns from it."""
    effective: bool = True
    """False if the action changed nothing."""
    reward_parts: Mapping[str, float] | None = None
    """Components of the reward by name."""
    criteria: Mapping[str, bool] | None = None
    """Checklist: whether each named criterion was met."""
    info: Mapping[str, Any] | None = None
    """Diagnostic data, as JSON values."""


INVALID = Outcome(valid=False, effective=False)
"""Outcome of an action that made no sense and changed nothing."""

UNKNOWN_NAME = Outcome(valid=False, effective=False, info={})
"""Outcome of an action name that does not exist. It is not executed and does not count towards any limit.

The server returns it for names that are not in the spec. An environment whose names change within an episode returns it
itself.
"""


class BadResult(TypeError):
    """A method of an environment returned a value that cannot be used. The server adds its class, file and line."""

    def __init__(self, method: str, problem: str) -> None:
        super().__init__(f"{method} returned {problem}")
        self.method, self.problem = method, problem

    @classmethod
    def unsendable(cls, method: str, value: Any, error: Exception) -> BadResult:
        """Return the error for a value that cannot be converted to a message."""
        return cls(method, f"{repr(value)[:80]}, which cannot be sent: {error}")


class Environment(ABC):
    """Base class of environments. One instance is one session; `reset` starts its next episode.

    The server reads and writes the instance's attributes to fork, snapshot and restore it. Attributes may be None,
    numbers, strings, bytes, NumPy arrays, `random.Random`, and lists, tuples, sets and dicts of these. An environment
    with other attributes overrides `get_state` and `set_state`. Attributes whose name starts with `_cached` are not
    part of the state, and a snapshot drops them.
    """

    spec: ClassVar[EnvironmentSpec]
    """Description of the environment."""
    Options: ClassVar[type[EnvironmentOptions]] = EnvironmentOptions
    """Class of the options."""

    options: Any
    """Options of the session, an instance of `Options`. The server sets them before it calls `reset`."""
    seed: int = 0
    """The caller's seed, for environments with numbered start states. Random starts use the `rng` of `reset`."""
    dynamics_seed: int = 0
    """Seed of `dynamics`."""
    _dynamics: random.Random | None = None
    _cached_ask: Callable[[Any, Callable[[], Any]], Any] | None = None

    # --- what an author writes -----------------------------------------------------------------------------------

    @abstractmethod
    def reset(self, rng: random.Random) -> None:
        """Start an episode: set the initial state from `self.options` and `rng`, whose seed is derived from `seed`."""

    @abstractmethod
    def step(self, action: Any) -> Outcome:
        """Execute one sub-action. For a bad action, return an Outcome with `valid=False` instead of raising."""

    @abstractmethod
    def render(self, mode: str = "text") -> str | bytes:
        """Draw the state without changing it: as a str for `text` and `html`, as bytes for `png`."""

    # --- what an author may write --------------------------------------------------------------------------------

    @classmethod  # noqa: B027 - most environments have nothing to load
    def prepare(cls) -> None:
        """Load data that all sessions share. Called once in each process that hosts the class, before any session.

        Raises:
            Unavailable: the class cannot be hosted here.
        """

    @classmethod
    def use_stores(cls, stores: Sequence[str]) -> bool:
        """Accept the data that `starpod serve --store` names.

        It is called before `prepare`, and only in the server's own process. To pass data to other processes, set it in
        `os.environ`, which they inherit.

        Returns:
            Whether the environment uses stores. The default is False.

        Raises:
            Unavailable: the environment cannot use one of the stores.
        """
        return False

    def observe(self) -> str | Sequence[Part]:
        """Return the observation after a reset or a turn. The default is the state drawn as text."""
        text = self.render("text")
        if not isinstance(text, str):
            raise BadResult("render", f"{type(text).__name__}, not str")
        return text

    def instructions(self) -> str:
        """Return the instructions for the agent. They may depend on `self.options`."""
        return self.spec.instructions

    def valid_actions(self) -> Sequence[Any] | None:
        """Return all actions that are valid in this state, or None if they cannot be listed."""
        return self.spec.actions or None

    def state_key(self) -> bytes:
        """Return a digest of the state without its history, at most 32 bytes. Equal states have equal keys anywhere.

        The default is a digest of the observation. Override it if two different states can have the same observation.
        """
        return digest_observation(self.observe())

    def expert_action(self) -> Any | None:
        """Return a good next action, or None if the expert knows none or the episode is over."""
        return None

    def score(self) -> float | None:
        """Return the progress of the episode from 0 to 1. Only a solved episode has 1."""
        return None

    def agent_id(self) -> str:
        """Return the name of the agent whose turn it is, or "" if there is only one agent.

        The caller plays all agents. A turn's reward belongs to the agent that acted.
        """
        return ""

    def get_state(self) -> dict[str, Any]:
        """Return the state as a dictionary of plain values."""
        return {
            name: value for name, value in self.__dict__.items() if name != "options" and not name.startswith("_cached")
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Set the state that `get_state` returned. `self.options` is set already."""
        self.__dict__.update(state)

    def copy(self) -> Self:
        """Return an independent copy, for a fork. The default makes a deep copy of the state."""
        clone = type(self)()
        clone.options, clone.seed = self.options, self.seed
        clone.set_state(copy.deepcopy(self.get_state()))
        return clone

    def cut_short(self) -> Outcome | None:
        """Return the last outcome of an episode that a limit on turns or actions ends, or None if there is none.

        It is called after the last turn's actions. Its reward and `success` count for that turn.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most have no such resources
        """Free resources outside of this process, because the session or its episode ends.

        It is called for class `container`, on a thread and possibly during another call. It may be called repeatedly.
        """

    # --- what the server provides --------------------------------------------------------------------------------

    @property
    def dynamics(self) -> random.Random:
        """Random state for transitions. It is seeded with `dynamics_seed` and is part of the state."""
        stream = self._dynamics
        if stream is None:
            stream = self._dynamics = random.Random(derive_seed(self.dynamics_seed, "dynamics"))
        return stream

    def effect(self, request: Any, perform: Callable[[], Any]) -> Any:
        """Call an external service, such as a judge, a simulated user or a search, and record its reply.

        `reset` and `step` may call it if the spec has `effects=True`. The call is made once: a retry, a replay or a
        fork that reaches the same call in the same episode gets the recorded reply.

        Args:
            request: JSON value with everything that the reply depends on, such as the model and the messages.
            perform: makes the call and returns a JSON value. It should raise ValueError if the reply makes no sense.

        Returns:
            The reply, new or recorded.

        Raises:
            RuntimeError: the call is outside `reset` and `step`, or the spec has no effects.
            Exception: whatever `perform` raises. Nothing is recorded, and the turn is undone. After a ValueError,
                TypeError or the like the turn fails. After other errors the caller is asked to retry it. A failed call
                never becomes a reward.
        """
        if self._cached_ask is None:
            raise RuntimeError("effect() is for reset and step, and the spec must have effects=True")
        return self._cached_ask(request, perform)


def derive_seed(seed: int, *labels: str | int) -> int:
    """Return a 64-bit seed derived from a 64-bit seed and labels. It is the same on every machine.

    Different labels give independent random streams, so that the start's stream cannot leak into the transitions'.
    """
    text = "/".join(map(str, (seed, *labels)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def digest(text: str) -> bytes:
    """Return a 16-byte digest of a text for `state_key`. It is the same on every machine."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def digest_observation(observation: str | Sequence[Part]) -> bytes:
    """Return a 16-byte digest of an observation. Equal parts have equal digests on every machine."""
    if isinstance(observation, str):
        return digest(observation)
    if not isinstance(observation, Iterable):
        raise BadResult("observe", f"{type(observation).__name__}, not str or a list of parts")
    hasher = hashlib.blake2b(digest_size=16)
    for part in observation:
        match part:
            case str():
                kind, data = b"text", part.encode("utf-8", "surrogatepass")
            case Image():
                kind, data = part.mime.encode(), part.data
            case JSON():
                kind, data = b"json", json.dumps(part.value, sort_keys=True, separators=(",", ":")).encode()
            case np.ndarray() | np.generic():
                kind, data = f"{part.dtype}{part.shape}".encode(), np.ascontiguousarray(part).tobytes()
            case _:
                raise BadResult(
                    "observe", f"a part that is {type(part).__name__}, not str, Image, JSON or a NumPy array"
                )
        hasher.update(b"%d:%b%d:" % (len(kind), kind, len(data)))
        hasher.update(data)
    return hasher.digest()
