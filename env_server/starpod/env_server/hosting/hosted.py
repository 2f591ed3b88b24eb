"""Base of hosted environments. An episode's state is its list of actions, and a copy replays them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import multiprocessing
import random
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version
from pydantic_core import to_jsonable_python

from starpod.env_server.authoring.environment import (
    INVALID,
    Concurrency,
    Environment,
    EnvironmentSpec,
    Outcome,
    derive_seed,
)
from starpod.env_server.episodes.state import StateError
from starpod.env_server.hosting.request import HostingRequest
from starpod.env_server.processes.forking import preload, warm_up
from starpod.env_server.registry import Reference
from starpod.v1.untrusted import read_untrusted_json
from starpod.v1.values import JSON, Action, Part, ToolCall

logger = logging.getLogger(__name__)

MAX_REPLAYED_ACTIONS = 20_000
"""Maximum number of actions in a saved episode, because restoring it replays them all."""

MOST_TURNS = 1000
"""Maximum number of turns if the package sets none. A package's limit counts actions, but turns may have no actions."""

_WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_PLACED = random.Random(0)
"""Sentinel for the transition RNG. A fork that reseeds removes it, and the next step then reseeds the hosted
environment."""


# --- facts for other processes -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of trying an environment once, which is passed to other processes so that they need not try again."""

    version: str = "0.0.0"
    """Version of the environment's package."""
    deterministic: bool = False
    """Whether equal seeds and actions gave equal episodes."""
    copies: bool = False
    """Whether a deep copy continued like the original, without affecting it."""
    tools: Sequence[tuple[str, str, Mapping[str, Any]]] = ()
    """The environment's tools as [name, description, JSON Schema of the arguments]."""
    expert: bool = False
    """Whether the environment can suggest good actions."""

    def overridden(self, request: HostingRequest) -> ProbeResult:
        """Return the result with the operator's setting for `deterministic`, if there is one."""
        setting = request.choice("deterministic", "unsaid", "yes", "no")
        return self if setting == "unsaid" else replace(self, deterministic=setting == "yes")


def starpod_id(request: HostingRequest, family: str, name: str, number: int) -> str:
    """Return `family-some-name-vN` for SomeName, or the id that the operator gave.

    Args:
        request: the operator's request, whose setting `id` takes precedence.
        family: first part of the id, such as "gymnasium".
        number: N, the version of the environment in its library.
    """
    slug = re.sub(r"[^a-z0-9_]+", "-", _WORD_BORDER.sub("-", name).lower()).strip("-")
    return request.settings.get("id", f"{family}-{slug}-v{number}")


def package_version(module: str) -> str:
    """Return MAJOR.MINOR.PATCH of the distribution that contains a module; 0.0.0 if there is none."""
    package = module.partition(".")[0]
    for distribution in _distributions().get(package, ()):
        with contextlib.suppress(InvalidVersion, importlib.metadata.PackageNotFoundError):
            return release_of(importlib.metadata.version(distribution))
    return "0.0.0"


def release_of(version: str) -> str:
    """Return MAJOR.MINOR.PATCH of a version. Raises InvalidVersion."""
    return ".".join(map(str, (*Version(version).release, 0, 0)[:3]))


