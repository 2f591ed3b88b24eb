"""Host any Gymnasium environment with supported spaces: `starpod serve gymnasium:FrozenLake-v1`."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.spaces import Discrete

from starpod.env_server.authoring.environment import (
    Concurrency,
    EnvironmentOptions,
    EnvironmentSpec,
    Limits,
    OptionsError,
    digest_observation,
)
from starpod.env_server.hosting.gymnasium_game import GymnasiumFactory, GymnasiumGame, SpaceConversion, make
from starpod.env_server.hosting.hosted import Hosted, ProbeResult, package_version, publish, starpod_id
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
from starpod.env_server.hosting.spaces import UnsupportedSpace, reader, words, writer
from starpod.v1.values import Image

_MOST_NAMES = 256
_PROBED_STEPS = 40
_PROBED_STARTS = 16
_TOLD = ("description", "action space", "observation space", "starting state", "rewards", "episode end")
_LONGEST_DESCRIPTION = 6_000
_MAKE_ARGUMENTS = ("max_episode_steps",)
"""Arguments of gymnasium.make itself, not of the environment's constructor."""


def host(text: str, probed: str = "") -> type[Hosted[Any]]:
    """Return the environment class for `ID?argument=value#setting=value`. Raises HostingError.

    `probed` is the encoded ProbeResult if another process has already probed the environment.
    """
    request = HostingRequest.parse(text, ("actions", "observation", "render", "instructions", "info"))
    gym_spec = _find(request)
    creator = _creator(request, gym_spec)
    signature = constructor(creator)
    check_arguments(request, signature, _MAKE_ARGUMENTS)
    render_arguments = _render_mode(request, creator)
    environment = make(request, gym_spec, {**request.arguments, **render_arguments})
    try:
        most_steps = _most_steps(request, environment)
        plan = _plan(request, gym_spec, environment)
        instructions = _instructions(request, gym_spec, environment, plan)
    except UnsupportedSpace as error:
        raise request.fail(error) from error
    finally:
        environment.close()
    options = options_model(request, signature, {**gym_spec.kwargs, **request.arguments}, ("render_mode",))

    factory = GymnasiumFactory(request, gym_spec, render_arguments, plan)
    module = getattr(creator, "__module__", "") or ""
    probe_result = ProbeResult(**json.loads(probed)) if probed else _probe(factory, module)
    name, number = gym_spec.id.rpartition(":")[2], gym_spec.version or 0
    short_name = re.sub(r"-v[0-9]+$", "", name)
    spec = EnvironmentSpec(
        id=starpod_id(request, "gymnasium", short_name, number),
        version=probe_result.version,
        title=f"{name} of Gymnasium",
        instructions=instructions,
        actions=plan.names,
        grammar="" if plan.names else words(plan.action_space),
        observation_modes=(),
        render_modes=("text", "png") if render_arguments.get("render_mode") == "rgb_array" else ("text",),
        limits=Limits(max_turns=most_steps),
        # Gymnasium's own environments take microseconds and cannot hang. Others might.
        concurrency=Concurrency.INLINE if module.startswith("gymnasium.") else Concurrency.PROCESS,
    )
    base = NamedGymnasiumEnvironment if plan.names else GymnasiumEnvironment
    return publish(base, request, spec, probe_result, module, Options=options, factory=factory)


def _most_steps(request: HostingRequest, first: gymnasium.Env[Any, Any]) -> int:
    """Return the maximum number of steps of an episode, set by a time limit or by the environment; 0 if unknown.

    An environment may know its limit, which depends on the start, and its spaces only after a reset.
    """
    limits: list[Any] = []
    for seed in range(_PROBED_STARTS):
        try:
            first.reset(seed=seed)
        except Exception as error:
            raise request.fail(f"its reset raised {type(error).__name__}: {error}") from error
        time_limit = first.spec and first.spec.max_episode_steps
        limits.append(time_limit or getattr(first.unwrapped, "max_steps", 0))
        if time_limit or not limits[0]:
            break
    return max(limits) if all(isinstance(limit, int) for limit in limits) else 0


