"""Starpod's own protocol: one Stream for all sessions of a server, or a unary call for each."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from starpod.client.connection import METHODS
from starpod.client.errors import DeadlineExceeded, StarpodError, Unreachable, from_rpc, from_status
from starpod.client.server_timing import find_server_timing, parse_server_timing
from starpod.load.link import Link, Player, clock
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc

CONNECT_SECONDS = 5.0
MAX_ROWS = 1024
MIN_ROWS = 64
"""Fewer rows than these are not split over two messages."""
MESSAGES_IN_FLIGHT = 2
HOLD_SECONDS = 0.001
"""While so many messages are unanswered, what is ready gathers; but never for longer than this. A message costs as much
as a hundred rows, in the generator as in the server: without it both would be busy with envelopes."""


class GrpcLink(Link):
    """What both ways have in common: the channel, and Describe as the sign of life."""

    async def _serve(self, up: Callable[[], None]) -> None:
        channel = self._plan.transport.channel(self.place.address, self.place.server_name)
        try:
            stub = pb_grpc.EnvironmentServiceStub(channel)
            await self._describe(stub)
            await self._run(stub, up)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        finally:
            await channel.close()

    async def _describe(self, stub: Any) -> None:
        await stub.Describe(pb.DescribeRequest(), timeout=CONNECT_SECONDS, metadata=self._plan.transport.metadata())

    @abstractmethod
    async def _run(self, stub: Any, up: Callable[[], None]) -> None:
        """Says that it is up, and raises StarpodError when the connection is lost."""

    def _answer(self, player: Player, kind: str, response: Any, now: float) -> None:
        if kind != "step":
            self._director.answered(player, response, now)
            return
        transition = response.transition
        if self._sees:
            player.observation = transition.observation
        player.index = response.next_step_index
        self._director.stepped(player, bool(transition.end_reason), now)


class UnaryLink(GrpcLink):
    """A call of its own for each."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._stub: Any = None
        self._broken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._metadata: tuple[tuple[str, str], ...] = ()

    def send(self, player: Player) -> None:
        task = self._loop.create_task(self._ask(player))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, stub: Any, up: Callable[[], None]) -> None:
        self._stub, self._metadata = stub, self._plan.transport.metadata()
        self._broken.clear()
        up()
        await self._broken.wait()
        while self._tasks:  # those that were in flight fail one by one
            await asyncio.sleep(0.01)
        raise self.error or Unreachable("the connection ended")

    def _drop(self, error: StarpodError) -> None:
        self._stub = None

    async def _ask(self, player: Player) -> None:
        kind = player.call
        message = player.step_request() if kind == "step" else player.request
        try:
            if self._stub is None:
                raise self.error or Unreachable("not connected")
            call = getattr(self._stub, METHODS[kind])(message, timeout=self._plan.timeout, metadata=self._metadata)
            response = await call
            now = clock()
            trailer = await call.trailing_metadata()
        except grpc.aio.AioRpcError as rpc_error:
            error = from_rpc(rpc_error)
            if isinstance(error, Unreachable):
                self.ready, self.error = False, error
                self._broken.set()
            self._director.failed(player, error, clock())
            return
        except StarpodError as error:
            self._director.failed(player, error, clock())
            return
        self._note(find_server_timing(trailer))
        self._answer(player, kind, response, now)

    def _note(self, text: str) -> None:
        log = self._director.log
        if not log.counting or not text:
            return
        try:
            told = parse_server_timing(text)
        except ValueError:
            return
        server = log.server
        server.calls += 1
        server.environment += told.get("environment", 0.0) / 1e3
        server.queue += told.get("queue", 0.0) / 1e3
        server.total += told.get("total", 0.0) / 1e3


