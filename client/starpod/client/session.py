"""The caller's handle of a session, whichever server holds it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, TypeVar, cast

from google.protobuf import struct_pb2

from starpod.client.arguments import expect_exact, group_size, seed_number
from starpod.client.connection import FORK, RENDER, SNAPSHOT
from starpod.client.errors import BadArgument
from starpod.client.observation import Limits, Observation, Transition, Want, as_actions
from starpod.client.recovery.hot_path import submit_one
from starpod.client.recovery.rebuild import new_key
from starpod.client.recovery.recovery import Recovery
from starpod.client.recovery.reset import PendingReset
from starpod.client.recovery.state import BatchResult, SessionState
from starpod.client.snapshot import Snapshot
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import Action, EndReason

T = TypeVar("T")

CLOSE_SECONDS = 2.0


def forwarded(path: str, kind: type[T]) -> T:
    """Return a read-only property with the value of `self.<path>`, which has the type `kind`."""
    return cast(T, property(attrgetter(path)))


class SessionProperties:
    """The properties of a session, which `Session` and `SyncSession` share."""

    __slots__ = ()
    state: SessionState

    id = forwarded("state.session_id", str)
    """Id of the session on its server. It changes when the session is recovered."""
    environment_id = forwarded("state.environment_id", str)
    """Id of the environment, for example sokoban-v1."""
    version = forwarded("state.version", str)
    """Version of the environment."""
    instructions = forwarded("state.instructions", str)
    """Instructions for the agent; they depend on the environment's options."""
    limits = forwarded("state.limits", Limits)
    """Limits of the current episode; 0 means no limit."""
    want = forwarded("state.default_want", Want)
    """The optional fields that observations contain."""
    seed = forwarded("state.seed", int)
    """Seed of the episode's start. Opening with it and `dynamics_seed` gives the same episode."""
    dynamics_seed = forwarded("state.dynamics_seed", int)
    """Seed of the episode's random transitions."""
    member = forwarded("state.member", int)
    """Index of the session in the group that it was opened with, from 0."""

    @property
    def observation(self) -> Observation:
        """The current observation."""
        last_reply = self.state.last
        return last_reply.observation if isinstance(last_reply, Transition) else last_reply

    done = forwarded("state.done", bool)
    """Whether the episode is over. `reset` starts the next one."""

    @property
    def end_reason(self) -> EndReason:
        """Reason for which the episode ended; NONE while it is running."""
        last_reply = self.state.last
        return last_reply.end_reason if isinstance(last_reply, Transition) else EndReason.NONE

    step_index = forwarded("state.step_index", int)
    """Number of turns taken in the episode."""
    address = forwarded("state.replica.address", str)
    """Address of the server that currently holds the session."""
    closed = forwarded("state.closed", bool)
    """Whether the session was closed."""
    recoveries = forwarded("state.recoveries", int)
    """Number of times that the session was recovered."""

    def _repr_html_(self) -> str:
        state = f"over: {self.end_reason.name}" if self.done else f"turn {self.step_index + 1}"
        return (
            f"{self.observation._repr_html_()}<p>{html.escape(f'{self.environment_id}, seed {self.seed}, {state}')}</p>"
        )


