"""Base class of environments: an author writes one class with `spec`, `reset`, `step` and `render`.

    class Doors(Environment):
        spec = EnvironmentSpec(id="doors-v1", version="1.0.0", title="Two doors", actions=("left", "right"))

        def reset(self, rng):
            self.prize = rng.choice(self.spec.actions)

        def step(self, action):
            return Outcome(reward=float(action == self.prize), terminated=True, success=action == self.prize)

        def render(self, mode="text"):
            return "Behind one of two doors is a prize."

Sessions, turns, limits, retries, forks, snapshots and the wire are the server's business.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from starpod.env_server.seeding import derive_seed


class Concurrency(enum.Enum):
    """Place where an environment's steps run."""

    INLINE = "inline"
    """In the event loop. For steps of microseconds that never wait."""
    THREAD = "thread"
    """On a thread of the server's pool. For steps that wait or release the interpreter."""
    PROCESS = "process"
    """In a process of the session's own. For what may crash, leak, hang or cannot be trusted."""


class OptionsError(ValueError):
    """Options that cannot be met, raised by `reset` where only the search for a start shows it; says how to fix them.

    The caller gets it as a bad argument, not as a bug of the environment.
    """


class Unavailable(Exception):
    """Something that the environment needs is missing: raised by `prepare`, or by `render` where only a mode needs it.

    Says what, and how to get it.
    """


class Busy(Exception):
    """A resource of the environment is in use by others, or not ready: the same call may succeed later.

    `reset`, `render` and `observe` may raise it, and `step` before it has changed anything. The caller gets an overload
    with the seconds after which to try again, never a failed episode, and the session is as it was before the call.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class EnvironmentOptions(BaseModel):
    """Base of an environment's options: a frozen pydantic model whose fields carry defaults and descriptions.

    Unknown options are refused. The JSON Schema that Describe shows is made from it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def changed(self, *names: str) -> list[str]:
        """Those of the named options that differ from their defaults, for checks of options that exclude each other.

        Whoever writes all options down, as a log does, writes the defaults too: that an option is given says nothing.
        """
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one episode; 0 means no limit."""

    max_turns: int = 0
    max_actions_per_turn: int = 0
    max_actions: int = 0


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that an action may call; `parameters` is the JSON Schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An action that calls a tool by name."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JSON:
    """A JSON value, as an action or a part of an observation (text stays plain `str`)."""

    value: Any


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image as a part of an observation."""

    data: bytes
    mime: str = "image/png"


Action = str | ToolCall | JSON | np.ndarray
"""What `Environment.step` receives. Environments of words see only `str`."""

