"""Host any OpenEnv environment: `starpod serve openenv:echo_env.server.echo_environment:EchoEnvironment`."""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from openenv.core.env_server.interfaces import Environment as OpenEnvironment
from openenv.core.env_server.types import Observation

from starpod.env_server.authoring.environment import (
    INVALID,
    Concurrency,
    EnvironmentSpec,
    OptionsError,
    Outcome,
    derive_seed,
)
from starpod.env_server.hosting.hosted import (
    Hosted,
    HostedGame,
    ProbeResult,
    dependents,
    in_words,
    jsonable,
    package_version,
    publish,
    starpod_id,
)
from starpod.env_server.hosting.openenv_actions import Actions, list_tools
from starpod.env_server.hosting.request import (
    HostingError,
    HostingRequest,
    check_arguments,
    constructor,
    fitting,
    import_named,
    nearest,
    options_model,
)
from starpod.v1.values import JSON, Action, Part

_WEB = ("app", "__main__")
"""Modules of a package's server that start its web application, which is not needed here."""


def host(text: str, probed: str = "") -> type[Hosted[Any]]:
    """Return the environment class for `MODULE:CLASS?argument=value#setting=value`. Raises HostingError.

    `probed` is the encoded ProbeResult if another process has already probed the environment.
    """
    request = HostingRequest.parse(text, ("action",))
    env_class = _find(request)
    signature = constructor(env_class)
    check_arguments(request, signature)
    result = ProbeResult(**json.loads(probed)) if probed else _probe(request, env_class)
    actions = Actions.of(request, env_class, result.tools)
    name = re.sub(r"(?<=.)(Environment|Env)$", "", env_class.__name__)
    paragraphs = [inspect.getdoc(env_class) if env_class.__doc__ else "", f"An action is {actions.grammar}."]
    spec = EnvironmentSpec(
        id=starpod_id(request, "openenv", name, 1),
        version=result.version,
        title=f"{env_class.__name__} of OpenEnv",
        instructions="\n".join(line for line in paragraphs if line),
        grammar=actions.grammar,
        tools=tuple(actions.tools.values()),
        concurrency=Concurrency.PROCESS,
    )
    options = options_model(request, signature, request.arguments)
    factory = OpenEnvFactory(request, env_class, actions)
    return publish(OpenEnvEnvironment, request, spec, result, env_class.__module__, Options=options, factory=factory)


def installed(pattern: str) -> list[str]:
    """Return the modules that match and depend on OpenEnv, as `MODULE:CLASS` if a module has several environments."""
    names: list[str] = []
    for module in fitting(pattern, dependents("openenv", "openenv-core")):
        try:
            classes = _classes(HostingRequest.parse(module, ()), module, "")
        except HostingError:
            classes = {}  # hosting it reports the reason
        names += [f"{module}:{name}" for name in classes] if len(classes) > 1 else [module]
    return names


@dataclass(frozen=True, slots=True)
class OpenEnvFactory:
    """Factory of environments with the operator's arguments, and the conversion of their actions."""

    request: HostingRequest
    env_class: type[OpenEnvironment[Any, Any, Any]]
    actions: Actions


class OpenEnvEnvironment(Hosted["OpenEnvGame"]):
    """Environment with one OpenEnv environment per session. `render` shows its state."""

    factory: ClassVar[OpenEnvFactory]

    def begin(self, dynamics_seed: int) -> OpenEnvGame:
        options = self.options.model_dump()
        try:
            environment = self.factory.env_class(**{**self.factory.request.arguments, **options})
        except (TypeError, ValueError) as error:
            if not options:
                raise
            raise OptionsError(str(error)) from error
        return OpenEnvGame(environment, self.factory, self.seed, dynamics_seed)

    def render(self, mode: str = "text") -> str:
        return json.dumps(jsonable(self.game.environment.state), indent=2, ensure_ascii=False)


