"""Gymnasium `Env` and `VectorEnv` whose environments run on a fleet of servers.

    env = StarpodEnv("127.0.0.1:50051", "frozen_lake-v1")
    envs = gymnasium.make_vec(
        "starpod.client.gymnasium:Starpod-v0", 64, addresses="127.0.0.1:50051", environment_id="sokoban-v1"
    )

The action space is Discrete if the spec names the actions, a Box if actions are tensors of a fixed shape, and otherwise
Text. The observation space is a uint8 Box (height, width, channels) if observations begin with an image, and otherwise
Text.
"""

from __future__ import annotations

import asyncio
import io
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils.seeding import np_random
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import (
    batch_space,
    concatenate,
    create_empty_array,
    create_shared_memory,
    iterate,
    read_from_shared_memory,
    write_to_shared_memory,
)

from starpod.client.errors import UnknownEnvironment
from starpod.client.observation import Limits, Observation, Transition, Want
from starpod.client.session import Session
from starpod.client.sync import SyncFleet
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import Action, Image

MAX_TEXT = 1 << 20
METADATA: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}


class AnyText(spaces.Text):
    """A space of texts with any characters. Samples are short and alphanumeric."""

    def __init__(self) -> None:
        super().__init__(min_length=0, max_length=MAX_TEXT)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= MAX_TEXT

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        characters = self.np_random.choice(list(self.character_set), self.np_random.integers(1, 16))
        return "".join(characters)


_SHARED_BYTES = 1 << 18
"""Number of bytes for each observation in the memory that AsyncVectorEnv shares with its processes. The first 4 bytes
hold the length of the text, which follows in UTF-8. All bytes are initialized, so 64 environments take 16 MiB."""


class SharedTexts(Sequence[str]):
    """The current observations of an AsyncVectorEnv, as a view of shared memory. A deep copy is a tuple of str."""

    def __init__(self, memory: Any, count: int) -> None:
        self._memory = memoryview(memory.get_obj()).cast("B")
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self)[place]
        start = range(self._count)[place] * _SHARED_BYTES + 4
        length = int.from_bytes(self._memory[start - 4 : start], "little")
        return str(self._memory[start : start + length], "utf-8")

    def __deepcopy__(self, _: Any) -> tuple[str, ...]:
        return tuple(self)


@create_shared_memory.register(AnyText)
def _create_shared_texts(space: AnyText, n: int = 1, ctx: Any = multiprocessing) -> Any:
    return ctx.Array("B", n * _SHARED_BYTES)


@read_from_shared_memory.register(AnyText)
def _read_shared_texts(space: AnyText, shared_memory: Any, n: int = 1) -> SharedTexts:
    return SharedTexts(shared_memory, n)


@write_to_shared_memory.register(AnyText)
def _write_shared_text(space: AnyText, index: int, value: str, shared_memory: Any) -> None:
    data = value.encode()
    if len(data) > _SHARED_BYTES - 4:
        raise ValueError(
            f"An observation has {len(data):,} bytes, and AsyncVectorEnv's shared memory holds {_SHARED_BYTES - 4:,}: "
            "use AsyncVectorEnv(..., shared_memory=False)."
        )
    start = index * _SHARED_BYTES
    view = memoryview(shared_memory.get_obj()).cast("B")
    view[start : start + 4 + len(data)] = len(data).to_bytes(4, "little") + data


