"""A reset in flight, and the update of its session when the reply arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from starpod.client.connection import RESET, Call
from starpod.client.errors import BadArgument, StarpodError
from starpod.client.history import History, Opened, Restarted, first_reply
from starpod.client.nearest import explain_options
from starpod.client.observation import Limits, Observation, Want
from starpod.client.pool.replica import Replica
from starpod.client.recovery.rebuild import overrides
from starpod.client.recovery.state import CLOSED, BatchResult, RetryState, SessionState
from starpod.v1 import environment_pb2 as pb


class ResetRecovery(Protocol):
    """The part of Recovery that a reset uses."""

    def reset_refused(self, pending: PendingReset, error: StarpodError) -> None: ...
    def checkpoint_first(self, pending: PendingReset) -> None: ...


class PendingReset(Call[pb.ResetRequest, pb.ResetResponse]):
    """A reset in flight. Its reply updates the session even if the caller was cancelled.

    Args:
        recovery: handles errors and checkpoints.
        state: the session.
        request: the message.
        want: the caller's `want`; None keeps the session's.
        options: the caller's options, for the error message if they are bad.
        result, slot: receive the first observation.
    """

    __slots__ = ("_home", "_options", "_recovery", "_want", "result", "retry", "slot", "state")

    def __init__(
        self,
        recovery: ResetRecovery,
        state: SessionState,
        request: pb.ResetRequest,
        *,
        want: Want | None,
        options: Mapping[str, Any] | None,
        result: BatchResult[Observation],
        slot: int,
    ) -> None:
        super().__init__(RESET, request)
        self.state = state
        self.result = result
        self.slot = slot
        self.retry: RetryState | None = None
        self._recovery = recovery
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
        self.message.session_id, self.message.epoch = state.session_id, state.epoch
        state.replica.submit(self)

    def answered(self, response: pb.ResetResponse) -> None:
        state, want = self.state, self._want
        self._home = None
        if want is not None:
            state.default_want, state.show_key = want, want.state_key
        state.instructions = response.instructions
        state.limits = Limits.from_proto(response.limits)
        state.begin(response.session)
        if state.history is not None:
            _begin_log(state.history, self.message, response, checkpoints=state.checkpoints)
        if state.checkpoints:
            self._recovery.checkpoint_first(self)
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
            state.replica.close_later([state.session_id])
            state.move_to(*self._home)
        self.result.fail(self.slot, error)
        state.release()


def _spec_of(state: SessionState) -> pb.EnvironmentSpec:
    for spec in state.replica.specs:
        if (spec.id, spec.version) == (state.environment_id, state.version):
            return spec
    return pb.EnvironmentSpec(id=state.environment_id)


def _begin_log(history: History, request: pb.ResetRequest, response: pb.ResetResponse, *, checkpoints: bool) -> None:
    message, before = response.session, history.start
    origin: Opened | Restarted
    if isinstance(before, Opened):
        origin = Opened(
            before.environment_id,
            before.version,
            request.options if request.HasField("options") else before.options,
            message.seed,
            message.dynamics_seed,
            response.limits,
            request.want if request.HasField("want") else before.want,
            before.lease_seconds,
        )
    else:
        reset = pb.ResetRequest()
        if isinstance(before, Restarted):
            reset.CopyFrom(before.reset)
            before = before.base
        if request.HasField("options"):
            reset.options.CopyFrom(request.options)
        if request.HasField("want"):
            reset.want.CopyFrom(request.want)
        reset.seed, reset.dynamics_seed = message.seed, message.dynamics_seed
        reset.limits.CopyFrom(overrides(response.limits))
        origin = Restarted(before, reset)
    history.begin(origin, None if checkpoints else first_reply(message.observation, response.instructions))