def dependents(*packages: str) -> list[str]:
    """Return the modules of distributions that depend on one of these packages, other than through an extra."""
    modules = set()
    for module, names in _distributions().items():
        for name in names:
            requirements = map(Requirement, importlib.metadata.requires(name) or ())
            if any(package.name in packages and "extra" not in str(package.marker) for package in requirements):
                modules.add(module)
    return sorted(module for module in modules if module.isidentifier())


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the distributions by module. It is cached, because it reads the files of every distribution."""
    return importlib.metadata.packages_distributions()


# --- episodes ----------------------------------------------------------------------------------------------------


class HostedGame(ABC):
    """One live episode of another package's environment.

    A finished episode counts as solved if its return is at least `success_at`. If that is None, success is unknown.
    """

    def __init__(self, success_at: float | None) -> None:
        self.success_at = success_at
        self.total = 0.0

    @abstractmethod
    def play(self, action: Action) -> Outcome:
        """Execute one action. Return the object INVALID if, and only if, the action was not executed."""

    @abstractmethod
    def observe(self) -> str | Sequence[Part]: ...

    @abstractmethod
    def close(self) -> None: ...

    def reseed(self, seed: int) -> None:  # noqa: B027 - most have no random state that can be set
        """Reseed the random transitions from here on."""

    def copy(self) -> Self:
        raise StateError("has no copies")

    def outcome(
        self, reward: Any, terminated: bool, truncated: bool = False, info: Mapping[str, Any] | None = None
    ) -> Outcome:
        """Return the outcome of an action. If the episode ends with it, compare the return with `success_at`.

        Args:
            reward: reward of the action, which is added to the return.
            info: diagnostic data, as JSON values.
        """
        if isinstance(reward, str | bytes):
            raise TypeError(f"the package's reward is the text {reward!r:.80}, not a number")
        self.total += float(reward)
        success = None
        if self.success_at is not None and (terminated or truncated):
            success = self.total >= self.success_at
        return Outcome(float(reward), terminated, truncated and not terminated, success, info=info or None)


Game = TypeVar("Game", bound=HostedGame)


class Hosted(Environment, Generic[Game]):
    """Base of hosted environments. Its state is the list of actions, which a copy or a restored environment replays.

    `copies` says whether `Game.copy` is reliable. `reference` says how another process creates the class.
    """

    copies: ClassVar[bool] = False
    reference: ClassVar[Reference] = ()

    def __init__(self) -> None:
        self._past: list[Any] = []
        self._first_dynamics_seed = 0
        self._cached_game: Game | None = None

    @abstractmethod
    def begin(self, dynamics_seed: int) -> Game:
        """Start a new game with `self.options` and `self.seed`. Its transitions are drawn from `dynamics_seed`."""

    @property
    def game(self) -> Game:
        """The live game. If there is none yet, it is created and the actions are replayed."""
        if self._cached_game is None:
            game = self.begin(self._first_dynamics_seed)
            try:
                for action in self._past:
                    if type(action) is int:
                        game.reseed(action)
                    elif game.play(_action(action)) is INVALID:
                        raise StateError("its actions are not those of this environment")
            except BaseException:
                game.close()  # a call that is made again after Busy replays all actions in another game
                raise
            self._keep(game)
        assert self._cached_game is not None
        return self._cached_game

    @classmethod
    def prepare(cls) -> None:
        if cls.spec.concurrency is Concurrency.PROCESS and multiprocessing.parent_process() is None:
            warm_up()

    def reset(self, rng: random.Random) -> None:
        self._dynamics = _PLACED
        self._past = []
        self._first_dynamics_seed = self.dynamics_seed
        self._keep(self.begin(self._first_dynamics_seed))

    def step(self, action: Action) -> Outcome:
        game = self.game
        if self._dynamics is None:
            self._dynamics = _PLACED
            self._past.append(self.dynamics_seed)
            game.reseed(self.dynamics_seed)
        outcome = game.play(action)
        if outcome is not INVALID:
            self._past.append(_plain(action))
        return outcome

    def observe(self) -> str | Sequence[Part]:
        return self.game.observe()

    def digest_past(self, *start: Any) -> bytes:
        """Return a state key for a game whose other state is not accessible: a digest of its start and all actions."""
        text = json.dumps([*start, self._past], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def copy(self) -> Self:
        clone = type(self)()
        clone.options, clone.seed = self.options, self.seed
        clone.set_state(self._state())
        if self.copies and self._cached_game is not None:
            try:
                clone._keep(self._cached_game.copy())
            except Exception as error:
                if not self.spec.deterministic:
                    raise StateError(f"cannot be copied here: {error}") from error
        return clone

    def get_state(self) -> dict[str, Any]:
        if len(self._past) > MAX_REPLAYED_ACTIONS:
            raise StateError(
                f"has played {len(self._past)} actions; episodes of up to {MAX_REPLAYED_ACTIONS} are saved"
            )
        return self._state()

    def set_state(self, state: dict[str, Any]) -> None:
        actions, first_seed, seed = state["past"], state["luck"], state["dynamics_seed"]
        if not (
            isinstance(actions, list)
            and len(actions) <= MAX_REPLAYED_ACTIONS
            and all(isinstance(n, int) for n in (first_seed, seed))
        ):
            raise ValueError("not a record of played actions")
        for action in actions:
            _action(action)
        self._past, self._first_dynamics_seed, self.dynamics_seed = list(actions), first_seed, seed
        self._dynamics = _PLACED if state["placed"] else None

    def _state(self) -> dict[str, Any]:
        return {
            "dynamics_seed": self.dynamics_seed,
            "luck": self._first_dynamics_seed,
            "placed": self._dynamics is not None,
            "past": list(self._past),
        }

    def _keep(self, game: Game) -> None:
        self._cached_game = game
        # Close the game when the session no longer refers to it, but not at interpreter exit.
        waits = self.spec.concurrency is Concurrency.THREAD
        weakref.finalize(self, _close_on_thread if waits else HostedGame.close, game).atexit = False


_ended: SimpleQueue[HostedGame] = SimpleQueue()


def _close_on_thread(game: HostedGame) -> None:
    """Close a game on a separate thread, because closing may wait and this function runs in the event loop."""
    _start_closing()
    _ended.put(game)


@functools.cache
def _start_closing() -> None:
    def serve() -> None:
        while True:
            try:
                _ended.get().close()
            except Exception:  # the other package may raise anything
                logger.warning("a hosted environment could not be closed", exc_info=True)

    threading.Thread(target=serve, name="starpod closing", daemon=True).start()


def needs_dynamics_seed(seed: int, dynamics_seed: int) -> bool:
    """Return whether an episode's transitions need a seed other than the episode's seed.

    Packages with a single seed draw the start and the transitions from it. By default the first member of a group does
    the same, so that its episode is exactly the package's. The other members need another seed for their transitions,
    and so does an episode whose dynamics seed the caller chose.
    """
    return dynamics_seed != derive_seed(seed, "member", 0)


def publish(
    base: type[Hosted[Any]],
    request: HostingRequest,
    spec: EnvironmentSpec,
    probed: ProbeResult,
    module: str,
    **members: Any,
) -> type[Hosted[Any]]:
    """Return the hosted class: `base` with its spec and `members` as class attributes.

    Args:
        request: the request, whose settings override the spec.
        module: the environment's module, which is preloaded for separate processes.
    """
    concurrency = Concurrency(request.choice("concurrency", spec.concurrency.value, *(c.value for c in Concurrency)))
    own_process = concurrency is Concurrency.PROCESS
    spec = replace(
        spec,
        limits=spec.limits if spec.limits.max_turns else replace(spec.limits, max_turns=MOST_TURNS),
        version=probed.version,
        concurrency=concurrency,
        deterministic=probed.deterministic,
        # only actions can be sent between processes, not copies
        fork=probed.deterministic or (probed.copies and not own_process),
        snapshot=probed.deterministic,
    )
    if own_process:
        preload(base.__module__, module)
    reference = (base.__module__, "host", request.text, json.dumps(asdict(probed)))
    members |= {"spec": spec, "reference": reference, "copies": probed.copies, "__module__": base.__module__}
    return type(base.__name__, (base,), members)


def jsonable(value: Any, exclude: set[str] | None = None) -> Any:
    """Convert a value of any type, including third-party types, to JSON-like values. `exclude`: fields to omit."""
    return to_jsonable_python(value, exclude=exclude, serialize_unknown=True, inf_nan_mode="strings")


def in_words(value: Any) -> str:
    """Return a text as it is, and another value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def join_messages(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return messages of a conversation as one text. If there are several, the role precedes each message."""
    if len(messages) == 1:
        return _message_text(messages[0])
    return "\n\n".join(f"[{message['role']}]\n{_message_text(message)}" for message in messages)


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = [part.get("text", "") for part in content] if isinstance(content, list) else [content or ""]
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [*parts, *calls]))


def read_call(action: Action) -> ToolCall | None:
    """Return the tool call that an action is, or spells as JSON `{"tool_name": ..., "arguments": {...}}`, else None."""
    value = action.value if isinstance(action, JSON) else None
    if isinstance(action, str):
        with contextlib.suppress(ValueError):
            value = read_untrusted_json(action)
    match value:
        case {"tool_name": str(name), "arguments": dict(arguments)}:
            return ToolCall(name, arguments)
    return action if isinstance(action, ToolCall) else None


def _plain(action: Action) -> Any:
    """Return an action as a plain value for the state."""
    match action:
        case JSON():
            return ["json", action.value]
        case ToolCall():
            return ["tool", action.name, dict(action.arguments)]
        case np.ndarray():
            return ["json", action.tolist()]
    return action


def _action(encoded: Any) -> Any:
    """Convert a result of `_plain` back to an action. An integer, which marks a reseed, is kept. Raises ValueError."""
    match encoded:
        case str() | int():
            return encoded
        case ["json", value]:
            return JSON(value)
        case ["tool", str(name), dict(arguments)]:
            return ToolCall(name, arguments)
    raise ValueError(f"{encoded!r} was not played")
