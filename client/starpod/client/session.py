"""One session as its caller holds it, wherever it lives at the moment."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import struct_pb2

from starpod.client.arguments import group_size, seed_number
from starpod.client.connection import FORK, RENDER, SNAPSHOT
from starpod.client.errors import BadArgument
from starpod.client.history import History, Reseeded, first_reply
from starpod.client.observation import Action, EndReason, Limits, Observation, Transition, Want, as_actions
from starpod.client.recovery.hot_path import submit_one
from starpod.client.recovery.rebuild import new_key
from starpod.client.recovery.recovery import Recovery
from starpod.client.recovery.reset import PendingReset
from starpod.client.recovery.state import BatchResult, SessionState
from starpod.client.snapshot import Snapshot
from starpod.v1 import environment_pb2 as pb

CLOSE_SECONDS = 2.0


class Session:
    """One agent's place in an environment: an episode now, another after `reset`.

    Made by `Fleet.open`, `Fleet.restore` and `fork`. Calls on one session run one after the other, in the order in
    which they were made; calls on different sessions run together. If its server is lost, the session moves to another
    one and the caller sees a slow call.
    """

    __slots__ = ("__weakref__", "_recovery", "state")

    def __init__(self, recovery: Recovery, state: SessionState) -> None:
        self._recovery = recovery
        self.state = state

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Of the session on its server; another one after a recovery."""
        return self.state.session_id

    @property
    def environment_id(self) -> str:
        return self.state.environment_id

    @property
    def version(self) -> str:
        """Of the environment."""
        return self.state.version

    @property
    def instructions(self) -> str:
        """For the agent, with the options in force."""
        return self.state.instructions

    @property
    def limits(self) -> Limits:
        """Those in force; 0 means none."""
        return self.state.limits

    @property
    def want(self) -> Want:
        """What its observations carry."""
        return self.state.wanted

    @property
    def seed(self) -> int:
        """Of the episode; opening again with it and `dynamics_seed` gives the same episode."""
        return self.state.seed

    @property
    def dynamics_seed(self) -> int:
        """Of the episode's random transitions."""
        return self.state.dynamics_seed

    @property
    def member(self) -> int:
        """Place in the group that it was opened with, from 0."""
        return self.state.member

    @property
    def observation(self) -> Observation:
        """What the agent sees now."""
        last = self.state.last
        return last.observation if isinstance(last, Transition) else last

    @property
    def done(self) -> bool:
        """Whether the episode is over: `reset` starts the next one."""
        return self.state.done

    @property
    def end_reason(self) -> EndReason:
        """Why the episode is over; NONE while it is not."""
        last = self.state.last
        return last.end_reason if isinstance(last, Transition) else EndReason.NONE

    @property
    def step_index(self) -> int:
        """Turns taken in the episode."""
        return self.state.step_index

    @property
    def address(self) -> str:
        """The server that holds it now."""
        return self.state.replica.address

    @property
    def closed(self) -> bool:
        return self.state.closed

    @property
    def recoveries(self) -> int:
        """How often it was brought back after a loss."""
        return self.state.recoveries

    def __repr__(self) -> str:
        return repr(self.state)

    def _repr_html_(self) -> str:
        """What the agent sees, and where the episode stands, for notebooks."""
        state = f"over: {self.end_reason.name}" if self.done else f"turn {self.step_index + 1}"
        return (
            f"{self.observation._repr_html_()}<p>{html.escape(f'{self.environment_id}, seed {self.seed}, {state}')}</p>"
        )

    # --- calls -----------------------------------------------------------------------------------------------------

    async def step(self, actions: Action | Iterable[Action], *, want: Want | None = None) -> Transition:
        """Plays one turn: one action, or several in order until one ends the episode.

        A bad action is an outcome with `valid=False`, not an error. Raises EpisodeOver after the end.
        `want` holds for this turn alone.
        """
        taken = (actions,) if type(actions) is str else as_actions(actions)
        state = self.state
        if state.busy:
            await state.acquire()
        (transition,) = await submit_one(state, taken, want)
        if isinstance(transition, BaseException):
            raise transition
        return transition

    async def reset(
        self,
        *,
        seed: int | None = None,
        dynamics_seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        want: Want | None = None,
        limits: Limits | None = None,
    ) -> Observation:
        """Starts a new episode and returns its first observation. Options, want and limits stay unless given."""
        state = self.state
        request = pb.ResetRequest(
            seed=seed_number("seed", seed),
            dynamics_seed=seed_number("dynamics_seed", dynamics_seed),
            options=options_struct(options),
            limits=limits.to_proto() if limits else None,
        )
        if want is not None:
            keyed = state.history is not None and state.history.root.want.state_key
            request.want.CopyFrom(want.to_proto(state_key=keyed))
        result: BatchResult[Observation] = BatchResult(state.replica.loop.create_future())
        if state.busy:
            await state.acquire()
        PendingReset(self._recovery, state, request, want=want, options=options, result=result, slot=0).submit()
        return (await result.all())[0]

    async def render(self, mode: str = "text") -> str | bytes:
        """One frame: str for "text" and "html", the bytes of an image for "png"."""
        state = self.state

        async def render() -> str | bytes:
            response = await self._recovery.call(
                state, RENDER, lambda: pb.RenderRequest(session_id=state.session_id, mode=mode)
            )
            return response.data.decode() if response.mime.startswith("text/") else response.data

        return await self._recovery.alone(state, render)

    async def fork(self, count: int = 1, *, reseed: bool = False, dynamics_seeds: Iterable[int] = ()) -> list[Session]:
        """Copies of the present state in new sessions.

        With `reseed` each copy gets luck of its own (from `dynamics_seeds`, one per copy, if given), else the same
        actions give the same luck as in the original.
        """
        state, seeds = self.state, tuple(dynamics_seeds)
        count = group_size("count", count)

        async def fork() -> list[Session]:
            response = await self._recovery.call(
                state,
                FORK,
                lambda: pb.ForkRequest(
                    session_id=state.session_id,
                    epoch=state.epoch,
                    step_index=state.step_index,
                    count=count,
                    randomness=pb.FORK_RANDOMNESS_RESEED if reseed else pb.FORK_RANDOMNESS_KEEP,
                    dynamics_seeds=seeds,
                    key=new_key(),
                ),
            )
            copies = [_copy(state, message, reseed=reseed) for message in response.sessions]
            await self._recovery.checkpoint_all(copies)
            return [Session(self._recovery, copy) for copy in copies]

        return await self._recovery.alone(state, fork)

    async def snapshot(self) -> Snapshot:
        """The whole state as bytes, for `Fleet.restore` here or anywhere else."""
        state = self.state

        async def snapshot() -> Snapshot:
            response = await self._recovery.call(
                state, SNAPSHOT, lambda: pb.SnapshotRequest(session_id=state.session_id)
            )
            return Snapshot.from_proto(response.snapshot)

        return await self._recovery.alone(state, snapshot)

    async def close(self) -> None:
        """Ends the session. Harmless to repeat."""
        await self._recovery.close_sessions([self.state], CLOSE_SECONDS)


def _copy(state: SessionState, message: pb.Session, *, reseed: bool) -> SessionState:
    """The state of a copy, as Fork has opened it."""
    history = state.history
    if history is not None:
        history = history.copy()
        if reseed:
            history = History(Reseeded(history, message.dynamics_seed), first_reply(message.observation))
    copy = SessionState(
        state.replica,
        message,
        environment_id=state.environment_id,
        version=state.version,
        instructions=state.instructions,
        limits=state.limits,
        want=state.wanted,
        history=history,
        checkpoints=state.checkpoints,
    )
    if state.done:
        copy.last = state.last
    return copy


def options_struct(options: Mapping[str, Any] | None) -> struct_pb2.Struct | None:
    """Options as they travel. Raises BadArgument for what is no JSON."""
    if options is None:
        return None
    struct = struct_pb2.Struct()
    try:
        struct.update(dict(options))
    except (TypeError, ValueError) as error:
        raise BadArgument(f"Options must be JSON values: {error}", violations=[("options", str(error))]) from None
    return struct