class OpenEnvGame(HostedGame):
    """A live environment and its latest observation."""

    def __init__(
        self, environment: OpenEnvironment[Any, Any, Any], factory: OpenEnvFactory, seed: int, dynamics_seed: int
    ) -> None:
        super().__init__(factory.request.number("success_at"))
        self.environment = environment
        self.factory = factory
        params = inspect.signature(environment.reset).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in params.values())
        # Many packages' generators take 32 bits. The episode's name must be the same when it is replayed.
        arguments = {"seed": seed % 2**32, "episode_id": f"{derive_seed(seed, 'episode', dynamics_seed):016x}"}
        self.seen: Observation = environment.reset(**{k: v for k, v in arguments.items() if takes_any or k in params})

    def play(self, action: Action) -> Outcome:
        try:
            openenv_action = self.factory.actions.read(action)
        except ValueError:
            return INVALID
        seen = self.seen = self.environment.step(openenv_action)
        info = {"metadata": jsonable(seen.metadata)} if seen.metadata else None
        outcome = self.outcome(seen.reward or 0.0, seen.done, bool(getattr(seen, "truncated", False)), info)
        return outcome if getattr(seen, "error", None) is None or not _is_call(seen) else outcome._replace(valid=False)

    def observe(self) -> str | Sequence[Part]:
        if _is_call(self.seen):
            return _tool_result(self.seen)
        fields = jsonable(self.seen, exclude={"done", "reward", "metadata"})
        shown_fields = {name: value for name, value in fields.items() if value is not None}
        if len(shown_fields) == 1 and isinstance(text := next(iter(shown_fields.values())), str):
            return text
        lines = (f"{name}: {in_words(value)}" for name, value in shown_fields.items())
        return ["\n".join(lines), JSON(fields)] if shown_fields else ""

    def close(self) -> None:
        self.environment.close()


# --- finding it --------------------------------------------------------------------------------------------------


def _find(request: HostingRequest) -> type[OpenEnvironment[Any, Any, Any]]:
    """Return the requested class, from the module itself or its `server` folder, where OpenEnv's packages have it."""
    source, _, name = request.name.partition(":")
    classes = _classes(request, source, name)
    if name in classes:
        return classes[name]
    if not name and len(classes) == 1:
        return next(iter(classes.values()))
    if not classes:
        raise request.fail(f"neither {source} nor {source}.server defines a subclass of OpenEnv's Environment")
    if not name:
        raise request.fail(f"it has several environments; name one: {', '.join(f'{source}:{n}' for n in classes)}")
    raise request.fail(f"{source} has no environment {name!r}{nearest(name, classes)}")


def _classes(request: HostingRequest, source: str, name: str) -> dict[str, type[OpenEnvironment[Any, Any, Any]]]:
    return {cls.__name__: cls for module in _modules(request, source, name) for cls in _environments(module)}


def _modules(request: HostingRequest, source: str, name: str) -> Iterator[Any]:
    module = import_named(request, source)
    yield module
    if hasattr(module, name) or not hasattr(module, "__path__"):
        return
    folder = f"{source}.server"
    if any(info.name == "server" for info in pkgutil.iter_modules(module.__path__)):
        for info in pkgutil.iter_modules(import_named(request, folder).__path__):
            if info.name not in _WEB:
                yield import_named(request, f"{folder}.{info.name}")


def _environments(module: Any) -> Iterator[type[OpenEnvironment[Any, Any, Any]]]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, OpenEnvironment) and not inspect.isabstract(value):
            yield value


def _probe(request: HostingRequest, env_class: type[OpenEnvironment[Any, Any, Any]]) -> ProbeResult:
    """Check that the environment can be created, and list its tools. The operator must say if it is deterministic."""
    try:
        environment = env_class(**request.arguments)
        try:
            tools = list_tools(environment)
        finally:
            environment.close()
    except Exception as error:
        raise request.fail(f"it raised {type(error).__name__} when it was tried: {error}") from error
    return ProbeResult(package_version(env_class.__module__), tools=tools).overridden(request)


# --- values ------------------------------------------------------------------------------------------------------


def _is_call(observation: Observation) -> bool:
    """Return whether the observation is the result of a tool call."""
    return type(observation).__name__ == "CallToolObservation"


def _tool_result(observation: Any) -> list[Part]:
    error = observation.error.message if observation.error is not None else None
    result = observation.result
    value = getattr(result, "structured_content", result)
    texts = [part.text for part in getattr(result, "content", ()) if isinstance(getattr(part, "text", None), str)]
    text = error if error is not None else "\n".join(texts) or in_words(jsonable(value))
    return [text, JSON({"tool_name": observation.tool_name, "result": jsonable(value), "error": error})]
