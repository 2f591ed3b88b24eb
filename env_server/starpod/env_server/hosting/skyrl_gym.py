"""Host any SkyRL-gym environment with the operator's rows: `starpod serve skyrl-gym:gsm8k#rows=questions.jsonl`."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

import skyrl_gym
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from skyrl_gym.envs.registration import load_env_creator, registry

from starpod.env_server.authoring.environment import INVALID, Concurrency, EnvironmentOptions, EnvironmentSpec, Outcome
from starpod.env_server.hosting.hosted import (
    Hosted,
    HostedGame,
    ProbeResult,
    join_messages,
    jsonable,
    package_version,
    publish,
    starpod_id,
)
from starpod.env_server.hosting.request import HostingRequest, constructor, import_named, nearest
from starpod.v1.values import JSON, Action, Part

_OWN_COLUMNS = ("prompt", "env_class")


def host(text: str, probed: str = "") -> type[Hosted[Any]]:
    """Return the environment class for `ID?argument=value#rows=FILE&setting=value`. Raises HostingError.

    `probed` is the encoded ProbeResult if another process has already probed the environment.
    """
    request = HostingRequest.parse(text, ("rows", "max_turns"))
    name = _find(request)
    point = registry[name].entry_point
    creator = load_env_creator(point) if isinstance(point, str) else point
    parameters = constructor(creator).parameters
    rows = _rows(request, name)
    factory = SkyRLFactory(request, name, rows, frozenset(parameters), _configuration(request, parameters))
    if not probed:
        factory.begin(0).close()
    module = str(getattr(creator, "__module__", "skyrl_gym"))
    result = ProbeResult(**json.loads(probed)) if probed else ProbeResult(package_version(module)).overridden(request)
    spec = EnvironmentSpec(
        id=starpod_id(request, "skyrl", name, 1),
        version=result.version,
        title=f"{name} of SkyRL-gym",
        instructions="The observation is a conversation; an action is your next message in it.",
        grammar="any text: the next message of the assistant",
        # These environments run tools, databases and code written by models.
        concurrency=Concurrency.PROCESS,
    )
    return publish(SkyRLEnvironment, request, spec, result, module, Options=EnvironmentOptions, factory=factory)


@dataclass(frozen=True, slots=True)
class SkyRLFactory:
    """Factory of games from the operator's rows."""

    request: HostingRequest
    name: str
    rows: Sequence[Mapping[str, Any]]
    parameters: frozenset[str]
    """Names of the constructor's parameters."""
    configuration: Any
    """Value for the constructor's argument `env_config`."""

    def begin(self, seed: int) -> SkyRLGame:
        """Start the game of the row that the seed picks. Raises HostingError if it cannot be created."""
        index = seed % len(self.rows)
        row = copy.deepcopy(dict(self.rows[index]))  # environments write into their extras
        extras = {name: value for name, value in row.items() if name not in _OWN_COLUMNS}
        turns = self.request.number("max_turns")
        if turns is not None:
            extras["max_turns"] = int(turns)
        arguments = {"env_config": self.configuration, "extras": extras}
        try:
            environment = skyrl_gym.make(self.name, **{k: v for k, v in arguments.items() if k in self.parameters})
            return SkyRLGame(environment, _messages(row["prompt"]), self.request.number("success_at"))
        except Exception as error:
            problem = str(error).partition("\n")[0]
            raise self.request.fail(f"row {index + 1}: {type(error).__name__}: {problem}") from error


class SkyRLEnvironment(Hosted["SkyRLGame"]):
    """Environment with one SkyRL-gym environment per session, on the row with index seed modulo the number of rows."""

    factory: ClassVar[SkyRLFactory]

    def begin(self, dynamics_seed: int) -> SkyRLGame:
        return self.factory.begin(self.seed)

    def render(self, mode: str = "text") -> str:
        return join_messages(self.game.messages)

    def state_key(self) -> bytes:
        return self.digest_past(self.seed % len(self.factory.rows))


class SkyRLGame(HostedGame):
    """A live conversation. `said` holds all its messages. `new` holds the messages after the agent's latest message."""

    def __init__(self, environment: Any, prompt: list[dict[str, str]], success_at: float | None) -> None:
        super().__init__(success_at)
        self.environment = environment
        self.new, _ = environment.init(prompt)
        self.messages = list(self.new)

    def play(self, action: Action) -> Outcome:
        if not isinstance(action, str):
            return INVALID
        output = self.environment.step(action)
        # The postprocessed action replaces the original one, as in SkyRL's own conversations.
        new_text = output.get("postprocessed_action")
        self.new = output["observations"] or []
        self.messages += [{"role": "assistant", "content": action if new_text is None else new_text}, *self.new]
        done = bool(output["done"])
        info = {**(output.get("metadata") or {}), **({} if new_text is None else {"postprocessed_action": new_text})}
        if done and (metrics := self.environment.get_metrics()):
            info["metrics"] = metrics
        return self.outcome(output["reward"], done, info=jsonable(info))

    def observe(self) -> str | Sequence[Part]:
        return [join_messages(self.new), JSON(self.new)]

    def close(self) -> None:
        self.environment.close()


def _find(request: HostingRequest) -> str:
    """Return the registered id. For `MODULE:ID`, it is the id that the module registers."""
    module, _, name = request.name.rpartition(":")
    if module:
        import_named(request, module)
    if name not in registry:
        raise request.fail(f"SkyRL-gym has no such id{nearest(name, registry)}")
    return name


def _configuration(request: HostingRequest, parameters: Mapping[str, inspect.Parameter]) -> Any:
    """Return the arguments as an env_config, with the defaults of the dataclass that the constructor names, if any."""
    parameter = parameters.get("env_config")
    if parameter is None and request.arguments:
        raise request.fail("it has no configuration, and so takes no arguments")
    kinds = [parameter.annotation, *get_args(parameter.annotation)] if parameter is not None else []
    config_class = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
    try:
        return OmegaConf.merge(OmegaConf.structured(config_class) if config_class else {}, dict(request.arguments))
    except OmegaConfBaseException as error:
        raise request.fail(str(error).splitlines()[0]) from error


def _rows(request: HostingRequest, name: str) -> list[dict[str, Any]]:
    """Return the rows of the operator's file: JSON objects with a prompt and the environment's extras."""
    if "rows" not in request.settings:
        raise request.fail("it needs prompts: #rows=FILE.jsonl, one object with a prompt and its extras per line")
    path = Path(request.settings["rows"])
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # strings may contain other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise request.fail(f"cannot read its rows: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            _messages(row["prompt"])
        except (KeyError, TypeError, ValueError) as error:
            raise request.fail(f"{path}, line {number} is not an object with a prompt of messages: {error}") from error
        if row.get("env_class", name) != name:
            raise request.fail(f"{path}, line {number} is a row of {row['env_class']}")
        rows.append(row)
    if not rows:
        raise request.fail(f"{path} has no rows")
    return rows


def _messages(prompt: Any) -> list[dict[str, str]]:
    """Return a prompt as messages. Plain text is a user message. Raises ValueError."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(isinstance(entry, dict) and {"role", "content"} <= entry.keys() for entry in messages):
        raise ValueError("prompt must be text or a list of {role, content}")
    return messages
