"""Class `process`: an episode in a separate process, so that a crash, leak or hang costs only one session."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from starpod.env_server.authoring.environment import Environment
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import EnvironmentRaised
from starpod.env_server.episodes.live_episode import LiveEpisode, Pictures, Want
from starpod.env_server.processes.child_process import ChildProcess
from starpod.env_server.processes.hosts import HostDied, ResetPlan, Started
from starpod.env_server.sandbox.sandbox import Sandbox
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import MAX_REWARD, Action

M = TypeVar("M", pb.ResetResponse, pb.Observation, pb.Transition)


class ProcessHost:
    """Host that runs one episode in a child process, whose replies it does not trust."""

    episode: LiveEpisode | None = None

    def __init__(self, environment: type[Environment], sandbox: Sandbox) -> None:
        self._environment = environment
        self._sandbox = sandbox
        self._child = ChildProcess(environment, sandbox)

    async def reset(self, plan: ResetPlan) -> Started:
        limits = plan.limits
        # only options that were given, as in a snapshot
        options = plan.options.model_dump(mode="json", exclude_unset=True)
        arguments = [options, [limits.max_turns, limits.max_actions_per_turn, limits.max_actions]]
        data = await self._child.call("reset", *arguments, plan.seed, plan.dynamics_seed, _want_flags(plan.want))
        response = self._message(pb.ResetResponse, data)
        return Started(response.session.observation, response.instructions)

    async def turn(self, actions: list[Action], want: Want) -> pb.Transition:
        request = pb.StepRequest(actions=[convert.action_to(action) for action in actions])
        data = await self._child.call("turn", request.SerializeToString(), _want_flags(want))
        transition = self._message(pb.Transition, data)
        rewards = [transition.reward, *transition.reward_parts.values()]
        self._expect_numbers("reward", *rewards, *(outcome.reward for outcome in transition.outcomes))
        self._expect_numbers("score", transition.observation.score)
        return transition

    async def observe(self, want: Want, pictures: Pictures | None = None) -> pb.Observation:
        return self._message(pb.Observation, await self._child.call("observe", _want_flags(want)))

    async def render(self, mode: str) -> str | bytes:
        picture = await self._child.call("render", mode)
        if not isinstance(picture, bytes if mode == "png" else str):
            raise self._child.distrust(f"no {mode} for a picture")
        return picture

    async def save(self) -> bytes:
        """Return the whole episode as bytes. Raises StateTooLarge."""
        data = await self._child.call("save")
        if not isinstance(data, bytes):
            raise self._child.distrust("no bytes for a state")
        return data

    async def load(self, data: bytes, *, rehearse: bool = False) -> str:
        """Load a saved episode, and return its instructions. A forged state can only break its own process.

        Raises:
            StateError: the data is not a saved episode.
        """
        return str(await self._child.call("load", data))

    async def fork(self, dynamics_seed: int | None) -> ProcessHost:
        copy = ProcessHost(self._environment, self._sandbox)
        try:
            state = await self.save()
            try:
                await copy.load(state)
                if dynamics_seed is not None:
                    await copy._child.call("reseed", dynamics_seed)
            except HostDied as death:
                raise EnvironmentRaised.of_copy(death) from death
        except BaseException:
            copy.close()
            raise
        return copy

    def close(self) -> None:
        self._child.close()

    def _message(self, kind: type[M], data: Any) -> M:
        try:
            return kind.FromString(data)
        except (DecodeError, TypeError) as error:
            raise self._child.distrust(f"no {kind.__name__}") from error

    def _expect_numbers(self, what: str, *values: float) -> None:
        if bad_values := [value for value in values if not abs(value) <= MAX_REWARD]:
            raise self._child.distrust(f"a {what} of {bad_values[0]}")


def _want_flags(want: Want) -> list[bool]:
    return [want.valid_actions, want.state_key, want.expert_action, want.score, want.image]