def installed(pattern: str) -> list[str]:
    """Return the ids that match, in the newest version of each environment. Raises HostingError.

    The pattern is `PATTERN`, or `MODULE:PATTERN` for the ids of that package. `*` matches any text.
    """
    module, _, name = pattern.rpartition(":")
    if module:
        import_named(HostingRequest.parse(pattern, ()), module)
    package = f"{module.partition('.')[0] or 'gymnasium'}."
    newest_ids: dict[str, str] = {}
    for id in sorted(gymnasium.registry, key=lambda id: gymnasium.registry[id].version or 0):
        point = gymnasium.registry[id].entry_point
        if (point if isinstance(point, str) else getattr(point, "__module__", "")).startswith(package):
            newest_ids[id.rpartition("-v")[0]] = id
    return [f"{module}:{id}" if module else id for id in fitting(name, newest_ids.values())]


class GymnasiumEnvironment(Hosted[GymnasiumGame]):
    """Environment with one Gymnasium environment per session."""

    factory: ClassVar[GymnasiumFactory]
    options: EnvironmentOptions

    def begin(self, dynamics_seed: int) -> GymnasiumGame:
        try:
            return self.factory.begin(self.options.model_dump(), self.seed, dynamics_seed)
        except (HostingError, UnsupportedSpace) as error:
            raise OptionsError(str(error)) from error

    def render(self, mode: str = "text") -> str | bytes:
        return self.game.draw() if mode == "png" else self.game.text

    def state_key(self) -> bytes:
        return digest_observation(self.game.parts)


class NamedGymnasiumEnvironment(GymnasiumEnvironment):
    """Environment whose actions have names. A mask in `info` may tell which of them currently have an effect."""

    def valid_actions(self) -> Sequence[str]:
        mask = self.game.info.get("action_mask")
        if not isinstance(mask, np.ndarray) or mask.shape != (len(self.spec.actions),):
            return self.spec.actions
        return [name for name, allowed in zip(self.spec.actions, mask.tolist(), strict=True) if allowed]


def _find(request: HostingRequest) -> EnvSpec:
    """Return the registration of an id, or of `MODULE:ID` if a module registers it."""
    module, _, name = request.name.rpartition(":")
    if module:
        import_named(request, module)
    try:
        return gymnasium.spec(name)
    except gymnasium.error.Error as error:
        latest_ids = {id.rpartition("-v")[0]: id for id in gymnasium.registry}
        if name in latest_ids:
            return gymnasium.spec(latest_ids[name])
        versions = [id for id in gymnasium.registry if id.rpartition("-v")[0] == name.rpartition("-v")[0]]
        if "/" in name and not any(id.startswith(name.partition("/")[0] + "/") for id in gymnasium.registry):
            raise request.fail(
                f"no installed package registers {name.partition('/')[0]}/...; install one that does, and name its "
                f"module first: gymnasium:MODULE:{name}"
            ) from error
        raise request.fail(f"Gymnasium has no such id{nearest(name, versions or list(gymnasium.registry))}") from error


def _creator(request: HostingRequest, gym_spec: EnvSpec) -> Callable[..., Any]:
    try:
        point = gym_spec.entry_point
        return load_env_creator(point) if isinstance(point, str) else point  # type: ignore[return-value]
    except ModuleNotFoundError as error:
        raise request.fail(f"it needs the package {error.name}: pip install {error.name}") from error
    except (ImportError, gymnasium.error.Error) as error:
        raise request.fail(error) from error


def _render_mode(request: HostingRequest, creator: Callable[..., Any]) -> dict[str, str]:
    """Return the constructor's render_mode. An environment has only one, so text and pictures exclude each other."""
    text = request.choice("observation", "text", "json", "ansi") == "ansi"
    picture = request.choice("render", "no", "png") == "png"
    if text and picture:
        raise request.fail("it draws either text (observation=ansi) or pictures (render=png); choose one")
    if not text and not picture:
        return {}
    mode = "ansi" if text else "rgb_array"
    modes = getattr(creator, "metadata", {"render_modes": [mode]}).get("render_modes", [])
    if mode not in modes:
        raise request.fail(f"it does not render {mode}; it has {', '.join(modes) or 'no render mode'}")
    return {"render_mode": mode}


