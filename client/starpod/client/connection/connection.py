"""A connection to one server that reconnects automatically. All calls travel on one Stream of its wire.

When the connection breaks, calls without a reply are sent again, unchanged, once the same server is back. If it does
not come back in time, they fail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starpod.client.connection.calls import METHODS, AwaitedCall, Method, Request, Response, ServerCall, SessionStep
from starpod.client.connection.queue import HOLD_SECONDS, CallQueue, StepReceiver
from starpod.client.errors import ServerBug, StarpodError, TooLarge, Unreachable, Unsupported
from starpod.client.server_timing import parse_server_timing
from starpod.client.transport import Backoff
from starpod.client.wire import Connector, Unreadable, Wire
from starpod.v1 import environment_pb2 as pb

PROTOCOL_MAJOR = "1"
DESCRIBE_SECONDS = 5.0

logger = logging.getLogger("starpod.client")


class ServerConnection:
    """A connection to one server.

    Args:
        address: `host:port`.
        transport: makes the wire to the server, and a new one each time the wire breaks.
        receiver: receives the replies and errors of steps.
        server_name: the host name that `address` was resolved from, for the check of the server's certificate.
        timeout: seconds after which a call without a reply is sent again.
        patience: seconds after which a call without a reply fails.
        grace: seconds to wait for a broken connection to return before all its calls fail.
        messages_in_flight: number of messages in flight at which further calls wait. They then leave in one message.
        hold: maximum seconds for which a call waits for the messages in flight.
        stream: if False, use unary calls even if the server has a Stream.
        on_change: called when the server becomes ready, is lost, or was replaced by another process.

    Attributes:
        description: the server's last description; None until it is reached.
        ready: the server is connected.
        lost: the server has been disconnected for longer than `grace`.
        tried: the first attempt to connect is over.
        error: why the server is not ready.
        calls_timed: number of calls whose durations the server reported.
        environment_ms, queue_ms, server_ms: sums of these durations. `queue_ms` is known for unary calls only.
    """

    def __init__(
        self,
        address: str,
        transport: Connector,
        receiver: StepReceiver,
        *,
        server_name: str = "",
        timeout: float = 30.0,
        patience: float = 300.0,
        grace: float = 0.5,
        messages_in_flight: int = 2,
        hold: float = HOLD_SECONDS,
        stream: bool = True,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.server_name = server_name
        self.timeout = timeout
        self.patience = patience
        self.loop = asyncio.get_running_loop()
        self.description: pb.DescribeResponse | None = None
        self.ready = False
        self.lost = False
        self.tried = False
        self.error: StarpodError | None = None
        self.messages_sent = 0
        self.reconnects = 0
        self.calls_timed = 0
        self.environment_ms = self.queue_ms = self.server_ms = 0.0
        self.queue = CallQueue(
            address,
            receiver,
            messages_in_flight=messages_in_flight,
            bytes_allowed=transport.max_message_bytes,
            hold=hold,
        )
        self._receiver = receiver
        self._transport = transport
        self._grace = grace
        self._on_change = on_change
        self._backoff = Backoff()
        self._heard_at = self.loop.time()
        self._grace_timer: asyncio.TimerHandle | None = None
        self._unary = False
        self._stream_refused = not stream
        self._wake: asyncio.Future[None] | None = None
        self._broken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wire: Wire | None = None

    @property
    def instance_id(self) -> str:
        """Id of the server's process; "" until it is reached."""
        return self.description.instance_id if self.description else ""

    # --- calls -----------------------------------------------------------------------------------------------------

    def submit(self, call: SessionStep | ServerCall[Any, Any]) -> None:
        """Send a call with the next message. Its reply or error goes to the receiver (steps) or to the call itself."""
        if self.lost:
            self.loop.call_soon(self._refuse_as_lost, call)
        elif self._unary and self.ready:
            self.spawn(self._call_unary(call))
        else:
            self.queue.add(call)
            self.wake()

    def submit_steps(self, steps: Sequence[SessionStep]) -> None:
        """Send many plain steps with the next messages."""
        if self.queue.columns:
            self.queue.ready_steps.extend(steps)
            self.wake()
        else:
            for step in steps:
                self.submit(step)

    async def call(self, method: Method[Request, Response], message: Request, until: float) -> Response:
        """Send a call and return its response, with retries if the error advises them.

        Args:
            until: the event loop's time at which the call fails.

        Raises:
            DeadlineExceeded: there was no response until `until`. The advice is "give_up".
            StarpodError: the server refused the call.
        """
        backoff = Backoff()
        while True:
            future: asyncio.Future[Response] = self.loop.create_future()
            self.submit(AwaitedCall(method, message, future))
            try:
                async with asyncio.timeout_at(until):
                    return await future
            except TimeoutError:
                if future.done() and not future.cancelled():
                    return future.result()  # the reply came with the deadline
                raise self.queue.unanswered(method.field) from None
            except StarpodError as error:
                wait = backoff.wait(error.retry_after)
                if not self.retries(method, error) or self.loop.time() + wait > until:
                    raise
                await asyncio.sleep(wait)

    def retries(self, method: Method[Any, Any], error: StarpodError) -> bool:
        """Return whether `call` retries on this server after the error."""
        return error.advice == "retry"

    def _refuse_as_lost(self, call: SessionStep | ServerCall[Any, Any]) -> None:
        if isinstance(call, SessionStep):
            self._receiver.refused(call, self._lost_error())
        else:
            call.refused(self._lost_error())

    def _lost_error(self) -> Unreachable:
        return Unreachable(f"No server at {self.address}: {self.error or 'not reached yet'}")

    async def probe(self) -> None:
        """Check the server's health. Raises StarpodError if it does not answer.

        If nothing at all was received for `timeout` seconds, the connection is dropped: the host or network is down, or
        the server hangs.
        """
        try:
            await self.describe()
        except StarpodError:
            silent_seconds = self.loop.time() - self._heard_at
            if self.ready and silent_seconds >= self.timeout:
                self._break(Unreachable(f"The server at {self.address} has been silent for {silent_seconds:.1f} s."))
            raise

    async def describe(self) -> pb.DescribeResponse:
        """Request and return the server's description. Raises StarpodError."""
        if self._wire is None:
            raise self._lost_error()
        response = await _describe(self._wire, min(DESCRIBE_SECONDS, self.timeout))
        self._heard_at = self.loop.time()
        if response.instance_id == self.instance_id:
            self.adopt(response)
        return response

    def adopt(self, description: pb.DescribeResponse) -> None:
        """Store a new description of the same server process."""
        self.description = description

    def forget(self) -> None:
        """Drop all calls and state of the previous server process, because another one now answers at the address."""
        self.queue.abandon(Unreachable(f"The server at {self.address} was restarted: its sessions are gone."))

    # --- the connection --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.spawn(self._run())

    async def close(self) -> None:
        """Close the connection. Calls in flight fail."""
        self.ready, self.lost, self.queue.columns, self.queue.reset_columns = False, True, False, False
        self.error = Unreachable("The fleet is closed.")
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        self.queue.abandon(self._lost_error())
        await self._disconnect()

    async def _run(self) -> None:
        while True:
            try:
                await self._connect()
                self.reconnects += 1
                await (self._broken.wait() if self._unary else self._exchange())
            except StarpodError as error:
                self.error = error
                if self.ready and isinstance(error, Unsupported | TooLarge | Unreadable):
                    # The server has no Stream although it says so, or one of its messages cannot be parsed. Use unary
                    # calls, so that a broken reply fails only its own call.
                    self._stream_refused = True
            except OSError as error:
                self.error = Unreachable(str(error))
            except Exception as error:
                logger.exception("The connection to %s failed.", self.address)
                self.error = ServerBug(f"The connection to {self.address} failed: {error!r}")
            if self.ready:
                self.ready = False
                self._grace_timer = self.loop.call_later(self._grace, self._lose)
                self._on_change()
            elif self.description is None and not self.lost:
                self._lose()
            await self._disconnect()
            await asyncio.sleep(self._backoff.wait())

    def _lose(self) -> None:
        """Fail all calls, because the server did not come back within `grace`."""
        self.lost, self.queue.columns, self.queue.reset_columns, self.tried = True, False, False, True
        self.queue.abandon(self._lost_error())
        self._on_change()

    async def _connect(self) -> None:
        self._wire = self._transport.connect(self.address, self.server_name)
        response = await _describe(self._wire, DESCRIBE_SECONDS)
        if response.protocol_version.partition(".")[0] != PROTOCOL_MAJOR:
            raise Unsupported(
                f"{self.address} speaks version {response.protocol_version or '?'} of the protocol, but this client "
                f"{PROTOCOL_MAJOR}: use releases that match."
            )
        if self.description is not None and response.instance_id != self.instance_id:
            self.forget()
        self.adopt(response)
        self._heard_at = self.loop.time()
        self._unary = self._stream_refused or not response.capabilities.stream
        limits, queue = response.limits, self.queue
        capabilities = response.capabilities
        queue.columns = capabilities.step_columns and not self._unary
        queue.reset_columns = capabilities.reset_columns and not self._unary
        queue.acknowledgements = capabilities.acknowledgements
        queue.calls_allowed = limits.max_calls_in_flight
        queue.bytes_allowed = min(self._transport.max_message_bytes, limits.max_message_bytes or 1 << 62)
        self._broken.clear()
        queue.resume()
        if self._grace_timer is not None:
            self._grace_timer.cancel()
        self.ready, self.lost, self.tried, self.error = True, False, True, None
        if self._unary:
            self._backoff.reset()
            for call in queue.pop_ready():
                self.spawn(self._call_unary(call))
        self._on_change()

    def _break(self, error: StarpodError) -> None:
        """Drop the connection; `_run` then reconnects."""
        self.error = error
        self._broken.set()
        if self._wire is not None:
            self._wire.cancel()

    async def _disconnect(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine until the connection is closed."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- unary -----------------------------------------------------------------------------------------------------

    async def _call_unary(self, call: SessionStep | ServerCall[Any, Any]) -> None:
        request = self.queue.register(call)
        if request is None:
            return
        call_id, field, message = request
        try:
            if self._wire is None:
                raise self._lost_error()
            response, timing = await self._wire.unary(METHODS[field], message, self.timeout)
        except Unreachable as error:
            self._break(error)
        except StarpodError as error:
            self.queue.refuse(call_id, error)
        else:
            self._note_timing(timing)
            self.queue.answer(call_id, field, response)

    def _note_timing(self, text: str) -> None:
        try:
            durations = parse_server_timing(text)
        except ValueError:
            return
        if durations:
            self.calls_timed += 1
            self.environment_ms += durations.get("environment", 0.0)
            self.queue_ms += durations.get("queue", 0.0)
            self.server_ms += durations.get("total", 0.0)

    # --- the stream ------------------------------------------------------------------------------------------------

    async def _exchange(self) -> None:
        """Open the Stream and exchange messages until it ends. Raises StarpodError."""
        wire = self._wire
        assert wire is not None
        wire.open()
        helpers = [self.spawn(self._write(wire)), self.spawn(self._resend_overdue())]
        for task in helpers:
            task.add_done_callback(self._helper_ended)
        try:
            while (message := await wire.read()) is not None:
                self._backoff.reset()
                self._receive(message)
        except StarpodError:
            if self._broken.is_set() and self.error is not None:
                raise self.error from None  # cancelled by `_break`
            raise
        finally:
            for task in helpers:
                task.cancel()
            wire.cancel()

    def _receive(self, message: pb.StreamResponse) -> None:
        self._heard_at = self.loop.time()
        if message.HasField("timing"):
            self.calls_timed += len(message.replies) + len(message.transitions.call_ids) + len(message.starts.call_ids)
            timing = message.timing
            self.environment_ms += timing.environment_ms
            self.server_ms += timing.total_ms
        self.queue.take(message)
        self.wake()

    def _helper_ended(self, task: asyncio.Task[None]) -> None:
        """Break the connection if a helper task failed: without its writer, the Stream would hang forever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("The connection to %s failed.", self.address, exc_info=error)
            self._break(ServerBug(f"The connection to {self.address} failed: {error!r}"))

    async def _write(self, wire: Wire) -> None:
        queue = self.queue
        try:
            while True:
                seconds = queue.hold(self.loop.time())
                if seconds != 0.0:
                    await self._wait(seconds)
                elif (message := queue.collect(self.loop.time())) is not None:
                    self.messages_sent += 1
                    await wire.write(message)
        except Unreachable:
            return  # the Stream has ended, and its reader gets the reason

    async def _wait(self, seconds: float | None) -> None:
        self._wake = wake = self.loop.create_future()
        timer = None if seconds is None else self.loop.call_later(seconds, self.wake)
        try:
            await wake
        finally:
            self._wake = None
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Let the writer send the ready calls in the event loop's next iteration."""
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def _resend_overdue(self) -> None:
        before_id = next_id = 0
        while True:
            await asyncio.sleep(self.timeout / 2)
            if self.queue.resend_overdue(before_id, self.loop.time(), self.timeout, self.patience):
                self.wake()
            before_id, next_id = next_id, self.queue.next_id


async def _describe(wire: Wire, timeout: float) -> pb.DescribeResponse:
    response: pb.DescribeResponse
    response, _ = await wire.unary("Describe", pb.DescribeRequest(), timeout)
    return response
