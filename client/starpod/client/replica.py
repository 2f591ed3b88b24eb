"""One server address: its connection, its one Stream, and the calls that travel on it.

Calls that are ready accumulate while enough batches are in flight, then go out as one message. Whatever has no reply
when the connection breaks is asked again, unchanged, once the same server is back; if it is not, the fleet is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import grpc
from google.protobuf.message import Message

from starpod.client.columns import take_transitions, write_steps
from starpod.client.entries import Entry, Repeated, Request, unsendable, unwanted
from starpod.client.errors import (
    DeadlineExceeded,
    Draining,
    Overloaded,
    ServerBug,
    StarpodError,
    TooLarge,
    Unreachable,
    Unsupported,
    from_rpc,
    from_status,
)
from starpod.client.transport import Backoff, Transport
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from starpod.client.session import Session

PROTOCOL_MAJOR = "1"
MAX_ROWS = 1024
# Below this many ready steps one message is cheaper than two that overlap with the server's work.
SPLIT_ROWS = 128
# A batch whose calls are all slow stops holding up others after this many seconds.
HOLD_SECONDS = 0.01
DESCRIBE_SECONDS = 5.0

METHODS = {
    "open": "Open",
    "reset": "Reset",
    "step": "Step",
    "render": "Render",
    "fork": "Fork",
    "snapshot": "Snapshot",
    "restore": "Restore",
    "renew": "Renew",
    "close": "Close",
}
# What any server can do as well as another.
PLACED = ("open", "restore")

logger = logging.getLogger("starpod.client")


class Replica:
    """A server of the fleet.

    address: as this client reaches it.
    sessions: those of this client that live there.
    description: what it last said of itself; None until it was reached.
    ready: it is connected. lost: it has been gone for longer than the grace, so its sessions are moved elsewhere.
    columns: turns of plain text go in columns.
    ready_steps: sessions whose turns go with the next message in columns.
    orphans: sessions that nobody holds and that may be alive on it: brought back elsewhere while it was away, or opened
        for a caller who has gone.
    full: why it took no session when it was last asked for one. It is not asked again before the loop time
        `full_until`.
    error: why it is not ready.
    """

    def __init__(
        self,
        address: str,
        transport: Transport,
        *,
        server_name: str = "",
        timeout: float,
        patience: float,
        grace: float,
        batches: int,
        changed: Callable[[], None],
    ) -> None:
        self.address = address
        self.server_name = server_name
        self.orphans: list[str] = []
        self.sessions: WeakSet[Session] = WeakSet()
        self.description: pb.DescribeResponse | None = None
        self.ready = False
        self.lost = False
        self.tried = False
        self.error: StarpodError | None = None
        self.full: Overloaded | None = None
        self.full_until = 0.0
        self.placing = 0
        self.messages_sent = 0
        self.reconnects = 0
        self._counted = 0
        self._transport = transport
        self._timeout = timeout
        self._patience = patience
        self._grace = grace
        self._batches_allowed = batches
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._backoff = Backoff()
        self._room = Backoff()
        self._heard = self._loop.time()
        self._parting: asyncio.TimerHandle | None = None
        self._unary = False
        self._stream_refused = False
        self.columns = False
        self._calls_allowed = 0
        self._bytes_allowed = transport.max_message_bytes
        self.ready_steps: list[Session] = []
        self._calls: deque[Entry] = deque()
        self._pending: dict[int, Entry] = {}
        self._next_id = 1
        self._split = False
        # (first id, last id, when it was sent) of the messages that have no reply yet.
        self._batches: deque[tuple[int, int, float]] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._broken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stub: Any = None
        self._stream: Any = None
        self._channel: grpc.aio.Channel | None = None

    def __repr__(self) -> str:
        state = "ready" if self.ready else f"not ready: {self.error}"
        return f"Replica({self.address}, {len(self.sessions)} sessions, {state})"

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def instance_id(self) -> str:
        return self.description.instance_id if self.description else ""

    @property
    def draining(self) -> bool:
        return self.description.draining if self.description else False

    @property
    def accepting(self) -> bool:
        """It takes sessions, as far as is known."""
        return self.ready and not self.draining and self._loop.time() >= self.full_until

    @property
    def specs(self) -> list[pb.EnvironmentSpec]:
        return list(self.description.environments) if self.description else []

    @property
    def hosts(self) -> tuple[object, ...]:
        """What decides whether it gets sessions: its instance, the versions that it hosts, whether it drains."""
        return self.instance_id, self.draining, [(spec.id, spec.version) for spec in self.specs]

    @property
    def load(self) -> int:
        """Sessions alive there: what it last reported, and what we have added or taken away since."""
        reported = self.description.live_sessions if self.description else 0
        return reported + len(self.sessions) + self.placing - self._counted

    # --- asking ----------------------------------------------------------------------------------------------------

    def submit(self, session: Session) -> None:
        """Sends the session's turn with the next message. The session is told what becomes of it."""
        if session._plain and self.columns:
            self.ready_steps.append(session)
            self.wake()
        else:
            self._queue(session)

    async def call(self, kind: str, message: Message, until: float) -> Any:
        """The response to one call; retried where that helps, up to the loop time `until`.

        Raises StarpodError; where its advice is "reopen", another replica may do better, and so it may where it is
        Overloaded by a session more. DeadlineExceeded with the advice to give up: it is still unanswered then.
        """
        backoff = Backoff()
        while True:
            future: asyncio.Future[Any] = self._loop.create_future()
            request = Request(kind, message, future)
            self._queue(request)
            try:
                async with asyncio.timeout_at(until):
                    response = await future
                if kind in PLACED:
                    self._room.reset()
                return response
            except TimeoutError:
                raise self._unanswered(kind) from None
            except asyncio.CancelledError:
                if not future.cancel() and not future.cancelled() and future.exception() is None:
                    self._hand(request, kind, future.result())  # it had come already
                raise
            except StarpodError as error:
                if isinstance(error, Draining) and self.description is not None:
                    # Now, and not when it is next asked how it is: the least loaded one would be chosen again.
                    self.description.draining = True
                if isinstance(error, Overloaded) and error.advice == "retry" and kind in PLACED:
                    self._fill(error)
                    raise
                wait = backoff.wait(error.retry_after)
                if error.advice != "retry" or self._loop.time() + wait > until:
                    raise
                await asyncio.sleep(wait)

    def _fill(self, error: Overloaded) -> None:
        """Others are asked for sessions, as long as it says; what it refuses meanwhile does not prolong that."""
        now = self._loop.time()
        if now >= self.full_until:
            self.full, self.full_until = error, now + self._room.wait(error.retry_after)

    def _queue(self, entry: Entry) -> None:
        if self.lost:
            self._loop.call_soon(entry._refuse, self._gone())
        elif self._unary and self.ready:
            self._spawn(self._ask(entry))
        else:
            self._calls.append(entry)
            self.wake()

    def _gone(self) -> Unreachable:
        return Unreachable(f"No server at {self.address}: {self.error or 'not reached yet'}")

    def _unanswered(self, kind: str) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{self.address} has not answered a {kind} call in all the time that it may take.",
            metadata={"advice": "give_up"},
        )

    async def probe(self) -> None:
        """Asks how it is. A server that has said nothing at all for the timeout is given up: its host is gone, the
        network swallows what is sent, or it hangs. Raises StarpodError."""
        try:
            await self.describe()
        except StarpodError:
            silent = self._loop.time() - self._heard
            if self.ready and silent >= self._timeout:
                self._break(Unreachable(f"The server at {self.address} has been silent for {silent:.1f} s."))
            raise

    async def describe(self) -> pb.DescribeResponse:
        """Asks the server anew what it is. Raises StarpodError."""
        if self._stub is None:
            raise self._gone()
        try:
            response: pb.DescribeResponse = await self._stub.Describe(
                pb.DescribeRequest(),
                timeout=min(DESCRIBE_SECONDS, self._timeout),
                metadata=self._metadata(),
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        self._heard = self._loop.time()
        if response.instance_id == self.instance_id:
            self._adopt(response)
        return response

    # --- the connection --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._spawn(self._run())

    async def close(self) -> None:
        """Closes the connection. Calls in flight fail."""
        self.ready, self.lost, self.columns = False, True, False
        self.error = Unreachable("The fleet is closed.")
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._parting is not None:
            self._parting.cancel()
        self._abandon(self._gone())
        await self._disconnect()

    async def _run(self) -> None:
        while True:
            try:
                await self._connect()
                self.reconnects += 1
                await (self._broken.wait() if self._unary else self._pump())
            except StarpodError as error:
                self.error = error
                if self.ready and isinstance(error, Unsupported):
                    # It said that it has a Stream and it has not: ask one by one.
                    self._stream_refused = True
            except OSError as error:
                self.error = Unreachable(str(error))
            except Exception as error:
                logger.exception("The connection to %s failed.", self.address)
                self.error = ServerBug(f"The connection to {self.address} failed: {error!r}")
            if self.ready:
                self.ready = False
                self._parting = self._loop.call_later(self._grace, self._lose)
                self._changed()
            elif self.description is None and not self.lost:
                self._lose()
            await self._disconnect()
            await asyncio.sleep(self._backoff.wait())

    def _lose(self) -> None:
        """It is not back in time: its sessions need not wait for it."""
        self.lost, self.columns, self.tried = True, False, True
        self._abandon(self._gone())
        self._changed()

    async def _connect(self) -> None:
        self._channel = self._transport.channel(self.address, self.server_name)
        self._stub = pb_grpc.EnvironmentServiceStub(self._channel)
        try:
            response = await self._stub.Describe(
                pb.DescribeRequest(), timeout=DESCRIBE_SECONDS, metadata=self._metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        if response.protocol_version.partition(".")[0] != PROTOCOL_MAJOR:
            raise Unsupported(
                f"{self.address} speaks version {response.protocol_version or '?'} of the protocol, this client"
                f" {PROTOCOL_MAJOR}: use releases that match."
            )
        if self.description is not None and response.instance_id != self.instance_id:
            self._abandon(Unreachable(f"The server at {self.address} was restarted: its sessions are gone."))
            self.orphans.clear()
            self.full_until = 0.0
        self._adopt(response)
        self._heard = self._loop.time()
        self._unary = self._stream_refused or not response.capabilities.stream
        self.columns = response.capabilities.step_columns and not self._unary
        limits = response.limits
        self._calls_allowed = limits.max_calls_in_flight
        self._bytes_allowed = min(self._transport.max_message_bytes, limits.max_message_bytes or 1 << 62)
        self._broken.clear()
        self._resume()
        if self._parting is not None:
            self._parting.cancel()
        self.ready, self.lost, self.tried, self.error = True, False, True, None
        if self._unary:
            self._backoff.reset()
            while self._calls:
                self._spawn(self._ask(self._calls.popleft()))
        self._changed()

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        try:
            return self._transport.metadata()
        except OSError as error:
            raise Unreachable(f"The token for {self.address} cannot be read: {error}") from None

    def _break(self, error: StarpodError) -> None:
        """Gives the connection up; `_run` makes another one."""
        self.error = error
        self._broken.set()
        if self._stream is not None:
            self._stream.cancel()

    async def _disconnect(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()

    def _adopt(self, description: pb.DescribeResponse) -> None:
        self.description = description
        self._counted = len(self.sessions)

    def _resume(self) -> None:
        """All that has no reply is asked again, unchanged: the server has kept the replies to what it did."""
        entries = [entry for entry in (*self._pending.values(), *self.ready_steps) if not unwanted(entry)]
        self._pending.clear()
        self._batches.clear()
        self.ready_steps.clear()
        for entry in entries:
            if self.columns and getattr(entry, "_plain", False):
                self.ready_steps.append(entry)  # type: ignore[arg-type]
            else:
                self._calls.append(entry)

    def _abandon(self, error: StarpodError) -> None:
        """Nothing that was asked will be answered here."""
        entries = [*self._pending.values(), *self.ready_steps, *self._calls]
        self._pending.clear()
        self._batches.clear()
        self.ready_steps.clear()
        self._calls.clear()
        for entry in entries:
            entry._refuse(error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- unary -----------------------------------------------------------------------------------------------------

    async def _ask(self, entry: Entry) -> None:
        if unwanted(entry):
            return
        call_id, self._next_id = self._next_id, self._next_id + 1
        self._pending[call_id] = entry
        try:
            kind, message = entry._encode()
        except Exception as error:
            del self._pending[call_id]
            entry._refuse(unsendable(error))
            return
        method = getattr(self._stub, METHODS[kind])
        try:
            response = await method(message, timeout=self._timeout, metadata=self._metadata())
        except (grpc.aio.AioRpcError, Unreachable) as failure:
            refusal = from_rpc(failure) if isinstance(failure, grpc.aio.AioRpcError) else failure
            if isinstance(refusal, Unreachable):
                self._break(refusal)
            elif self._pending.pop(call_id, None) is not None:
                entry._refuse(refusal)
            return
        if self._pending.pop(call_id, None) is not None:
            self._hand(entry, kind, response)

    # --- the stream ------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        self._stream = stream = self._stub.Stream(metadata=self._metadata())
        helpers = [self._spawn(self._write(stream)), self._spawn(self._repeat_overdue())]
        for task in helpers:
            task.add_done_callback(self._helper_ended)
        try:
            while True:
                message = await stream.read()
                if message is grpc.aio.EOF:
                    break
                self._backoff.reset()
                self._take(message)
            code = await stream.code()
            if code is not grpc.StatusCode.OK:
                raise Unreachable(await stream.details() or code.name, code=code)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from None
        except asyncio.CancelledError:
            if not self._broken.is_set():
                raise
            assert self.error is not None
            raise self.error from None  # given up by `_break`
        finally:
            self._stream = None
            for task in helpers:
                task.cancel()
            stream.cancel()

    def _helper_ended(self, task: asyncio.Task[None]) -> None:
        """Without its writer a stream would stand still for ever: better it breaks."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The connection to %s failed.", self.address, exc_info=error)
            self._break(ServerBug(f"The connection to {self.address} failed: {error!r}"))

    async def _write(self, stream: Any) -> None:
        try:
            while True:
                if not self.ready_steps and not self._calls:
                    await self._rest(None)
                elif self._calls_allowed and len(self._pending) >= self._calls_allowed:
                    await self._rest(HOLD_SECONDS)
                elif len(self._batches) >= self._batches_allowed:
                    hold = self._batches[0][2] + HOLD_SECONDS - self._loop.time()
                    if hold > 0:
                        await self._rest(hold)
                    else:
                        self._batches.popleft()
                else:
                    first = self._next_id
                    message = self._collect()
                    if self._next_id > first:
                        self.messages_sent += 1
                        await stream.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The stream is over; its reader hears of that too, and why.
            return

    async def _rest(self, seconds: float | None) -> None:
        self._wake = wake = self._loop.create_future()
        timer = None if seconds is None else self._loop.call_later(seconds, self.wake)
        try:
            await wake
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """What is ready is sent as soon as the event loop has the time."""
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    def _collect(self) -> pb.StreamRequest:
        """The next message: what is ready, as far as the limits of the server let it."""
        request = pb.StreamRequest()
        first = self._next_id
        room = MAX_ROWS
        if self._calls_allowed:
            room = min(room, self._calls_allowed - len(self._pending))
        if self._calls:
            room -= self._collect_calls(request, room)
        steps = self.ready_steps
        if steps and room:
            count = min(len(steps), room)
            # Two messages that overlap: the server works on one while the replies to the other are read.
            self._split = not self._batches and not self._split and count >= SPLIT_ROWS
            if self._split:
                count = (count + 1) // 2
            self._collect_steps(request, count)
        if self._next_id > first:
            self._batches.append((first, self._next_id - 1, self._loop.time()))
        return request

    def _collect_calls(self, request: pb.StreamRequest, room: int) -> int:
        size = count = 0
        while self._calls and count < room and size < self._bytes_allowed // 2:
            entry = self._calls.popleft()
            if unwanted(entry):
                continue
            try:
                kind, message = entry._encode()
            except Exception as error:
                entry._refuse(unsendable(error))
                continue
            bytes_ = message.ByteSize()
            if bytes_ + 256 > self._bytes_allowed:
                entry._refuse(self._too_large(bytes_))
                continue
            if size and size + bytes_ > self._bytes_allowed // 2:
                self._calls.appendleft(entry)
                break
            size += bytes_
            count += 1
            call = request.calls.add(call_id=self._next_id)
            getattr(call, kind).CopyFrom(message)
            self._pending[self._next_id] = entry
            self._next_id += 1
        return count

    def _collect_steps(self, request: pb.StreamRequest, count: int) -> None:
        sessions = self.ready_steps[:count]
        turns = [session._turn for session in sessions]
        counts = list(map(len, turns))
        if counts.count(1) == count:
            actions = [turn[0] for turn in turns]
            counts = []
        else:
            actions = list(chain.from_iterable(turns))
        # A character is at most four bytes; the calls of this message may have used the other half.
        if sum(map(len, actions)) * 4 + count * 128 > self._bytes_allowed // 2:  # type: ignore[arg-type]
            if count > 1:
                self._collect_steps(request, count // 2)
                return
            size = sum(len(str(action).encode(errors="replace")) for action in actions)
            del self.ready_steps[:1]
            if size + 512 > self._bytes_allowed:
                sessions[0]._refuse(self._too_large(size))
            else:
                # Alone in the next message.
                self._calls.append(sessions[0])
            return
        try:
            write_steps(request.steps, sessions, actions, counts, self._next_id)
        except UnicodeEncodeError:
            request.ClearField("steps")
            self._refuse_unsendable(count)
            return
        del self.ready_steps[:count]
        self._pending.update(enumerate(sessions, self._next_id))
        self._next_id += count

    def _refuse_unsendable(self, count: int) -> None:
        """Takes the turns that are no Unicode out of the first `count` that are ready."""
        sendable, refused = [], []
        for session in self.ready_steps[:count]:
            try:
                "".join(session._turn).encode()  # type: ignore[arg-type]
                sendable.append(session)
            except UnicodeEncodeError as error:
                refused.append((session, error))
        self.ready_steps[:count] = sendable
        for session, reason in refused:
            session._refuse(unsendable(reason))

    def _too_large(self, size: int) -> TooLarge:
        return TooLarge(
            f"The call has {size} bytes, {self.address} takes {self._bytes_allowed} in one message.",
            metadata={"limit": "max_message_bytes"},
        )

    def _take(self, message: pb.StreamResponse) -> None:
        """Hands the replies of one message to those who wait for them. A reply to an unknown id is a late duplicate."""
        self._heard = self._loop.time()
        if message.HasField("transitions"):
            columns = message.transitions
            if columns.call_ids:
                try:
                    take_transitions(columns, self._pending)
                except Exception as error:
                    refusal = self._unreadable(error)
                    for entry in [self._pending.pop(call_id, None) for call_id in columns.call_ids]:
                        if entry is not None:
                            entry._refuse(refusal)
                self._free_batch(columns.call_ids[0])
        for reply in message.replies:
            self._free_batch(reply.call_id)
            entry = self._pending.pop(reply.call_id, None)
            if entry is None:
                continue
            kind = reply.WhichOneof("response") or ""
            if kind == "error":
                entry._refuse(from_status(reply.error))
            else:
                self._hand(entry, kind, getattr(reply, kind) if kind else None)
        self.wake()

    def _hand(self, entry: Entry, kind: str, response: Any) -> None:
        """Hands a reply to who waits for it."""
        if kind in ("open", "fork", "restore") and unwanted(entry):
            self.orphans.extend(session.session_id for session in response.sessions)
            return
        try:
            entry._answer(kind, response)
        except Exception as error:
            entry._refuse(self._unreadable(error))

    def _unreadable(self, error: Exception) -> ServerBug:
        logger.error("A reply of %s cannot be read.", self.address, exc_info=error)
        return ServerBug(f"A reply of {self.address} cannot be read: {error!r}")

    def _free_batch(self, call_id: int) -> None:
        for batch in self._batches:
            if batch[0] <= call_id <= batch[1]:
                self._batches.remove(batch)
                return

    async def _repeat_overdue(self) -> None:
        """Asks again what has had no reply for the timeout: the server has finished it, or still will, just once. What
        has had none in all the time that a call may take is given up."""
        older = newer = 0
        while True:
            await asyncio.sleep(self._timeout / 2)
            overdue = [call_id for call_id in self._pending if call_id < older]
            now = self._loop.time()
            for call_id in overdue:
                entry = self._pending.pop(call_id)
                if unwanted(entry):
                    continue
                if not isinstance(entry, Repeated):
                    entry = Repeated(entry, now - self._timeout)
                if now - entry.since < self._patience:
                    self._calls.append(entry)
                else:
                    entry._refuse(self._unanswered("session's"))
            if overdue:
                self.wake()
            older, newer = newer, self._next_id