def _plan(request: HostingRequest, gym_spec: EnvSpec, first: gymnasium.Env[Any, Any]) -> SpaceConversion:
    space = first.action_space
    read = reader(space)
    names: tuple[str, ...] = ()
    if isinstance(space, Discrete) and space.n <= _MOST_NAMES:
        numbers = range(int(space.start), int(space.start + space.n))
        names = tuple(map(str, numbers))
        if text := request.settings.get("actions"):
            names = tuple(name.strip() for name in text.split(","))
            if len(names) != len(numbers) or len({name.lower() for name in names if name}) != len(numbers):
                raise request.fail(f"actions={text!r} must be {len(numbers)} different names, separated by commas")
    elif "actions" in request.settings:
        raise request.fail(f"its actions cannot be named: they are {words(space)}")
    elements = [read(number) for number in numbers] if names else []
    return SpaceConversion(
        space,
        first.observation_space,
        names,
        dict(zip(names, elements, strict=True)),
        read,
        writer(first.observation_space),
        request.choice("observation", "text", "json", "ansi"),
        request.choice("info", "yes", "no") == "yes",
        request.number("success_at", gym_spec.reward_threshold),
    )


def _instructions(
    request: HostingRequest, gym_spec: EnvSpec, first: gymnasium.Env[Any, Any], plan: SpaceConversion
) -> str:
    """Return the package's description of the environment, followed by the forms of observations and actions."""
    description = ""
    if request.choice("instructions", "full", "brief") == "full":
        # A class without a docstring would inherit that of gymnasium.Env, which explains Gymnasium.
        kinds = (kind for kind in type(first.unwrapped).__mro__ if kind.__doc__ and not issubclass(gymnasium.Env, kind))
        description = _description(inspect.cleandoc(getattr(next(kinds, None), "__doc__", None) or ""))
    lines = [f"This is {gym_spec.id}.", description]
    if plan.observation == "ansi":
        lines.append("You see it drawn in text.")
    else:
        lines.append(f"You see {words(first.observation_space)}.")
    if plan.names and "actions" in request.settings:
        meanings = ", ".join(f"{name} ({number})" for name, number in plan.by_name.items())
        lines.append(f"An action is one of these names: {meanings}.")
    else:
        lines.append(f"An action is {words(plan.action_space)}.")
    return "\n".join(line for line in lines if line)


def _description(doc: str) -> str:
    """Return the sections of a docstring that explain how to play, or all of it if it has no sections."""
    introduction, *sections = re.split(r"^[ \t]*#+ +(.+)$", doc, flags=re.MULTILINE)
    paragraphs = [introduction.strip()]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title.strip().lower() in _TOLD:
            paragraphs.append(f"{title.strip()}: {body.strip()}")
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)[:_LONGEST_DESCRIPTION]


def _probe(factory: GymnasiumFactory, module: str) -> ProbeResult:
    """Find out by playing random turns whether the environment is deterministic and whether deep copies of it work."""
    request = factory.request
    try:
        games = [factory.begin({}, 1, 2) for _ in range(3)]
        space = games[0].plan.action_space
        space.seed(1)
        actions = [space.sample() for _ in range(_PROBED_STEPS)]
        first_play, second_play = (_play_record(game, actions) for game in games[:2])
        if "png" in request.settings.get("render", ""):
            games[0].draw()
        middle = len(first_play) // 2
        start_play = _play_record(games[2], actions[:middle])
        try:
            copied_game = games[2].copy()
            ends = [_play_record(game, actions[middle:]) for game in (copied_game, games[2])]
            copies = ends[0] == ends[1] and (first_play != second_play or start_play + ends[0] == first_play)
        except Exception:  # any exception means that copies do not work
            copies = False
        for game in games:
            game.close()
    except HostingError:
        raise
    except Exception as error:
        raise request.fail(f"it raised {type(error).__name__} when it was tried: {error}") from error
    is_repeatable = first_play == second_play and not factory.gym_spec.nondeterministic
    return ProbeResult(package_version(module), is_repeatable, copies).overridden(request)


def _play_record(game: GymnasiumGame, actions: Sequence[Any]) -> list[Any]:
    """Play actions until the episode ends, and return a record of the observations."""
    record: list[Any] = []
    for action in actions:
        seen, reward, terminated, truncated, _ = game.environment.step(action)
        images: list[Image] = []
        record.append((json.dumps(game.write(seen, images)), images, float(reward), bool(terminated), bool(truncated)))
        if terminated or truncated:
            break
    return record
