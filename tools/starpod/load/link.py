"""One connection of a generator to one server. Unlike a Fleet it repairs nothing: what fails is counted."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from starpod.client.errors import StarpodError, Unreachable
from starpod.client.transport import Backoff
from starpod.load.log import Log
from starpod.load.plan import Place, Plan
from starpod.load.policies import Policy, Turn
from starpod.v1 import environment_pb2 as pb

clock = time.monotonic
"""One for all generators of a machine, and the event loop's own."""


class Player:
    """One session and whoever plays it. At most one call is in flight.

    call: its name; empty while there is none. due: when it should have been sent; sent: when it was.
    turn: of a step. request: of any other call. over: the episode has ended.
    observation: what the policy needs to see; None where it needs nothing.
    again: `turn` was dropped and is still to be played. troubled: its latest call failed.
    played: the turns of the episode, where they are recorded. socket: its own connection, with OpenEnv.
    """

    __slots__ = (
        "again",
        "backoff",
        "call",
        "due",
        "episodes",
        "epoch",
        "index",
        "link",
        "number",
        "observation",
        "over",
        "played",
        "policy",
        "request",
        "sent",
        "session_id",
        "socket",
        "strikes",
        "troubled",
        "turn",
    )

    def __init__(self, number: int, policy: Policy) -> None:
        self.number = number
        self.policy = policy
        self.link: Link | None = None
        self.session_id = ""
        self.epoch = self.index = 0
        self.over = False
        self.observation: pb.Observation | None = None
        self.call = ""
        self.due = self.sent = 0.0
        self.turn: Turn = ()
        self.request: Any = None
        self.episodes = 0
        self.strikes = 0
        self.again = self.troubled = False
        self.played: list[Any] | None = None
        self.backoff = Backoff(0.02, 1.0)
        self.socket: Any = None

    def step_request(self) -> pb.StepRequest:
        """The turn in flight as a message of its own."""
        actions = [pb.Action(text=action) if isinstance(action, str) else action for action in self.turn]
        return pb.StepRequest(session_id=self.session_id, epoch=self.epoch, step_index=self.index, actions=actions)


class Director(Protocol):
    """Who is told what became of a call."""

    log: Log

    def stepped(self, player: Player, over: bool, now: float) -> None: ...
    def answered(self, player: Player, response: Any, now: float) -> None: ...
    def failed(self, player: Player, error: StarpodError, now: float) -> None: ...
    def connected(self, link: Link) -> None: ...


class Link(ABC):
    """A connection that comes back by itself.

    number: of the server in the plan. ready: calls can be sent. error: why not. sees: observations are kept.
    """

    def __init__(self, number: int, place: Place, plan: Plan, director: Director, *, sees: bool) -> None:
        self.number = number
        self.place = place
        self.players = 0
        self.ready = False
        self.error: StarpodError | None = None
        self._plan = plan
        self._director = director
        self._sees = sees
        self._task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        self._task = self._loop.create_task(self._keep())

    async def close(self) -> None:
        self.ready = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    def send(self, player: Player) -> None:
        """Sends the player's call; the director hears what becomes of it."""

    @abstractmethod
    async def _serve(self, up: Callable[[], None]) -> None:
        """Connects, says so, and raises StarpodError when the connection is lost."""

    @abstractmethod
    def _drop(self, error: StarpodError) -> None:
        """Fails the calls in flight."""

    async def _keep(self) -> None:
        backoff = Backoff(0.05, 0.5)

        def up() -> None:
            backoff.reset()
            self.ready, self.error = True, None
            self._director.connected(self)

        while True:
            try:
                await self._serve(up)
            except StarpodError as error:
                self.error = error
            except OSError as error:
                self.error = Unreachable(str(error))
            self.ready = False
            self._drop(self.error or Unreachable("the connection ended"))
            await asyncio.sleep(backoff.wait())
