"""The calls of one connection: which are ready to be sent, which are in flight, and to which of them a reply belongs.

No I/O: `Connection` sends what `collect` returns and hands what it receives to `take`.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import chain
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import Message

from starpod.client.connection.calls import STEP, Call, Step, step_request, unsendable
from starpod.client.connection.columns import StepBatch, read_transitions, write_steps
from starpod.client.connection.replies import BadReply, check_reply, check_transition
from starpod.client.errors import DeadlineExceeded, ServerBug, StarpodError, TooLarge, from_status
from starpod.v1 import environment_pb2 as pb

MAX_ROWS = 1024
# Below this many ready steps one message is cheaper than two that overlap with the server's work.
SPLIT_ROWS = 128
# A batch whose calls are all slow stops holding up others after this many seconds.
HOLD_SECONDS = 0.01

logger = logging.getLogger("starpod.client")


class StepReceiver(Protocol):
    """Who is told what became of the steps of a connection. None of these may raise, except `answered`."""

    def stepped(self, batch: StepBatch) -> None:
        """Many replies that came together, in columns."""

    def answered(self, step: Step, response: pb.StepResponse) -> None:
        """A reply that came as a message of its own. What it raises about the reply comes back as `refused`."""

    def refused(self, step: Step, error: StarpodError) -> None:
        """The step has no reply, and will have none here."""


class SentMessage(NamedTuple):
    """A message that has no reply yet: the ids of its calls, and the loop time at which it was collected."""

    first_id: int
    last_id: int
    sent_at: float


class CallQueue:
    """Calls that are ready accumulate while enough messages are in flight, then go out as one message.

    ready_steps: steps that go with the next message as rows of columns.
    pending: calls in flight by id.
    columns: the server takes steps as rows. calls_allowed, bytes_allowed: its limits; 0 calls: no limit.
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
        self.columns = False
        self.calls_allowed = 0
        self.bytes_allowed = bytes_allowed
        self.ready_steps: list[Step] = []
        self.pending: dict[int, Step | Call[Any, Any]] = {}
        self._receiver = receiver
        self._messages_allowed = messages_in_flight
        self._hold = hold
        self._ready_calls: deque[Step | Call[Any, Any]] = deque()
        # Calls that were sent again for want of a reply, and the loop time at which each was first sent, about.
        self._resent: dict[Step | Call[Any, Any], float] = {}
        self._messages: deque[SentMessage] = deque()
        self._next_id = 1
        self._split = False

    # --- what is asked ---------------------------------------------------------------------------------------------

    def add(self, call: Step | Call[Any, Any]) -> None:
        """The call goes with the next message."""
        if self.columns and isinstance(call, Step) and call.plain:
            self.ready_steps.append(call)
        else:
            self._ready_calls.append(call)

    def resume(self) -> None:
        """All that has no reply is asked again, unchanged: the server has kept the replies to what it did."""
        calls = [*self.pending.values(), *self.ready_steps]
        self.pending.clear()
        self._messages.clear()
        self.ready_steps.clear()
        for call in calls:
            if _wanted(call):
                self.add(call)

    def abandon(self, error: StarpodError) -> None:
        """Nothing that was asked will be answered here."""
        calls = [*self.pending.values(), *self.ready_steps, *self._ready_calls]
        self.pending.clear()
        self._messages.clear()
        self.ready_steps.clear()
        self._ready_calls.clear()
        self._resent.clear()
        for call in calls:
            self._refuse(call, error)

    def resend_overdue(self, before_id: int, now: float, timeout: float, patience: float) -> int:
        """Asks again what was sent before that id and has no reply: the server has finished it, or still will, just
        once. What has had none for `patience` seconds is refused. Returns how many calls were overdue."""
        overdue = [call_id for call_id in self.pending if call_id < before_id]
        for call_id in overdue:
            call = self.pending.pop(call_id)
            if not _wanted(call):
                continue
            since = self._resent.setdefault(call, now - timeout)
            if now - since < patience:
                self._ready_calls.append(call)
            else:
                self._refuse(call, self.unanswered("session's"))
        return len(overdue)

    @property
    def next_id(self) -> int:
        """The id of the next call that is sent."""
        return self._next_id

    # --- one by one, where the server has no Stream ----------------------------------------------------------------

    def pop_ready(self) -> list[Step | Call[Any, Any]]:
        """Takes what is ready, to be asked one by one."""
        calls = [*self.ready_steps, *self._ready_calls]
        self.ready_steps.clear()
        self._ready_calls.clear()
        return calls

    def register(self, call: Step | Call[Any, Any]) -> tuple[int, str, Message] | None:
        """The call is in flight from now on: its id, its RPC and its message. None if it cannot be sent."""
        encoded = self._encode(call) if _wanted(call) else None
        if encoded is None:
            return None
        call_id, self._next_id = self._next_id, self._next_id + 1
        self.pending[call_id] = call
        return call_id, *encoded

    def answer(self, call_id: int, field: str, response: Message) -> None:
        """The reply to a call in flight; one to an unknown id is a late duplicate."""
        call = self._pop(call_id)
        if call is None:
            return
        method = STEP if isinstance(call, Step) else call.method
        if field != method.field:
            self._refuse(call, ServerBug(f"The server answered a {method.field} call with {field or 'nothing'}."))
            return
        try:
            if isinstance(call, Step):
                assert isinstance(response, pb.StepResponse)
                check_transition(response.transition, len(call.actions))
                self._receiver.answered(call, response)
            else:
                check_reply(call.message, response)
                call.answered(response)
        except BadReply as error:
            self._refuse(call, self._broken(error))
        except Exception as error:
            self._refuse(call, self._unreadable(error))

    def refuse(self, call_id: int, error: StarpodError) -> None:
        """A call in flight was refused."""
        call = self._pop(call_id)
        if call is not None:
            self._refuse(call, error)

    # --- messages of the Stream ------------------------------------------------------------------------------------

    def hold(self, now: float) -> float | None:
        """Seconds to wait before the next message is collected; None: until something is ready."""
        if not self.ready_steps and not self._ready_calls:
            return None
        if self.calls_allowed and len(self.pending) >= self.calls_allowed:
            return HOLD_SECONDS
        if len(self._messages) >= self._messages_allowed:
            hold = self._messages[0].sent_at + self._hold - now
            if hold > 0:
                return hold
            self._messages.popleft()
        return 0.0

    def collect(self, now: float) -> pb.StreamRequest | None:
        """The next message: what is ready, as far as the limits of the server let it. None if nothing can be sent."""
        request = pb.StreamRequest()
        first = self._next_id
        room = MAX_ROWS
        if self.calls_allowed:
            room = min(room, self.calls_allowed - len(self.pending))
        if self._ready_calls:
            room -= self._collect_calls(request, room)
        if self.ready_steps and room:
            count = min(len(self.ready_steps), room)
            # Two messages that overlap: the server works on one while the replies to the other are read.
            self._split = not self._messages and not self._split and count >= SPLIT_ROWS
            if self._split:
                count = (count + 1) // 2
            self._collect_steps(request, count)
        if self._next_id == first:
            return None
        self._messages.append(SentMessage(first, self._next_id - 1, now))
        return request

    def _collect_calls(self, request: pb.StreamRequest, room: int) -> int:
        size = count = 0
        while self._ready_calls and count < room and (not size or size < self.bytes_allowed // 2):
            call = self._ready_calls.popleft()
            encoded = self._encode(call) if _wanted(call) else None
            if encoded is None:
                continue
            field, message = encoded[0], encoded[1]
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
        return count

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
        # A character is at most four bytes; the calls of this message may have used the other half.
        if sum(map(len, actions)) * 4 + count * 128 > self.bytes_allowed // 2:
            if count > 1:
                self._collect_steps(request, count // 2)
                return
            size = sum(len(action.encode(errors="replace")) for action in actions)
            del self.ready_steps[:1]
            if size + 512 > self.bytes_allowed:
                self._refuse(steps[0], self._too_large(size))
            else:
                # Alone in the next message.
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
        """Takes the turns that are no Unicode out of the first `count` that are ready."""
        sendable, refused = [], []
        for step in self.ready_steps[:count]:
            try:
                "".join(step.actions).encode()  # type: ignore[arg-type]
                sendable.append(step)
            except UnicodeEncodeError as error:
                refused.append((step, error))
        self.ready_steps[:count] = sendable
        for step, reason in refused:
            self._refuse(step, unsendable(reason))

    def take(self, message: pb.StreamResponse) -> None:
        """Hands the replies of one message to those who wait for them."""
        columns = message.transitions
        if call_ids := columns.call_ids:
            self._free_message(call_ids[0])
            try:
                batch, broken = read_transitions(columns, self.pending)
            except Exception as error:
                refusal = self._unreadable(error)
                for call_id in call_ids:
                    self.refuse(call_id, refusal)
            else:
                if self._resent:
                    for step in batch.steps:
                        self._resent.pop(step, None)
                self._receiver.stepped(batch)
                for step, reason in broken:
                    self._refuse(step, self._broken(reason))
        for reply in message.replies:
            self._free_message(reply.call_id)
            field = reply.WhichOneof("response") or ""
            if field == "error":
                self.refuse(reply.call_id, from_status(reply.error))
            else:
                self.answer(reply.call_id, field, getattr(reply, field) if field else reply)

    def _free_message(self, call_id: int) -> None:
        for place, sent in enumerate(self._messages):
            if sent.first_id <= call_id <= sent.last_id:
                del self._messages[place]
                return

    # --- small parts -----------------------------------------------------------------------------------------------

    def _pop(self, call_id: int) -> Step | Call[Any, Any] | None:
        call = self.pending.pop(call_id, None)
        if call is not None and self._resent:
            self._resent.pop(call, None)
        return call

    def _refuse(self, call: Step | Call[Any, Any], error: StarpodError) -> None:
        self._resent.pop(call, None)
        if isinstance(call, Step):
            self._receiver.refused(call, error)
        else:
            call.refused(error)

    def _encode(self, call: Step | Call[Any, Any]) -> tuple[str, Message] | None:
        """Field and message of a call; refuses one that cannot be sent and returns None."""
        if not isinstance(call, Step):  # cheaper than to ask whether it is a Call, which is abstract
            return call.method.field, call.message
        try:
            return STEP.field, step_request(call)
        except Exception as error:
            self._refuse(call, unsendable(error))
            return None

    def _too_large(self, size: int) -> TooLarge:
        return TooLarge(
            f"The call has {size} bytes, {self.address} takes {self.bytes_allowed} in one message: send less, or raise"
            " --max-message-bytes of the server (and max_message_bytes of the fleet, where that is lower).",
            metadata={"limit": "max_message_bytes"},
        )

    def unanswered(self, kind: str) -> DeadlineExceeded:
        """The error of a call that has had no reply in all its time."""
        return DeadlineExceeded(
            f"{self.address} has not answered a {kind} call in all the time that it may take.",
            metadata={"advice": "give_up"},
        )

    def _broken(self, error: Exception) -> ServerBug:
        return ServerBug(f"{self.address} broke the contract: {error}.")

    def _unreadable(self, error: Exception) -> ServerBug:
        logger.error("A reply of %s cannot be read.", self.address, exc_info=error)
        return ServerBug(f"A reply of {self.address} cannot be read: {error!r}")


def _wanted(call: Step | Call[Any, Any]) -> bool:
    return isinstance(call, Step) or call.wanted