class StarpodEnv(gymnasium.Env[Any, Any]):
    """A Gymnasium environment that plays one session.

    Args:
        addresses: addresses of servers, as in Fleet, or a SyncFleet to share, which `close` leaves open.
        options, want, limits, version: as in Fleet.open. `reset(options=...)` overrides options for that episode.
        render_mode: "ansi" for text, "rgb_array" for an image.
    """

    metadata: dict[str, Any] = METADATA

    def __init__(
        self,
        addresses: str | Sequence[str] | SyncFleet,
        environment_id: str,
        *,
        options: Mapping[str, Any] | None = None,
        want: Want | None = None,
        limits: Limits | None = None,
        version: str = "",
        render_mode: str | None = None,
    ) -> None:
        _check_render_mode(render_mode)
        self.render_mode = render_mode
        self._owns_fleet = not isinstance(addresses, SyncFleet)
        self._fleet = addresses if isinstance(addresses, SyncFleet) else SyncFleet(addresses)
        self._closed = False
        try:
            self._options = dict(options or {})
            (session,) = self._fleet.open(
                environment_id, seed=0, options=self._options, want=want, limits=limits, version=version
            )
            self._session = session.session
            self._codec = Codec(_find_spec(self._fleet, self._session), self._session.observation)
        except BaseException:
            self.close()
            raise
        self.action_space = self._codec.action_space
        self.observation_space = self._codec.observation_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None:
            seed = _draw_seed(self.np_random)
        # Send all options, or overrides of the previous episode would remain.
        all_options = {**self._options, **(options or {})}
        observation = self._fleet.run(self._session.reset(seed=seed, options=all_options))
        return self._codec.observe(observation), self._codec.reset_info(self._session, observation)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        transition = self._fleet.run(self._session.step(self._codec.act(action)))
        observation = transition.observation
        return (
            self._codec.observe(observation),
            transition.reward,
            transition.terminated,
            transition.truncated,
            self._codec.step_info(transition, observation),
        )

    def render(self) -> Any:
        return None if self.render_mode is None else self._fleet.run(_render(self._session, self.render_mode))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._owns_fleet:
            self._fleet.close()
        elif hasattr(self, "_session"):
            self._fleet.run(self._session.close())


