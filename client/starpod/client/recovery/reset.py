"""A reset in flight, and the update of its session when the reply arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from starpod.client.connection import Reset, StartRow
from starpod.client.errors import BadArgument, StarpodError
from starpod.client.history import History, Opened, Origin, Reply, first_reply, first_row
from starpod.client.nearest import explain_options
from starpod.client.observation import Limits, Observation, Want
from starpod.client.pool.replica import Replica
from starpod.client.recovery.checkpoints import SessionCheckpoints
from starpod.client.recovery.rebuild import overrides
from starpod.client.recovery.state import CLOSED, BatchResult, RetryState, SessionState
from starpod.v1 import environment_pb2 as pb


class ResetRecovery(Protocol):
    """The part of Recovery that a reset uses."""

    checkpoints: SessionCheckpoints

    def reset_refused(self, pending: PendingReset, error: StarpodError) -> None: ...


class PendingReset(Reset):
    """A reset in flight. Its reply updates the session even if the caller was cancelled.

    Args:
        seed, dynamics_seed: as in Reset.
        changes: the message's options, want and limits.
        want: the caller's `want`; None keeps the session's.
        options: the caller's options, for the error message if they are bad.
        result, slot: receive the first observation.
    """

    __slots__ = ("_changes", "_home", "_options", "_recovery", "_want", "result", "retry", "slot", "state")

    def __init__(
        self,
        recovery: ResetRecovery,
        state: SessionState,
        seed: int | None,
        dynamics_seed: int | None,
        *,
        changes: pb.ResetRequest,
        want: Want | None,
        options: Mapping[str, Any] | None,
        result: BatchResult[Observation],
        slot: int,
    ) -> None:
        super().__init__(state, seed, dynamics_seed, plain=not changes.ByteSize())
        self.state = state
        self.result = result
        self.slot = slot
        self.retry: RetryState | None = None
        self._recovery = recovery
        self._changes = changes
        self._want = want
        self._options = options
        # Server and id of the old episode, set when the reset first fails.
        self._home: tuple[Replica, pb.Session] | None = None

    def submit(self) -> None:
        """Send the reset to the session's current server. No other call of the session may be in flight."""
        state = self.state
        state.busy = True
        if state.closed:
            self.fail(RuntimeError(CLOSED))
            return
        state.replica.submit(self)

    def request(self) -> pb.ResetRequest:
        request = super().request()
        request.MergeFrom(self._changes)
        return request

    def started(self, start: StartRow) -> None:
        state, history = self.state, self.state.history
        state.retry = None
        state.seed, state.dynamics_seed, state.instructions = start.seed, start.dynamics_seed, start.instructions
        state.epoch, state.step_index = state.epoch + 1, 0
        state.last = Observation((start.text,), start.state_key if state.show_key else b"")
        if history is not None:
            self._begin_log(
                history, _limits_of(state, history), first_row(start.text, start.state_key, start.instructions)
            )
        self._go_on()

    def answered(self, response: pb.ResetResponse) -> None:
        state, want = self.state, self._want
        if want is not None:
            state.default_want, state.show_key = want, want.state_key
        state.instructions = response.instructions
        state.limits = Limits.from_proto(response.limits)
        state.begin(response.session)
        if state.history is not None:
            first = first_reply(response.session.observation, response.instructions)
            self._begin_log(state.history, response.limits, first)
        self._go_on()

    def _go_on(self) -> None:
        self._home = None
        if self.state.checkpoints:
            self._recovery.checkpoints.first(self.state, self.finish, self.fail)
        else:
            self.finish()

    def finish(self) -> None:
        """Pass the first observation to the caller."""
        assert isinstance(self.state.last, Observation)
        self.result.put(self.slot, self.state.last)
        self.state.release()

    def refused(self, error: StarpodError) -> None:
        state = self.state
        if self._home is None:
            old_session = pb.Session(session_id=state.session_id, epoch=state.epoch, step_index=state.step_index)
            self._home = state.replica, old_session
        self._recovery.reset_refused(self, error)

    def fail(self, error: BaseException) -> None:
        """End the reset with an error; the old episode continues.

        Recovery may have opened a new session without replaying the old episode. In that case the state refers to the
        lost session again, so that the next call fails and recovers the session with its steps.
        """
        state = self.state
        if isinstance(error, BadArgument):
            error = explain_options(error, _spec_of(state), self._options)
        if self._home is not None and state.session_id != self._home[1].session_id:
            state.replica.closer.close_later([state.session_id])
            state.move_to(*self._home)
        self.result.fail(self.slot, error)
        state.release()

    def _begin_log(self, history: History, limits: pb.Limits, first: Reply) -> None:
        """Begin the log of the new episode."""
        state, changes, before = self.state, self._changes, history.origin
        origin: Origin
        if isinstance(before, Opened):
            origin = Opened(
                before.environment_id,
                before.version,
                changes.options if changes.HasField("options") else before.options,
                state.seed,
                state.dynamics_seed,
                limits,
                changes.want if changes.HasField("want") else before.want,
                before.lease_seconds,
            )
        else:
            reset = pb.ResetRequest()
            if before.reset is not None:
                reset.CopyFrom(before.reset)
            if changes.HasField("options"):
                reset.options.CopyFrom(changes.options)
            if changes.HasField("want"):
                reset.want.CopyFrom(changes.want)
            reset.seed, reset.dynamics_seed = state.seed, state.dynamics_seed
            reset.limits.CopyFrom(overrides(limits))
            origin = replace(before, reset=reset)
        history.begin(origin, None if state.checkpoints else first)


def _limits_of(state: SessionState, history: History) -> pb.Limits:
    """Return the limits of the session's episodes as a message, which exists already if they are logged."""
    if isinstance(history.origin, Opened):
        return history.origin.limits
    limits = state.limits
    return pb.Limits(
        max_turns=limits.max_turns or 0,
        max_actions_per_turn=limits.max_actions_per_turn or 0,
        max_actions=limits.max_actions or 0,
    )


def _spec_of(state: SessionState) -> pb.EnvironmentSpec:
    for spec in state.replica.specs:
        if (spec.id, spec.version) == (state.environment_id, state.version):
            return spec
    return pb.EnvironmentSpec(id=state.environment_id)