Part = str | Image | JSON | np.ndarray
"""One piece of an observation."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Element type, shape (-1: any length) and bounds of a tensor action."""

    dtype: str
    shape: tuple[int, ...] = ()
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Description of an environment, as Describe gives it.

    id: `name-vN`; N grows when rewards, observations or rules change incompatibly.
    version: semantic, MAJOR.MINOR.PATCH.
    actions: every action by name where the set is fixed; matched whatever their case, handed to `step` as written here.
    grammar: how an action is written where there is no fixed set, for people and prompts.
    observation_modes: values of the option `observation`, where there is one.
    fully_observed: whether an observation tells all that matters, so that a policy need not remember earlier ones.
    fork, snapshot: whether a live episode can be copied, and written as bytes: what `copy` and `get_state` do.
    restores: versions besides its own whose snapshots it restores, e.g. ">=1.1.0,<1.4.0".
    slow_reset: run `reset` on a thread although steps are inline (for starts that are searched for).
    slow_render: run `render` on a thread, and what observes with a picture; such a turn can be undone if it meets Busy.
    step_timeout: seconds after which a step of class `process` counts as hung and its session as lost.
    effects: `reset` and `step` call out by `effect`, on a thread: the class is `thread`.
    """

    id: str
    version: str
    title: str
    instructions: str = ""
    actions: tuple[str, ...] = ()
    grammar: str = ""
    tools: tuple[Tool, ...] = ()
    tensor: TensorSpec | None = None
    observation_modes: tuple[str, ...] = ()
    fully_observed: bool = False
    render_modes: tuple[str, ...] = ("text",)
    limits: Limits = Limits()
    concurrency: Concurrency = Concurrency.INLINE
    deterministic: bool = True
    fork: bool = True
    snapshot: bool = True
    restores: str = ""
    slow_reset: bool = False
    slow_render: bool = False
    step_timeout: float = 60.0
    effects: bool = False
    action_set: frozenset[str] = field(init=False, repr=False)
    longest_name: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "action_set", frozenset(self.actions))
        object.__setattr__(self, "longest_name", max(map(len, self.actions), default=0))


class Outcome(NamedTuple):
    """Result of one sub-action. (A tuple, because one is made per sub-action.)

    reward: finite; the turn's reward is the sum.
    terminated: the task itself ended. truncated: a limit of the environment's own cut it short. Never both.
    success: whether the task is solved; None while it is open or where that cannot be said.
    valid: False if the action made no sense here. That is an outcome, not an error: a policy learns from it.
    effective: False if it changed nothing.
    reward_parts: where the reward comes from, by name. criteria: a checklist, by name. info: side data, JSON-like.
    """

    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool | None = None
    valid: bool = True
    effective: bool = True
    reward_parts: Mapping[str, float] | None = None
    criteria: Mapping[str, bool] | None = None
    info: Mapping[str, Any] | None = None


INVALID = Outcome(valid=False, effective=False)
"""An action that made no sense and changed nothing."""

UNKNOWN_NAME = Outcome(valid=False, effective=False, info={})
"""An action that is not among the names there are. It is not tried, and counts against no limit.