class Session(SessionProperties):
    """A session in an environment: one episode at a time, and a new one after each `reset`.

    `Fleet.open`, `Fleet.restore` and `fork` make sessions. Calls on one session run in the order in which they were
    made; calls on different sessions run concurrently. If the server is lost, the session moves to another server, and
    the caller only notices a slow call. A session to which the program no longer holds a reference is closed.
    """

    __slots__ = ("__weakref__", "_recovery", "state")

    def __init__(self, recovery: Recovery, state: SessionState) -> None:
        self._recovery = recovery
        self.state = state

    def __repr__(self) -> str:
        return repr(self.state)

    # --- calls -----------------------------------------------------------------------------------------------------

    async def step(self, actions: Action | Iterable[Action], *, want: Want | None = None) -> Transition:
        """Play one turn.

        Args:
            actions: one action, or several to execute in order until one ends the episode.
            want: optional fields of the reply to this turn; None uses the session's fields.

        Returns:
            The transition. An action that the environment rejects is an outcome with `valid=False`, not an error.

        Raises:
            EpisodeOver: the episode is over; call `reset`.
            TypeError: an action is not of a type of `Action`.
        """
        turn = (actions,) if type(actions) is str else as_actions(actions)
        state = self.state
        if state.busy:
            await state.acquire()
        (transition,) = await submit_one(state, turn, want)
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
        """Start a new episode.

        Args:
            seed: seed of the start; None lets the server draw it.
            dynamics_seed: seed of the random transitions; None lets the server derive it from seed and `member`.
            options: options of the environment; None keeps the current ones.
            want: optional fields of observations; None keeps the current ones.
            limits: limits of the episode; None keeps the current ones.

        Returns:
            The first observation.
        """
        state = self.state
        changes = pb.ResetRequest(options=options_struct(options), limits=limits.to_proto() if limits else None)
        if want is not None:
            changes.want.CopyFrom(state.message_of(want))
        seeds = seed_number("seed", seed), seed_number("dynamics_seed", dynamics_seed)
        result: BatchResult[Observation] = BatchResult(state.replica.loop.create_future())
        if state.busy:
            await state.acquire()
        PendingReset(
            self._recovery, state, *seeds, changes=changes, want=want, options=options, result=result, slot=0
        ).submit()
        return (await result.all())[0]

    async def render(self, mode: str = "text") -> str | bytes:
        """Render the current state: a str for the modes "text" and "html", the bytes of an image for "png"."""
        state = self.state

        async def render() -> str | bytes:
            response = await self._recovery.call(
                state, RENDER, lambda: pb.RenderRequest(session_id=state.session_id, mode=mode)
            )
            return response.data.decode() if response.mime.startswith("text/") else response.data

        return await self._recovery.run_in_turn(state, render)

    async def fork(self, count: int = 1, *, reseed: bool = False, dynamics_seeds: Iterable[int] = ()) -> list[Session]:
        """Copy the current state into new sessions.

        Args:
            count: number of copies.
            reseed: give each copy a new random state. By default copies share the random state of the original, so the
                same actions lead to the same transitions.
            dynamics_seeds: with `reseed`, one seed per copy. If empty, the server derives them from the dynamics seed
                and the step index, so forking the same state again gives the same seeds.

        Returns:
            The new sessions, on the same server.
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
            await self._recovery.checkpoints.new(copies)
            return [Session(self._recovery, copy) for copy in copies]

        return await self._recovery.run_in_turn(state, fork)

    async def snapshot(self) -> Snapshot:
        """Serialise the whole state. `Fleet.restore` continues from it, also in another fleet."""
        state = self.state

        async def snapshot() -> Snapshot:
            response = await self._recovery.call(
                state, SNAPSHOT, lambda: pb.SnapshotRequest(session_id=state.session_id)
            )
            return Snapshot.from_proto(response.snapshot)

        return await self._recovery.run_in_turn(state, snapshot)

    async def close(self) -> None:
        """End the session. Further calls of `close` do nothing."""
        await self._recovery.close_sessions([self.state], CLOSE_SECONDS)


def _copy(state: SessionState, message: pb.Session, *, reseed: bool) -> SessionState:
    """Return the state of a session that Fork created. `message` describes it in the reply to Fork."""
    history = state.history
    if history is not None:
        history = history.copy()
        if reseed:
            history.reseed(message.dynamics_seed)
    copy = SessionState(
        state.replica,
        message,
        environment_id=state.environment_id,
        version=state.version,
        instructions=state.instructions,
        limits=state.limits,
        want=state.default_want,
        history=history,
        checkpoints=state.checkpoints,
    )
    if state.done:
        copy.last = state.last
    return copy


def options_struct(options: Mapping[str, Any] | None) -> struct_pb2.Struct | None:
    """Convert options to a message. Raises BadArgument for a value that is not JSON or would be rounded."""
    if options is None:
        return None
    struct = struct_pb2.Struct()
    try:
        expect_exact(dict(options))
        struct.update(dict(options))
    except (TypeError, ValueError) as error:
        raise BadArgument(f"Options must be JSON values: {error}", violations=[("options", str(error))]) from None
    return struct
