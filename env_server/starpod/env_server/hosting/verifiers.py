"""Host any taskset of Prime Intellect's verifiers: `starpod serve verifiers:gsm8k-v1`."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import (
    default_harness_id,
    import_taskset,
    load_environment,
    resolve_env_config,
    taskset_class,
)

from starpod.env_server.authoring.environment import (
    INVALID,
    Concurrency,
    EnvironmentOptions,
    EnvironmentSpec,
    Outcome,
    Tool,
)
from starpod.env_server.hosting.hosted import (
    Hosted,
    HostedGame,
    ProbeResult,
    dependents,
    join_messages,
    jsonable,
    package_version,
    publish,
    read_call,
    starpod_id,
)
from starpod.env_server.hosting.request import HostingError, HostingRequest, fitting
from starpod.env_server.hosting.verifiers_episodes import HARNESS, EpisodePlayer, VerifiersEpisode
from starpod.v1.values import JSON, Action, Image, Part

_TASKS_OF_THE_ENDLESS = 1000
_DEFAULT_HARNESS = "bash"


def host(text: str, probed: str = "") -> type[Hosted[Any]]:
    """Return the environment class for `TASKSET?field=value#setting=value`. Raises HostingError.

    `probed` is unused: these episodes serve tools, so they always run in the server's own process.
    """
    request = HostingRequest.parse(text, ("tasks",))
    request.choice("concurrency", Concurrency.THREAD.value)
    factory = _load(request)
    tools = _probe(factory)
    module = import_taskset(request.name).__name__
    result = ProbeResult(package_version(module)).overridden(request)
    spec = EnvironmentSpec(
        id=starpod_id(request, "verifiers", request.name.rsplit("/", 1)[-1].split("@", 1)[0], 1),
        version=result.version,
        title=f"{request.name} of verifiers",
        instructions="The observation is a conversation; an action is your next message in it"
        + (", or a call of a tool." if tools else "."),
        grammar="any text: the next message of the assistant"
        + ('; a call of a tool, also as JSON {"tool_name": ..., "arguments": {...}}' if tools else ""),
        tools=tools,
        # Tools are served over the loopback interface, which a confined process cannot reach.
        concurrency=Concurrency.THREAD,
    )
    return publish(VerifiersEnvironment, request, spec, result, module, Options=EnvironmentOptions, factory=factory)


def installed(pattern: str) -> list[str]:
    """Return the tasksets that match the pattern, among the packages that depend on verifiers."""

    def has_taskset(name: str) -> bool:
        try:
            taskset_class(name)
        except Exception:  # a package may depend on verifiers without having a taskset, or be broken
            return False
        return True

    names = [module.replace("_", "-") for module in dependents("verifiers")]
    return [name for name in fitting(pattern, names) if has_taskset(name)]


@dataclass(frozen=True, slots=True)
class VerifiersFactory:
    """Factory of episodes. A seed selects one of `tasks`."""

    request: HostingRequest
    player: EpisodePlayer
    tasks: Sequence[Any]

    def begin(self, seed: int) -> VerifiersGame:
        """Begin an episode of the task whose index is the seed modulo the number of tasks."""
        episode = VerifiersEpisode(self.player, self.tasks[seed % len(self.tasks)])
        return VerifiersGame(episode, self.request.number("success_at"))


class VerifiersEnvironment(Hosted["VerifiersGame"]):
    """Environment with one episode per session."""

    factory: ClassVar[VerifiersFactory]

    def begin(self, dynamics_seed: int) -> VerifiersGame:
        return self.factory.begin(self.seed)

    def render(self, mode: str = "text") -> str:
        return join_messages(self.game.episode.messages)

    def state_key(self) -> bytes:
        return self.digest_past(self.seed % len(self.factory.tasks))


class VerifiersGame(HostedGame):
    """A live episode. The reward at its end is the sum of the task's rewards."""

    def __init__(self, episode: VerifiersEpisode, success_at: float | None) -> None:
        super().__init__(success_at)
        self.episode = episode

    def play(self, action: Action) -> Outcome:
        reply = self._read(action)
        if reply is None:
            return INVALID
        self.episode.say(reply)
        if self.episode.ended is None:
            return self.outcome(0.0, False)
        traces = self.episode.ended.traces
        is_truncated = any(trace.is_truncated or trace.is_timeout for trace in traces)
        parts = {name: reward.value for trace in traces for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for trace in traces for name, value in trace.metrics.items() if value is not None}
        info = jsonable({"metrics": metrics, "stop_condition": traces[-1].stop_condition})
        return self.outcome(sum(parts.values()), not is_truncated, is_truncated, info)._replace(reward_parts=parts)

    def observe(self) -> Sequence[Part]:
        messages = [dict(message) for message in self.episode.new]
        pictures = [picture for message in messages for picture in _pictures(message["content"])]
        return [join_messages(messages), *pictures, JSON(messages)]

    def close(self) -> None:
        self.episode.close()

    def _read(self, action: Action) -> Mapping[str, Any] | None:
        """Return an action as the model's reply, or None if it calls an unknown tool."""
        names = [tool["function"]["name"] for tool in self.episode.tools]
        call = read_call(action) if names or not isinstance(action, str) else None
        if call is None:
            return {"content": action} if isinstance(action, str) else None
        if call.name not in names:
            return None
        function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
        id = f"call_{len(self.episode.messages)}"
        return {"content": None, "tool_calls": [{"id": id, "type": "function", "function": function}]}


def _pictures(content: Any) -> list[Image]:
    urls = [entry["image_url"]["url"] for entry in content if "image_url" in entry] if isinstance(content, list) else []
    url_parts = [url.partition(";base64,") for url in urls]
    return [Image(base64.b64decode(data), prefix.removeprefix("data:")) for prefix, marker, data in url_parts if marker]


# --- finding it --------------------------------------------------------------------------------------------------


def _load(request: HostingRequest) -> VerifiersFactory:
    """Return the factory of the taskset's episodes. Raises HostingError."""
    taskset = {"id": request.name, **request.arguments}
    try:
        if default_harness_id(request.name) != _DEFAULT_HARNESS:
            raise request.fail("it has its own agent program, which would play instead of the caller")
        config = resolve_env_config({"taskset": taskset})
        agents = agent_config_fields(config)
        if len(agents) != 1:
            raise request.fail(f"an episode has the agents {', '.join(agents)}; only one agent is supported")
        ((agent, preset),) = agents.items()
        if preset.harness is not None:
            raise request.fail(f"its agent is the program {preset.harness.id}, which would play instead of the caller")
        seat = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
        env = load_environment(resolve_env_config({"taskset": taskset, agent: seat}))
        limit = request.number("tasks") or (_TASKS_OF_THE_ENDLESS if env.taskset.INFINITE else None)
        tasks = list(itertools.islice(env.taskset, None if limit is None else int(limit)))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise request.fail(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    except HostingError:
        raise
    except Exception as error:  # the taskset's own code failed
        raise request.fail(f"{type(error).__name__}: {error}") from error
    if not tasks:
        raise request.fail("it has no task")
    return VerifiersFactory(request, EpisodePlayer(env), tasks)


def _probe(factory: VerifiersFactory) -> tuple[Tool, ...]:
    """Return the tools of the first task, after starting it to check that it runs here. Raises HostingError."""
    try:
        game = factory.begin(0)
    except Exception as error:
        raise factory.request.fail(error) from error
    game.close()
    functions = [tool["function"] for tool in game.episode.tools]
    return tuple(Tool(func["name"], func.get("description", ""), func.get("parameters", {})) for func in functions)