Names that the spec lacks get it from the server. An environment whose names change with the episode returns it itself.
"""


class Environment(ABC):
    """Base class of environments. One instance is one session; `reset` starts its next episode.

    The server sets `options` (an instance of the class's `Options`) and `seed` (the caller's, for starts it numbers;
    luck comes from `rng`) before it calls `reset`, and reads and writes the instance's attributes to fork, snapshot and
    restore it. Attributes may be None, numbers, strings, bytes, lists, tuples, sets, dicts, NumPy arrays,
    dataclass-free nestings of these, and `random.Random`; others need own `get_state` and `set_state`. Attributes that
    start with `_cached` are not state: they are dropped in a snapshot.
    """

    spec: ClassVar[EnvironmentSpec]
    Options: ClassVar[type[EnvironmentOptions]] = EnvironmentOptions

    options: Any
    seed: int = 0
    dynamics_seed: int = 0
    _dynamics: random.Random | None = None
    _cached_ask: Callable[[Any, Callable[[], Any]], Any] | None = None

    # --- what an author writes -----------------------------------------------------------------------------------

    @abstractmethod
    def reset(self, rng: random.Random) -> None:
        """Starts an episode: sets the initial state from `self.options` and `rng`, which depends on the seed alone."""

    @abstractmethod
    def step(self, action: Any) -> Outcome:
        """Executes one sub-action. Raises only on a bug: a bad action is an Outcome with `valid=False`."""

    @abstractmethod
    def render(self, mode: str = "text") -> str | bytes:
        """Draws the state: `text` and `html` as str, `png` as the bytes of an image. Changes nothing."""

    # --- what an author may write --------------------------------------------------------------------------------

    @classmethod  # noqa: B027 - most environments have nothing to load
    def prepare(cls) -> None:
        """Loads what all sessions share. Called once in every process that hosts the class, before its first session.

        Raises Unavailable if the class cannot be hosted here.
        """

    @classmethod
    def use_stores(cls, stores: Sequence[str]) -> bool:
        """Takes over what `starpod serve --store` was given: data of any kind that the sessions of this server draw on.

        Called before `prepare`, in the server's process alone: what other processes need goes into `os.environ`, which
        they inherit. Returns whether the environment uses stores; by default it does not. Raises Unavailable for one
        that it cannot use.
        """
        return False

    def observe(self) -> str | Sequence[Part]:
        """The agent's observation after a reset and after each turn. By default the text picture."""
        text = self.render("text")
        assert isinstance(text, str)
        return text

    def instructions(self) -> str:
        """The instructions for the agent with the present options."""
        return self.spec.instructions

    def valid_actions(self) -> Sequence[Any] | None:
        """Every action that is valid now; None where they cannot be listed."""
        return self.spec.actions or None

    def state_key(self) -> bytes:
        """A digest of at most 32 bytes of the state without its history: equal states, equal keys, on every machine.

        By default a digest of what the agent observes. Override it where two states can look alike.
        """
        return digest_observation(self.observe())

    def expert_action(self) -> Any | None:
        """A good next action, None where the expert knows none or the episode is over."""
        return None

    def score(self) -> float | None:
        """Progress of the episode in [0, 1], and 1 only when it is solved."""
        return None

    def agent_id(self) -> str:
        """Whose turn it is, where several agents play in turn; empty where there is one.

        A turn's reward is the acting agent's. The caller plays all of them.
        """
        return ""

    def get_state(self) -> dict[str, Any]:
        """The state as a dictionary of plain values."""
        return {
            name: value for name, value in self.__dict__.items() if name != "options" and not name.startswith("_cached")
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes over what `get_state` gave. `options` is already set."""
        self.__dict__.update(state)

    def copy(self) -> Self:
        """An independent copy, for a fork. By default one that takes over a deep copy of the state."""
        copied = type(self)()
        copied.options, copied.seed = self.options, self.seed
        copied.set_state(copy.deepcopy(self.get_state()))
        return copied

    # --- what the server provides --------------------------------------------------------------------------------

    @property
    def dynamics(self) -> random.Random:
        """The random stream of transitions. It depends on the dynamics seed alone, and is part of the state."""
        stream = self._dynamics
        if stream is None:
            stream = self._dynamics = random.Random(derive_seed(self.dynamics_seed, "dynamics"))
        return stream

    def effect(self, request: Any, perform: Callable[[], Any]) -> Any:
        """The reply of something outside, such as a judge, a simulated user or a search: asked once, then recorded.

        For `reset` and `step`, where the spec says `effects=True`. `perform` makes the call and returns a JSON value;
        `request`, a JSON value too, says all that the reply depends on, such as the model and the messages. A retry, a
        replay, a fork that comes to the same call in the same episode gets the recorded reply.

        Whatever `perform` raises is a failure of what it calls, and so should a reply be that makes no sense: nothing
        is recorded, the turn is undone, and the caller is told to try again. It never becomes a reward.
        """
        if self._cached_ask is None:
            raise RuntimeError("effect() is for reset and step, and the spec must have effects=True")
        return self._cached_ask(request, perform)


def digest(text: str) -> bytes:
    """A 16-byte digest of a text, for `state_key`: the same on every machine."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def digest_observation(observation: str | Sequence[Part]) -> bytes:
    """A 16-byte digest of an observation: equal parts, equal digests, on every machine."""
    if isinstance(observation, str):
        return hashlib.blake2b(observation.encode(), digest_size=16).digest()
    digest = hashlib.blake2b(digest_size=16)
    for part in observation:
        match part:
            case str():
                kind, data = b"text", part.encode()
            case Image():
                kind, data = part.mime.encode(), part.data
            case JSON():
                kind, data = b"json", json.dumps(part.value, sort_keys=True, separators=(",", ":")).encode()
            case _:
                kind, data = f"{part.dtype}{part.shape}".encode(), np.ascontiguousarray(part).tobytes()
        digest.update(b"%d:%b%d:" % (len(kind), kind, len(data)))
        digest.update(data)
    return digest.digest()
