"""A reset on its way, and what the session becomes when its reply is there."""

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
    """Who helps a reset that does not go well."""

    def reset_refused(self, pending: PendingReset, error: StarpodError) -> None: ...
    def checkpoint_first(self, pending: PendingReset) -> None: ...


class PendingReset(Call[pb.ResetRequest, pb.ResetResponse]):
    """A reset that a server is asked for.

    The session takes the reply in when it comes, even if the caller has gone: it has to know what the server did.

    want, options: as the caller wrote them; options only to explain what is wrong with them.
    result, slot: where the first observation goes. retry: once it has failed.
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
        # Where the old episode is, once the reset was refused there.
        self._home: tuple[Replica, pb.Session] | None = None

    def submit(self) -> None:
        """Sends it to where the session lives now: no other call may be in flight."""
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
            state.wanted, state.show_key = want, want.state_key
        state.instructions = response.instructions
        state.limits = Limits.from_proto(response.limits)
        state.begin(response.session)
        if state.history is not None:
            _log(state.history, self.message, response, checkpoints=state.checkpoints)
        if state.checkpoints:
            self._recovery.checkpoint_first(self)
        else:
            self.finish()

    def finish(self) -> None:
        """The episode has begun: hands its first observation to whoever waits."""
        assert isinstance(self.state.last, Observation)
        self.result.put(self.slot, self.state.last)
        self.state.release()

    def refused(self, error: StarpodError) -> None:
        state = self.state
        if self._home is None:
            place = pb.Session(session_id=state.session_id, epoch=state.epoch, step_index=state.step_index)
            self._home = state.replica, place
        self._recovery.reset_refused(self, error)

    def fail(self, error: BaseException) -> None:
        """It failed for good: the old episode goes on. Where a stand-in without its steps was begun for the reset, the
        session goes back to where it was lost, so that its next call brings it back with them."""
        state = self.state
        if isinstance(error, BadArgument):
            error = explain_options(error, _spec_of(state), self._options)
        if self._home is not None and state.session_id != self._home[1].session_id:
            state.replica.close_later([state.session_id])
            state.place(*self._home)
        self.result.fail(self.slot, error)
        state.release()


def _spec_of(state: SessionState) -> pb.EnvironmentSpec:
    for spec in state.replica.specs:
        if (spec.id, spec.version) == (state.environment_id, state.version):
            return spec
    return pb.EnvironmentSpec(id=state.environment_id)


def _log(history: History, request: pb.ResetRequest, response: pb.ResetResponse, *, checkpoints: bool) -> None:
    """Begins the log of the new episode."""
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
        again = pb.ResetRequest()
        if isinstance(before, Restarted):
            again.CopyFrom(before.reset)
            before = before.base
        if request.HasField("options"):
            again.options.CopyFrom(request.options)
        if request.HasField("want"):
            again.want.CopyFrom(request.want)
        again.seed, again.dynamics_seed = message.seed, message.dynamics_seed
        again.limits.CopyFrom(overrides(response.limits))
        origin = Restarted(before, again)
    history.begin(origin, None if checkpoints else first_reply(message.observation, response.instructions))