class StreamLink(GrpcLink):
    """All sessions over one Stream. What is ready at the same turn of the event loop shares a message."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._rows: list[Player] = []
        self._calls: list[Player] = []
        self._pending: dict[int, Player] = {}
        self._next_id = 1
        self._wake: asyncio.Future[None] | None = None
        # (first id, last id, when it was sent) of the messages of which nothing was answered.
        self._messages: deque[tuple[int, int, float]] = deque()

    def send(self, player: Player) -> None:
        if player.call == "step" and self._plan.columns and all(isinstance(text, str) for text in player.turn):
            self._rows.append(player)
        else:
            self._calls.append(player)
        self._rouse()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _rest(self, seconds: float | None) -> None:
        self._wake = self._loop.create_future()
        timer = None if seconds is None else self._loop.call_later(seconds, self._rouse)
        await self._wake
        if timer is not None:
            timer.cancel()

    async def _run(self, stub: Any, up: Callable[[], None]) -> None:
        stream = stub.Stream(metadata=self._plan.transport.metadata())
        helpers = [self._loop.create_task(self._write(stream)), self._loop.create_task(self._watch())]
        up()
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                self._take(message, clock())
            raise Unreachable(await stream.details() or "the server ended the stream")
        finally:
            for helper in helpers:
                helper.cancel()
            stream.cancel()

    def _drop(self, error: StarpodError) -> None:
        lost = [*self._pending.values(), *self._rows, *self._calls]
        self._pending.clear()
        self._rows.clear()
        self._calls.clear()
        self._messages.clear()
        now = clock()
        for player in lost:
            self._director.failed(player, error, now)

    async def _write(self, stream: Any) -> None:
        try:
            while True:
                if not self._rows and not self._calls:
                    await self._rest(None)
                elif len(self._messages) < MESSAGES_IN_FLIGHT:
                    await stream.write(self._collect())
                elif (hold := self._messages[0][2] + HOLD_SECONDS - clock()) > 0:
                    await self._rest(hold)
                else:
                    self._messages.popleft()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader hears of it too, and why

    def _collect(self) -> pb.StreamRequest:
        request, first = pb.StreamRequest(), self._next_id
        # Half of all at most, so that the server works on one message while the replies to another are read.
        room = min(max(self.players // 2, MIN_ROWS), MAX_ROWS)
        for player in self._calls[:room]:
            call = request.calls.add(call_id=self._next_id, timeout_ms=int(self._plan.timeout * 1e3))
            message = player.step_request() if player.call == "step" else player.request
            getattr(call, player.call).CopyFrom(message)
            self._pending[self._next_id] = player
            self._next_id += 1
        del self._calls[:room]
        players = self._rows[:room]
        del self._rows[:room]
        if players:
            ids = range(self._next_id, self._next_id + len(players))
            self._next_id += len(players)
            self._pending.update(zip(ids, players, strict=True))
            columns = request.steps
            columns.call_ids.extend(ids)
            columns.session_ids.extend([player.session_id for player in players])
            columns.epochs.extend([player.epoch for player in players])
            columns.step_indices.extend([player.index for player in players])
            counts = [len(player.turn) for player in players]
            if counts.count(1) != len(counts):
                columns.action_counts.extend(counts)
            columns.actions.extend([text for player in players for text in player.turn])  # type: ignore[misc]
        self._messages.append((first, self._next_id - 1, clock()))
        return request

    def _take(self, message: pb.StreamResponse, now: float) -> None:
        director, pending = self._director, self._pending
        if message.HasField("timing") and director.log.counting:
            server = director.log.server
            server.calls += len(message.replies) + len(message.transitions.call_ids)
            server.environment += message.timing.environment_ms / 1e3
            server.total += message.timing.total_ms / 1e3
        self._free(message)
        columns = message.transitions
        ended = set(columns.ended_rows)
        for row, call_id in enumerate(columns.call_ids[:]):
            player = pending.pop(call_id, None)
            if player is not None:
                player.index += 1
                director.stepped(player, row in ended, now)
        for reply in message.replies:
            player = pending.pop(reply.call_id, None)
            if player is None:
                continue  # too late: it was asked again
            kind = reply.WhichOneof("response") or ""
            if kind == "error":
                director.failed(player, from_status(reply.error), now)
            else:
                self._answer(player, kind, getattr(reply, kind), now)

    def _free(self, message: pb.StreamResponse) -> None:
        """The messages to which these replies belong are no longer unanswered."""
        ids = message.transitions.call_ids[:1] or [reply.call_id for reply in message.replies]
        for call_id in ids:
            for sent in self._messages:
                if sent[0] <= call_id <= sent[1]:
                    self._messages.remove(sent)
                    break
        self._rouse()

    async def _watch(self) -> None:
        """Rows carry no deadline: those that are overdue count as missed here."""
        while True:
            await asyncio.sleep(min(self._plan.timeout / 4, 1.0))
            now = clock()
            overdue = [call_id for call_id, player in self._pending.items() if now - player.sent > self._plan.timeout]
            for call_id in overdue:
                player = self._pending.pop(call_id)
                seconds = self._plan.timeout
                self._director.failed(player, DeadlineExceeded(f"no reply within {seconds:g} s"), now)
