"""The queue of one connection's calls. It holds the calls to send and the calls in flight, and matches their replies.

It does no I/O: `ServerConnection` sends the messages that `collect` returns and passes received messages to `take`.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import chain
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import Message

from starpod.client.connection.calls import STEP, Reset, ServerCall, SessionStep, step_request, unsendable
from starpod.client.connection.columns import StepBatch, read_starts, read_transitions, write_resets, write_steps
from starpod.client.connection.replies import BrokenReply, check_reply, check_transition
from starpod.client.errors import DeadlineExceeded, ServerBug, StarpodError, TooLarge, from_status
from starpod.v1 import environment_pb2 as pb

MAX_ROWS = 1024
"""Maximum number of calls in one message."""
SPLIT_ROWS = 128
"""From this many ready steps on, two messages are faster than one: the server works on one while we read the other."""
HOLD_SECONDS = 0.01
"""Maximum seconds for which a ready call waits for replies to the messages in flight, if the server does not
acknowledge messages. Without a maximum, it could wait long, because all the calls in those messages may be slow."""
_ROW_BYTES = 128
"""Upper bound of the bytes of a row without its actions."""

logger = logging.getLogger("starpod.client")


class StepReceiver(Protocol):
    """Receiver of a connection's replies to steps. Only `answered` may raise."""

    def stepped(self, batch: StepBatch) -> None:
        """Receive the replies of one message, in columns."""

    def answered(self, step: SessionStep, response: pb.StepResponse) -> None:
        """Receive a single reply as a message. If this raises, `refused` is called with the error."""

    def refused(self, step: SessionStep, error: StarpodError) -> None:
        """Receive the error of a step that will have no reply on this connection."""


class SentMessage(NamedTuple):
    """A message in flight, with its call ids and the loop time of its collection.

    It is in flight until the server acknowledges it or, if the server does not do that, until a call has its reply.
    """

    first_id: int
    last_id: int
    sent_at: float


