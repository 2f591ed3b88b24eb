"""A reset on its way, and what the session becomes when its reply is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starpod.client.errors import BadArgument, ServerBug, StarpodError
from starpod.client.log import History, Opened, Restarted, digest_observation
from starpod.client.nearest import explain_options
from starpod.client.observation import Limits
from starpod.client.recovery import overrides
from starpod.client.session import Session, Trouble, hand_error, hand_over
from starpod.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    from starpod.client.mending import Mender
    from starpod.client.observation import Want
    from starpod.client.replica import Replica


class Restart:
    """A reset that a replica is asked for, as it is for a turn.

    The session takes the reply in when it comes, even if the caller has gone: it has to know what the server did.

    sink, slot: who waits for the first observation, as for a turn: a future (slot -1) or a Gather.
    options: as the caller wrote them, to explain what is wrong with them.
    """

    __slots__ = ("_home", "_mender", "_options", "_request", "_session", "_sink", "_slot", "_want", "trouble")

    def __init__(
        self,
        mender: Mender,
        session: Session,
        request: pb.ResetRequest,
        want: Want | None,
        options: Mapping[str, Any] | None,
        sink: Any,
        slot: int,
    ) -> None:
        self._mender = mender
        self._session = session
        self._request = request
        self._want = want
        self._options = options
        self._sink = sink
        self._slot = slot
        self.trouble: Trouble | None = None
        # Where the old episode is, once the reset was refused there.
        self._home: tuple[Replica, pb.Session] | None = None

    def submit(self) -> None:
        """Sends it to where the session lives now."""
        self._session._replica._queue(self)

    def _encode(self) -> tuple[str, pb.ResetRequest]:
        session, request = self._session, self._request
        request.session_id, request.epoch = session._session_id, session._epoch
        return "reset", request

    def _answer(self, kind: str, response: Any) -> None:
        if kind != "reset":
            self._fail(ServerBug(f"The server answered a reset call with {kind or 'nothing'}."))
            return
        session, message, want = self._session, response.session, self._want
        self._home = None
        if want is not None:
            session.want, session._show_key = want, want.state_key
        session.instructions = response.instructions
        session.limits = Limits.from_proto(response.limits)
        session._restart(message)
        if session._history is not None:
            _log(session._history, self._request, response, checkpoints=session._checkpoints)
        if session._checkpoints:
            self._mender.checkpoint_first(session, self)
        else:
            self.finish()

    def finish(self) -> None:
        """The episode has begun: hands its first observation to whoever waits."""
        session = self._session
        hand_over(self._sink, self._slot, session._last)
        session._release()

    def _refuse(self, error: StarpodError) -> None:
        session = self._session
        if self._home is None:
            place = pb.Session(session_id=session._session_id, epoch=session._epoch, step_index=session._step_index)
            self._home = session._replica, place
        self._mender.reset_refused(session, self, error)

    def _fail(self, error: BaseException) -> None:
        """It failed for good: the old episode goes on. Where a stand-in without its turns was begun for the reset, the
        session goes back to where it was lost, so that its next call brings it back with them."""
        session = self._session
        if isinstance(error, BadArgument):
            error = explain_options(error, _spec_of(session), self._options)
        if self._home is not None and session._session_id != self._home[1].session_id:
            session._replica.orphans.append(session._session_id)
            session._place(*self._home)
        hand_error(self._sink, self._slot, error)
        session._release()


def _spec_of(session: Session) -> pb.EnvironmentSpec:
    for spec in session._replica.specs:
        if (spec.id, spec.version) == (session.environment_id, session.version):
            return spec
    return pb.EnvironmentSpec(id=session.environment_id)


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
    digest = None if checkpoints else digest_observation(message.observation)
    history.begin(origin, message.observation.state_key, digest)
