"""Any SkyRL-gym environment over the operator's rows: `starpod serve --skyrl-gym gsm8k#rows=questions.jsonl`."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar, get_args

import skyrl_gym
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from skyrl_gym.envs.registration import load_env_creator, registry

from starpod.env_server.environment import INVALID, Concurrency, EnvironmentOptions, EnvironmentSpec, Outcome
from starpod.env_server.hosting.hosted import Game, Hosted, ProbeResult, package_version, plain, publish, starpod_id
from starpod.env_server.hosting.request import HostingRequest, constructor, import_named, nearest
from starpod.v1.values import JSON, Action, Part

_OWN_COLUMNS = ("prompt", "env_class")


def host(text: str, probed: str = "") -> type[Hosted]:
    """The environment class for `ID?argument=value#rows=FILE&setting=value`. Raises HostingError.

    probed: the result of trying it, where another process asks.
    """
    request = HostingRequest.parse(text, ("rows", "max_turns"))
    name = _find(request)
    point = registry[name].entry_point
    creator = load_env_creator(point) if isinstance(point, str) else point
    taken = constructor(creator).parameters
    rows = _rows(request, name)
    factory = GameFactory(request, name, rows, frozenset(taken), _configuration(request, taken))
    if not probed:
        factory.begin(0).close()
    module = str(getattr(creator, "__module__", "skyrl_gym"))
    known = ProbeResult(**json.loads(probed)) if probed else ProbeResult(package_version(module)).overridden(request)
    spec = EnvironmentSpec(
        id=starpod_id(request, "skyrl", name, 1),
        version=known.version,
        title=f"{name} of SkyRL-gym",
        instructions="The observation is a conversation; an action is your next message in it.",
        grammar="any text: the next message of the assistant",
        # They run tools, databases and code that models wrote.
        concurrency=Concurrency.PROCESS,
    )
    return publish(SkyRLEnvironment, request, spec, known, module, Options=EnvironmentOptions, factory=factory)


@dataclass(frozen=True, slots=True)
class GameFactory:
    """Makes games from the operator's rows. taken: what the constructor takes. configuration: its env_config."""

    request: HostingRequest
    name: str
    rows: Sequence[Mapping[str, Any]]
    taken: frozenset[str]
    configuration: Any

    def begin(self, seed: int) -> SkyRLGame:
        """The game of the row that the seed picks. Raises HostingError if it cannot be made."""
        place = seed % len(self.rows)
        row = copy.deepcopy(dict(self.rows[place]))  # environments write into their extras
        extras = {name: value for name, value in row.items() if name not in _OWN_COLUMNS}
        turns = self.request.number("max_turns")
        if turns is not None:
            extras["max_turns"] = int(turns)
        given = {"env_config": self.configuration, "extras": extras}
        try:
            environment = skyrl_gym.make(self.name, **{k: v for k, v in given.items() if k in self.taken})
            return SkyRLGame(environment, _messages(row["prompt"]), self.request.number("success_at"))
        except Exception as error:
            problem = str(error).partition("\n")[0]
            raise self.request.fail(f"row {place + 1}: {type(error).__name__}: {problem}") from error


class SkyRLEnvironment(Hosted):
    """One SkyRL-gym environment per session. The seed picks its row: seed modulo their number."""

    factory: ClassVar[GameFactory]

    def begin(self, luck: int) -> SkyRLGame:
        return self.factory.begin(self.seed)

    def render(self, mode: str = "text") -> str:
        game = self.game
        assert isinstance(game, SkyRLGame)
        return _told(game.said)

    def state_key(self) -> bytes:
        """A digest of the row and of all actions: the environment remembers both."""
        said = json.dumps([self.seed % len(self.factory.rows), self._past], separators=(",", ":"))
        return blake2b(said.encode(), digest_size=16).digest()


class SkyRLGame(Game):
    """A live conversation. said: all its messages; new: those since the agent's last one."""

    def __init__(self, environment: Any, prompt: list[dict[str, str]], success_at: float | None) -> None:
        super().__init__(success_at)
        self.environment = environment
        self.new, _ = environment.init(prompt)
        self.said = list(self.new)

    def play(self, action: Action) -> Outcome:
        if not isinstance(action, str):
            return INVALID
        output = self.environment.step(action)
        # What was postprocessed takes the place of what was said, as in SkyRL's own conversations.
        kept = output.get("postprocessed_action")
        self.new = output["observations"] or []
        self.said += [{"role": "assistant", "content": action if kept is None else kept}, *self.new]
        done = bool(output["done"])
        info = {**(output.get("metadata") or {}), **({} if kept is None else {"postprocessed_action": kept})}
        if done and (metrics := self.environment.get_metrics()):
            info["metrics"] = metrics
        return self.outcome(output["reward"], done, info=plain(info))

    def observe(self) -> str | Sequence[Part]:
        return [_told(self.new), JSON(self.new)]

    def close(self) -> None:
        self.environment.close()


def _told(messages: Sequence[Mapping[str, str]]) -> str:
    """Messages in one text: a single one as it is, several each under its role."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)


def _find(request: HostingRequest) -> str:
    """The registered id, `MODULE:ID` for one that a module registers."""
    module, _, name = request.name.rpartition(":")
    if module:
        import_named(request, module)
    if name not in registry:
        raise request.fail(f"SkyRL-gym has no such id{nearest(name, registry)}")
    return name


def _configuration(request: HostingRequest, taken: Mapping[str, inspect.Parameter]) -> Any:
    """The arguments as an env_config, with the defaults of its class where the constructor names one."""
    parameter = taken.get("env_config")
    if parameter is None and request.arguments:
        raise request.fail("it has no configuration, and so takes no arguments")
    kinds = [parameter.annotation, *get_args(parameter.annotation)] if parameter is not None else []
    known = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
    try:
        return OmegaConf.merge(OmegaConf.structured(known) if known else {}, dict(request.arguments))
    except OmegaConfBaseException as error:
        raise request.fail(str(error).splitlines()[0]) from error


def _rows(request: HostingRequest, name: str) -> list[dict[str, Any]]:
    """The rows of the operator's file: JSON objects with a prompt, and with what the environment calls extras."""
    if "rows" not in request.settings:
        raise request.fail("it needs prompts: #rows=FILE.jsonl, one object with a prompt and its extras per line")
    path = Path(request.settings["rows"])
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # other line ends may stand in strings
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
            raise request.fail(f"{path}, line {number} is no object with a prompt of messages: {error}") from error
        if row.get("env_class", name) != name:
            raise request.fail(f"{path}, line {number} is a row of {row['env_class']}")
        rows.append(row)
    if not rows:
        raise request.fail(f"{path} has no rows")
    return rows


def _messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt as messages; plain text is the user's. Raises ValueError."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = prompt if isinstance(prompt, list) else []
    if not messages or not all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in messages):
        raise ValueError("prompt must be text or a list of {role, content}")
    return messages