class CallQueue:
    """A queue in which calls accumulate while enough messages are in flight. They then leave as one message.

    Attributes:
        ready_steps: steps to send as rows of columns with the next message.
        pending: calls in flight, by id.
        columns: whether the server accepts steps as rows of columns.
        reset_columns: whether the server accepts resets as rows of columns.
        acknowledgements: whether the server acknowledges messages.
        calls_allowed: the server's maximum number of calls in flight; 0 means no limit.
        bytes_allowed: maximum size of one message.
    """

    def __init__(
        self,
        address: str,
        receiver: StepReceiver,
        *,
        messages_in_flight: int,
        bytes_allowed: int,
        hold: float = HOLD_SECONDS,
    ) -> None:
        self.address = address
        self.columns = self.reset_columns = self.acknowledgements = False
        self.calls_allowed = 0
        self.bytes_allowed = bytes_allowed
        self.ready_steps: list[SessionStep] = []
        self.pending: dict[int, SessionStep | ServerCall[Any, Any]] = {}
        self._receiver = receiver
        self._messages_allowed = messages_in_flight
        self._hold = hold
        self._ready_calls: deque[SessionStep | ServerCall[Any, Any]] = deque()
        self._ready_resets: list[Reset] = []
        # Calls that were sent again after a timeout, with the approximate loop time at which each was first sent.
        self._resend_times: dict[SessionStep | ServerCall[Any, Any], float] = {}
        self._messages: deque[SentMessage] = deque()
        self._next_id = 1

    # --- ready calls -----------------------------------------------------------------------------------------------

    def add(self, call: SessionStep | ServerCall[Any, Any]) -> None:
        """Add a call to the next message."""
        if self.columns and isinstance(call, SessionStep) and call.plain:
            self.ready_steps.append(call)
        elif self.reset_columns and isinstance(call, Reset) and call.plain:
            self._ready_resets.append(call)
        else:
            self._ready_calls.append(call)

    def resume(self) -> None:
        """Send all calls without a reply again, unchanged. The server does not execute a call a second time."""
        calls = [*self.pending.values(), *self.ready_steps, *self._ready_resets]
        self.pending.clear()
        self._messages.clear()
        self.ready_steps.clear()
        self._ready_resets.clear()
        for call in calls:
            if self._is_awaited(call):
                self.add(call)

    def abandon(self, error: StarpodError) -> None:
        """Fail all calls with the error."""
        calls = [*self.pending.values(), *self.pop_ready()]
        self.pending.clear()
        self._messages.clear()
        self._resend_times.clear()
        for call in calls:
            self._refuse(call, error)

    def resend_overdue(self, before_id: int, now: float, timeout: float, patience: float) -> int:
        """Send overdue calls again; the server executes each only once. Fail those older than `patience` seconds.

        Args:
            before_id: calls in flight with smaller ids are overdue.
            now: the event loop's time.
            timeout: seconds after which a call is overdue.

        Returns:
            The number of overdue calls.
        """
        overdue_ids = [call_id for call_id in self.pending if call_id < before_id]
        for call_id in overdue_ids:
            call = self.pending[call_id]
            since = self._resend_times.setdefault(call, now - timeout)
            del self.pending[call_id]
            if now - since < patience:
                self._ready_calls.append(call)
            else:
                self._refuse(call, self.unanswered("session's"))
        while self._messages and self._messages[0].last_id < before_id:
            self._messages.popleft()
        return len(overdue_ids)

    @property
    def next_id(self) -> int:
        """Id of the next call to send."""
        return self._next_id

    # --- unary calls, if the server has no Stream ------------------------------------------------------------------

    def pop_ready(self) -> list[SessionStep | ServerCall[Any, Any]]:
        """Remove and return the ready calls, to be sent as unary calls."""
        calls = [*self.ready_steps, *self._ready_resets, *self._ready_calls]
        self.ready_steps.clear()
        self._ready_resets.clear()
        self._ready_calls.clear()
        return calls

    def register(self, call: SessionStep | ServerCall[Any, Any]) -> tuple[int, str, Message] | None:
        """Mark a call as in flight and return its id, field and message, or None if it cannot be sent."""
        field_and_message = self._encode(call) if self._is_awaited(call) else None
        if field_and_message is None:
            return None
        call_id, self._next_id = self._next_id, self._next_id + 1
        self.pending[call_id] = call
        return call_id, *field_and_message

    def answer(self, call_id: int, field: str, response: Message) -> None:
        """Handle the reply to a call in flight. Skip a reply with an unknown id, which is a late duplicate.

        Args:
            field: name of the reply's field that is set, such as "step"; empty if none is.
            response: the message in that field.
        """
        call = self._pop(call_id)
        if call is None:
            return
        method = STEP if isinstance(call, SessionStep) else call.method
        if field != method.field:
            self._refuse(call, ServerBug(f"The server answered a {method.field} call with {field or 'nothing'}."))
            return
        try:
            if isinstance(call, SessionStep):
                assert isinstance(response, pb.StepResponse)
                check_transition(response.transition, len(call.actions))
                self._receiver.answered(call, response)
            else:
                check_reply(call.request(), response)
                call.answered(response)
        except BrokenReply as error:
            self._refuse(call, self._broken(error))
        except Exception as error:
            self._refuse(call, self._unreadable(error))

    def refuse(self, call_id: int, error: StarpodError) -> None:
        """Fail a call in flight."""
        call = self._pop(call_id)
        if call is not None:
            self._refuse(call, error)

    # --- messages of the Stream ------------------------------------------------------------------------------------

    def hold(self, now: float) -> float | None:
        """Return the seconds to wait before calling `collect`, or None to wait for a call or an acknowledgement."""
        if not self.ready_steps and not self._ready_resets and not self._ready_calls:
            return None
        if self.calls_allowed and len(self.pending) >= self.calls_allowed:
            return HOLD_SECONDS
        if len(self._messages) >= self._messages_allowed:
            if self.acknowledgements:
                return None
            hold = self._messages[0].sent_at + self._hold - now
            if hold > 0:
                return hold
            self._messages.popleft()
        return 0.0

    def collect(self, now: float) -> pb.StreamRequest | None:
        """Return a message with the ready calls, within the server's limits, or None if no call can be sent."""
        request = pb.StreamRequest(acknowledge=self.acknowledgements)
        first_id = self._next_id
        room = MAX_ROWS
        if self.calls_allowed:
            room = min(room, self.calls_allowed - len(self.pending))
        size = 0
        if self._ready_calls:
            size = self._collect_calls(request, room)
        if self._ready_resets:
            # Resets share the calls' half of the message.
            room_for_resets = max((self.bytes_allowed // 2 - size) // _ROW_BYTES, not size)
            self._collect_resets(request, min(room - (self._next_id - first_id), room_for_resets))
        room -= self._next_id - first_id
        if self.ready_steps and room and size <= self.bytes_allowed // 2:  # a larger call travels alone
            count = min(len(self.ready_steps), room)
            if count >= SPLIT_ROWS:
                # Equal shares, so that the server works on one message while the replies to another are read.
                share = (len(self.pending) + len(self.ready_steps) - 1) // self._messages_allowed + 1
                count = min(count, max(share, SPLIT_ROWS // 2))
            self._collect_steps(request, count)
        if self._next_id == first_id:
            return None
        self._messages.append(SentMessage(first_id, self._next_id - 1, now))
        return request

    def _collect_calls(self, request: pb.StreamRequest, room: int) -> int:
        """Add calls to the message, and return their bytes."""
        size = count = 0
        while self._ready_calls and count < room and (not size or size < self.bytes_allowed // 2):
            call = self._ready_calls.popleft()
            field_and_message = self._encode(call) if self._is_awaited(call) else None
            if field_and_message is None:
                continue
            field, message = field_and_message[0], field_and_message[1]
            bytes_ = message.ByteSize()
            if bytes_ + 256 > self.bytes_allowed:
                self._refuse(call, self._too_large(bytes_))
                continue
            if size and size + bytes_ > self.bytes_allowed // 2:
                self._ready_calls.appendleft(call)
                break
            size += bytes_
            count += 1
            getattr(request.calls.add(call_id=self._next_id), field).CopyFrom(message)
            self.pending[self._next_id] = call
            self._next_id += 1
        return size

    def _collect_resets(self, request: pb.StreamRequest, room: int) -> None:
        """Add the resets that set the same seeds as the first one: a column has values for all rows or for none."""
        first, resets, other_resets = self._ready_resets[0], list[Reset](), list[Reset]()
        has_seeds = first.seed is None, first.dynamics_seed is None
        for reset in self._ready_resets:
            is_alike = (reset.seed is None, reset.dynamics_seed is None) == has_seeds
            (resets if is_alike and len(resets) < room else other_resets).append(reset)
        self._ready_resets = other_resets
        if resets:
            write_resets(request.resets, resets, self._next_id)
            self.pending.update(enumerate(resets, self._next_id))
            self._next_id += len(resets)

    def _collect_steps(self, request: pb.StreamRequest, count: int) -> None:
        steps = self.ready_steps[:count]
        turns = [step.actions for step in steps]
        counts = list(map(len, turns))
        actions: list[str]
        if counts.count(1) == count:
            actions = [turn[0] for turn in turns]  # type: ignore[misc]
            counts = []
        else:
            actions = list(chain.from_iterable(turns))  # type: ignore[arg-type]
        # A character has at most four bytes. Other calls may fill the other half of the message.
        if sum(map(len, actions)) * 4 + count * _ROW_BYTES > self.bytes_allowed // 2:
            if count > 1:
                self._collect_steps(request, count // 2)
                return
            size = sum(len(action.encode(errors="replace")) for action in actions)
            del self.ready_steps[:1]
            if size + 512 > self.bytes_allowed:
                self._refuse(steps[0], self._too_large(size))
            else:
                # A large step is sent as a call of its own in the next message.
                self._ready_calls.append(steps[0])
            return
        try:
            write_steps(request.steps, steps, actions, counts, self._next_id)
        except UnicodeEncodeError:
            request.ClearField("steps")
            self._refuse_unsendable(count)
            return
        del self.ready_steps[:count]
        self.pending.update(enumerate(steps, self._next_id))
        self._next_id += count

    def _refuse_unsendable(self, count: int) -> None:
        """Remove and fail the steps, among the first `count` ready ones, whose text cannot be encoded as UTF-8."""
        sendable_steps, refusals = [], []
        for step in self.ready_steps[:count]:
            try:
                "".join(step.actions).encode()  # type: ignore[arg-type]
                sendable_steps.append(step)
            except UnicodeEncodeError as error:
                refusals.append((step, error))
        self.ready_steps[:count] = sendable_steps
        for step, reason in refusals:
            self._refuse(step, unsendable(reason))

    def take(self, message: pb.StreamResponse) -> None:
        """Match the replies of a received message with their calls, and deliver them."""
        for _ in range(min(message.acknowledged, len(self._messages))):
            self._messages.popleft()
        columns = message.transitions
        if call_ids := columns.call_ids:
            self._free_message(call_ids[0])
            try:
                batch, refusals = read_transitions(columns, self.pending)
            except Exception as error:
                refusal = self._unreadable(error)
                for call_id in call_ids:
                    self.refuse(call_id, refusal)
            else:
                if self._resend_times:
                    for step in batch.steps:
                        self._resend_times.pop(step, None)
                self._receiver.stepped(batch)
                for step, reason in refusals:
                    self._refuse(step, self._broken(reason))
        if message.starts.call_ids:
            self._take_starts(message.starts)
        for reply in message.replies:
            self._free_message(reply.call_id)
            field = reply.WhichOneof("response") or ""
            if field == "error":
                self.refuse(reply.call_id, from_status(reply.error))
            else:
                self.answer(reply.call_id, field, getattr(reply, field) if field else reply)

    def _take_starts(self, columns: pb.StartColumns) -> None:
        self._free_message(columns.call_ids[0])
        try:
            results = read_starts(columns, self.pending)
        except Exception as error:
            refusal = self._unreadable(error)
            for call_id in columns.call_ids:
                self.refuse(call_id, refusal)
            return
        for reset, start in results:
            if self._resend_times:
                self._resend_times.pop(reset, None)
            if isinstance(start, BrokenReply):
                reset.refused(self._broken(start))
            else:
                reset.started(start)

    def _free_message(self, call_id: int) -> None:
        if self.acknowledgements:
            return
        for index, message in enumerate(self._messages):
            if message.first_id <= call_id <= message.last_id:
                del self._messages[index]
                return

    # --- small parts -----------------------------------------------------------------------------------------------

    def _pop(self, call_id: int) -> SessionStep | ServerCall[Any, Any] | None:
        call = self.pending.pop(call_id, None)
        if call is not None and self._resend_times:
            self._resend_times.pop(call, None)
        return call

    def _is_awaited(self, call: SessionStep | ServerCall[Any, Any]) -> bool:
        """Return whether a call is to be sent. One that nobody awaits is forgotten."""
        if isinstance(call, SessionStep) or call.is_awaited:
            return True
        self._resend_times.pop(call, None)
        return False

    def _refuse(self, call: SessionStep | ServerCall[Any, Any], error: StarpodError) -> None:
        self._resend_times.pop(call, None)
        if isinstance(call, SessionStep):
            self._receiver.refused(call, error)
        else:
            call.refused(error)

    def _encode(self, call: SessionStep | ServerCall[Any, Any]) -> tuple[str, Message] | None:
        """Return the field and the message of a call. If the call cannot be encoded, fail it and return None."""
        if not isinstance(call, SessionStep):  # isinstance(call, Call) is slower, because Call is abstract
            return call.method.field, call.request()
        try:
            return STEP.field, step_request(call)
        except Exception as error:
            self._refuse(call, unsendable(error))
            return None

    def _too_large(self, size: int) -> TooLarge:
        return TooLarge(
            f"The call has {size} bytes, but {self.address} takes {self.bytes_allowed} in one message: send less, or "
            "raise --max-message-bytes of the server (and max_message_bytes of the fleet, if that is lower).",
            metadata={"limit": "max_message_bytes"},
        )

    def unanswered(self, kind: str) -> DeadlineExceeded:
        """Return the error of a call that had no reply within its time."""
        return DeadlineExceeded(
            f"{self.address} has not answered a {kind} call within its time limit.",
            metadata={"advice": "give_up"},
        )

    def _broken(self, error: Exception) -> ServerBug:
        return ServerBug(f"{self.address} broke the contract: {error}.")

    def _unreadable(self, error: Exception) -> ServerBug:
        logger.error("A reply of %s cannot be read.", self.address, exc_info=error)
        return ServerBug(f"A reply of {self.address} cannot be read: {error!r}")