class StarpodVectorEnv(VectorEnv[Any, Any, Any]):
    """A Gymnasium vector environment of `num_envs` sessions. Each has the seeds that a single StarpodEnv would have.

    Args:
        autoreset_mode: NEXT_STEP (the next step resets an ended episode and ignores the action), SAME_STEP (the same
            step resets it and puts the final observation and info into info["final_obs"] and info["final_info"]) or
            DISABLED (the caller resets with `options={"reset_mask": mask}`).
        addresses, environment_id, options, want, limits, version, render_mode: as in StarpodEnv.
    """

    metadata: dict[str, Any] = METADATA

    def __init__(
        self,
        num_envs: int = 1,
        addresses: str | Sequence[str] | SyncFleet = (),
        environment_id: str = "",
        *,
        options: Mapping[str, Any] | None = None,
        want: Want | None = None,
        limits: Limits | None = None,
        version: str = "",
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        _check_render_mode(render_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = render_mode
        self._owns_fleet = not isinstance(addresses, SyncFleet)
        self._fleet = addresses if isinstance(addresses, SyncFleet) else SyncFleet(addresses)
        self._sessions: list[Session] = []
        self._options = dict(options or {})

        async def open_all() -> list[Session]:
            arguments: Any = {"options": self._options, "want": want, "limits": limits, "version": version}
            calls = (self._fleet.fleet.open(environment_id, seed=0, **arguments) for _ in range(num_envs))
            return [session for group in await asyncio.gather(*calls) for session in group]

        try:
            self._sessions = self._fleet.run(open_all())
            first_session = self._sessions[0]
            self._codec = Codec(_find_spec(self._fleet, first_session), first_session.observation)
        except BaseException:
            self.close()
            raise
        self.single_action_space = self._codec.action_space
        self.single_observation_space = self._codec.observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._random = [np_random(None)[0] for _ in range(num_envs)]
        self._observations: list[Any] = [None] * num_envs
        self._over = np.zeros(num_envs, dtype=np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        count = self.num_envs
        if seed is None:
            seeds: list[int | None] = [None] * count
        else:
            seeds = [seed + i for i in range(count)] if isinstance(seed, int | np.integer) else list(seed)
        if len(seeds) != count:
            raise ValueError(f"{len(seeds)} seeds for {count} environments: give one for each.")
        options = dict(options or {})
        mask = options.pop("reset_mask", None)
        indices = range(count) if mask is None else _indices(mask, count)
        infos = self._gather(self._reset(indices, seeds, options))
        return self._batch(), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        count, codec = self.num_envs, self._codec
        rewards = np.zeros(count, dtype=np.float64)
        terminated = np.zeros(count, dtype=np.bool_)
        truncated = np.zeros(count, dtype=np.bool_)
        over_indices = np.flatnonzero(self._over)
        if len(over_indices) and self.autoreset_mode is not AutoresetMode.NEXT_STEP:
            raise ValueError(
                f"The episodes of environments {over_indices.tolist()} are over: reset them with reset_mask first."
            )
        action_list = list(iterate(self.action_space, actions))
        if len(action_list) != count:
            raise ValueError(f"{len(action_list)} actions for {count} environments: give one for each.")
        live_indices = np.flatnonzero(~self._over).tolist()
        turns = [codec.act(action_list[i]) for i in live_indices]
        transitions = self._fleet.run(self._fleet.fleet.step_many([self._sessions[i] for i in live_indices], turns))
        infos = self._gather(self._reset(over_indices.tolist()))
        for index, transition in zip(live_indices, transitions, strict=True):
            observation = transition.observation
            self._observations[index] = codec.observe(observation)
            rewards[index] = transition.reward
            terminated[index], truncated[index] = transition.terminated, transition.truncated
            info = codec.step_info(transition, observation)
            if transition.done and self.autoreset_mode is AutoresetMode.SAME_STEP:
                info = {"final_obs": self._observations[index], "final_info": info}
            infos = self._add_info(infos, info, index)
        self._over = terminated | truncated
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            infos = self._gather(self._reset(np.flatnonzero(self._over).tolist()), infos)
        return self._batch(), rewards, terminated, truncated, infos

    def render(self) -> tuple[Any, ...] | None:
        mode = self.render_mode
        if mode is None:
            return None

        async def render_all() -> tuple[Any, ...]:
            return tuple(await asyncio.gather(*(_render(session, mode) for session in self._sessions)))

        return self._fleet.run(render_all())

    def close_extras(self, **_: Any) -> None:
        if self._owns_fleet:
            self._fleet.close()
        else:
            self._fleet.run(self._fleet.fleet.close_sessions(self._sessions))

    def _reset(
        self, indices: Iterable[int], seeds: Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Reset the environments at the indices, store their observations, and return their infos by index."""
        index_list = list(indices)
        if not index_list:
            return {}
        drawn_seeds: list[int] = []
        for index in index_list:
            seed = None if seeds is None else seeds[index]
            if seed is None:
                seed = _draw_seed(self._random[index])
            else:
                self._random[index], _ = np_random(seed)
            drawn_seeds.append(seed)
        all_options = {**self._options, **(options or {})}
        sessions = [self._sessions[index] for index in index_list]
        resets = self._fleet.fleet.reset_many(sessions, drawn_seeds, options=all_options)
        infos = {}
        for index, observation in zip(index_list, self._fleet.run(resets), strict=True):
            self._observations[index] = self._codec.observe(observation)
            self._over[index] = False
            infos[index] = self._codec.reset_info(self._sessions[index], observation)
        return infos

    def _gather(self, by_index: Mapping[int, dict[str, Any]], infos: dict[str, Any] | None = None) -> dict[str, Any]:
        """Add the infos of single environments to the batched infos, and return the batched infos."""
        infos = infos or {}
        for index, info in by_index.items():
            infos = self._add_info(infos, info, index)
        return infos

    def _batch(self) -> Any:
        space = self.single_observation_space
        buffer: Any = create_empty_array(space, self.num_envs)
        return concatenate(space, self._observations, buffer)


class Codec:
    """Converter between an environment's actions and observations and elements of Gymnasium spaces."""

    def __init__(self, spec: pb.EnvironmentSpec, first: Observation) -> None:
        self._names = list(spec.action_space.names)
        self._shows_image = bool(first.parts) and isinstance(first.parts[0], Image)
        tensor = spec.action_space.tensor
        self.action_space: gymnasium.Space[Any]
        if self._names:
            self.action_space = spaces.Discrete(len(self._names))
        elif tensor.dtype and -1 not in tensor.shape:
            self.action_space = spaces.Box(
                tensor.minimum if tensor.HasField("minimum") else -np.inf,
                tensor.maximum if tensor.HasField("maximum") else np.inf,
                tuple(tensor.shape),
                np.dtype(tensor.dtype).type,
            )
        else:
            self.action_space = AnyText()
        self.observation_space: gymnasium.Space[Any]
        if self._shows_image:
            self.observation_space = spaces.Box(0, 255, self.observe(first).shape, np.uint8)
        else:
            self.observation_space = AnyText()

    def act(self, action: Any) -> Action:
        """Convert an element of the action space to an action. Raises ValueError for other values."""
        if self._names:
            if not self.action_space.contains(action):
                hint = f"write a number from 0 to {len(self._names) - 1}"
                if action in self._names:
                    hint = f"write step({self._names.index(action)})"
                choices = ", ".join(f"{number} {name}" for number, name in enumerate(self._names))
                action_text = repr(action) if isinstance(action, str) else action
                raise ValueError(f"There is no action {action_text}: {hint}. The actions are {choices}.")
            return self._names[int(action)]
        return str(action) if isinstance(self.action_space, AnyText) else np.asarray(action)

    def observe(self, observation: Observation) -> Any:
        """Convert an observation to an element of the observation space."""
        if not self._shows_image:
            return observation.text
        image = observation.image
        assert image is not None, "an environment with images returned none"
        return decode_image(image.data)

    def reset_info(self, session: Session, observation: Observation) -> dict[str, Any]:
        return {"instructions": session.instructions, **_optional_fields(observation)}

    def step_info(self, transition: Transition, observation: Observation) -> dict[str, Any]:
        info = {**transition.info, **_optional_fields(observation)}
        info["valid"] = all(outcome.valid for outcome in transition.outcomes)
        info["effective"] = any(outcome.effective for outcome in transition.outcomes)
        if transition.done:
            info["end_reason"] = transition.end_reason.name
            if transition.success is not None:
                info["success"] = transition.success
        return info


def decode_image(data: bytes) -> np.ndarray:
    """Decode an image to a uint8 array of shape (height, width, 3). Requires Pillow."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


async def _render(session: Session, mode: str) -> Any:
    frame = await session.render("text" if mode == "ansi" else "png")
    return frame if isinstance(frame, str) else decode_image(frame)


def _optional_fields(observation: Observation) -> dict[str, Any]:
    """Return the optional fields that the observation contains, by name."""
    fields: dict[str, Any] = {}
    if observation.state_key:
        fields["state_key"] = observation.state_key
    for name in ("valid_actions", "expert_action", "score"):
        value = getattr(observation, name)
        if value is not None:
            fields[name] = value
    return fields


def _draw_seed(random: np.random.Generator) -> int:
    return int(random.integers(1 << 63))


def _check_render_mode(mode: str | None) -> None:
    if mode is not None and mode not in METADATA["render_modes"]:
        raise ValueError(f"render_mode {mode!r} is not one of {', '.join(METADATA['render_modes'])}.")


def _indices(mask: Any, count: int) -> list[int]:
    if not isinstance(mask, np.ndarray) or mask.shape != (count,) or mask.dtype != np.bool_ or not mask.any():
        raise ValueError(f"reset_mask is a bool array of shape ({count},) with at least one True.")
    return [int(index) for index in np.flatnonzero(mask)]


def _find_spec(fleet: SyncFleet, session: Session) -> pb.EnvironmentSpec:
    for spec in fleet.describe():
        if (spec.id, spec.version) == (session.environment_id, session.version):
            return spec
    raise UnknownEnvironment(f"{session.environment_id} {session.version} is gone.")


gymnasium.register(
    id="Starpod-v0",
    entry_point="starpod.client.gymnasium:StarpodEnv",
    vector_entry_point="starpod.client.gymnasium:StarpodVectorEnv",
)
