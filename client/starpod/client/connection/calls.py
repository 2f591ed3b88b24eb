"""Calls to a server: Step, which a session reuses for all its turns, and Call for all other methods."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from starpod.client.errors import BadArgument, StarpodError
from starpod.client.observation import Actions
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import action_to_proto

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Response]):
    """A method of the service."""

    field: str
    """Name of the method's field in the Stream's messages Call and Reply, such as "open"."""
    rpc: str
    """Name of the unary RPC, such as "Open"."""


OPEN: Method[pb.OpenRequest, pb.OpenResponse] = Method("open", "Open")
RESET: Method[pb.ResetRequest, pb.ResetResponse] = Method("reset", "Reset")
STEP: Method[pb.StepRequest, pb.StepResponse] = Method("step", "Step")
RENDER: Method[pb.RenderRequest, pb.RenderResponse] = Method("render", "Render")
FORK: Method[pb.ForkRequest, pb.ForkResponse] = Method("fork", "Fork")
SNAPSHOT: Method[pb.SnapshotRequest, pb.SnapshotResponse] = Method("snapshot", "Snapshot")
RESTORE: Method[pb.RestoreRequest, pb.RestoreResponse] = Method("restore", "Restore")
RENEW: Method[pb.RenewRequest, pb.RenewResponse] = Method("renew", "Renew")
CLOSE: Method[pb.CloseRequest, pb.CloseResponse] = Method("close", "Close")

METHODS = {method.field: method.rpc for method in (OPEN, RESET, STEP, RENDER, FORK, SNAPSHOT, RESTORE, RENEW, CLOSE)}


class SessionStep:
    """A request to play one turn in a session. A session has at most one turn in flight, so its object is reused.

    Attributes:
        session_id, epoch, step_index: what the server expects; the owner keeps them up to date.
        actions: the actions of the turn.
        want: optional fields of this turn's reply; None means the session's fields.
        plain: whether all actions are texts and `want` is None, so that the turn can travel as a row of columns.
    """

    __slots__ = ("actions", "epoch", "plain", "session_id", "step_index", "want")

    def __init__(self, session_id: str, epoch: int, step_index: int) -> None:
        self.session_id = session_id
        self.epoch = epoch
        self.step_index = step_index
        self.actions: Actions = ()
        self.want: pb.Want | None = None
        self.plain = True


class ServerCall(ABC, Generic[Request, Response]):
    """A call other than a step. Subclasses handle its reply (`answered`) or its error (`refused`)."""

    __slots__ = ("method",)

    def __init__(self, method: Method[Request, Response]) -> None:
        self.method = method

    @abstractmethod
    def request(self) -> Request:
        """Return the call's message."""

    @property
    def is_awaited(self) -> bool:
        """Whether somebody still waits for the reply. If not, the call is not sent again."""
        return True

    @abstractmethod
    def answered(self, response: Response) -> None: ...

    @abstractmethod
    def refused(self, error: StarpodError) -> None: ...


class StartRow(NamedTuple):
    """A new episode that came as a row of columns. Its first observation is one text."""

    text: str
    state_key: bytes
    """The state key; b"" if it is not wanted."""
    seed: int
    dynamics_seed: int
    instructions: str


class Reset(ServerCall[pb.ResetRequest, pb.ResetResponse]):
    """A reset, which travels as a row of columns if it is plain. Subclasses handle a reply in a row (`started`) too.

    Attributes:
        session: the session's step, which has its id and epoch.
        seed, dynamics_seed: the seeds; None lets the server choose.
        plain: whether options, wants and limits stay.
    """

    __slots__ = ("dynamics_seed", "plain", "seed", "session")

    def __init__(
        self, session: SessionStep, seed: int | None, dynamics_seed: int | None, *, plain: bool = True
    ) -> None:
        super().__init__(RESET)
        self.session = session
        self.seed = seed
        self.dynamics_seed = dynamics_seed
        self.plain = plain

    def request(self) -> pb.ResetRequest:
        session = self.session
        return pb.ResetRequest(
            session_id=session.session_id, epoch=session.epoch, seed=self.seed, dynamics_seed=self.dynamics_seed
        )

    @abstractmethod
    def started(self, start: StartRow) -> None: ...


class AwaitedCall(ServerCall[Request, Response]):
    """A call whose reply a coroutine awaits. If the coroutine has been cancelled, the reply is dropped."""

    __slots__ = ("future", "message")

    def __init__(self, method: Method[Request, Response], message: Request, future: asyncio.Future[Response]) -> None:
        super().__init__(method)
        self.message = message
        self.future = future

    def request(self) -> Request:
        return self.message

    @property
    def is_awaited(self) -> bool:
        return not self.future.done()

    def answered(self, response: Response) -> None:
        if not self.future.done():
            self.future.set_result(response)

    def refused(self, error: StarpodError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def step_request(step: SessionStep) -> pb.StepRequest:
    """Return the turn as a message, for servers and actions that columns do not support."""
    return pb.StepRequest(
        session_id=step.session_id,
        epoch=step.epoch,
        step_index=step.step_index,
        actions=map(action_to_proto, step.actions),
        want=step.want,
    )


def unsendable(error: Exception) -> BadArgument:
    return BadArgument(
        f"The call cannot be sent: {error}. Texts must be Unicode (no half of a surrogate pair), values must be JSON."
    )
