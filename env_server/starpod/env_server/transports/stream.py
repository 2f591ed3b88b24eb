"""The Stream call: batches in, batches out, and replies in the order in which calls finish."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import grpc
from google.rpc import status_pb2

from starpod.env_server.episodes.errors import CallError, bad_argument, overloaded, release
from starpod.env_server.episodes.timing import Timing, begin, clock
from starpod.env_server.operation.tenants import SLICE_SECONDS
from starpod.env_server.sessions.calls import Calls
from starpod.env_server.sessions.columns import (
    ROWS_AT_ONCE,
    Answers,
    ResetRows,
    StepRows,
    reset_rows,
    step_rows,
)
from starpod.env_server.sessions.requests import check_texts, extra_members, is_large, measure, parse
from starpod.env_server.sessions.responses import too_large
from starpod.env_server.sessions.table import SessionTable
from starpod.env_server.transports.auth import Grant
from starpod.env_server.transports.eager import run_eagerly
from starpod.env_server.transports.outbox import ClientStream, Outbox
from starpod.v1 import environment_pb2 as pb

logger = logging.getLogger(__name__)

VERBS = ("open", "reset", "step", "render", "fork", "snapshot", "restore", "renew", "close")
CALLS_AT_ONCE = 65_536
"""Maximum number of calls and rows in one message. Its size is no limit: a row can be as small as six bytes."""
_MESSAGE_BYTES = 512 * 1024
"""Approximate maximum bytes of a message of many rows. Larger buffers cost more than they save."""
_CREATING = ("open", "fork", "restore")
_BULKY = ("render", "snapshot")
_BULKY_AT_ONCE = 16
"""Maximum number of large replies (render, snapshot) in flight per stream. Further calls are refused, because queueing
them would block other sessions or reorder one session's calls."""
_RAGGED_ROWS = 4_096
"""If columns differ in length, each row is answered with an error. Above this many rows, the stream ends instead,
because the errors would be larger than the rows."""
_RETRY_SECONDS = 0.1


class StreamServer:
    """One connected stream. Calls that have begun finish, and their replies are cached, even if the connection ends."""

    def __init__(self, calls: Calls, table: SessionTable, connection: ClientStream, grant: Grant) -> None:
        self._calls = calls
        self._worker = calls.worker
        self._table = table
        self._connection = connection
        self._outbox = Outbox(connection, calls.worker.limits.max_message_bytes, self._refuse_large)
        self._grant = grant
        self._tenant = grant.tenant
        self._rows_at_once = ROWS_AT_ONCE
        # The rows of the message that is being served.
        self._rows: list[ResetRows | StepRows] = []
        self._bulky = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> None:
        """Serve the stream until the client half-closes and all calls are answered, or until the connection breaks.

        Raises:
            CallError: UNAUTHENTICATED if the token is no longer valid, TOO_LARGE if a batch exceeds all limits,
                BAD_ARGUMENT if a message cannot be parsed or has too many fields, so that its calls cannot be
                identified.
        """
        share = self._worker.share
        self._worker.metrics.streams += 1
        try:
            while (data := await self._connection.read()) is not grpc.aio.EOF:
                self._grant.check()
                await self._outbox.keep_up()
                if share.exceeded(self._tenant):
                    await share.wait(self._tenant)
                self._worker.count_received(self._tenant, len(data))
                if is_large(data):
                    for _ in measure(pb.StreamRequest, data):
                        await self._pause()
                with self._tenant.working:
                    message = parse(pb.StreamRequest, data)
                size = len(data)
                del data
                await self._serve_message(message, size)
                del message
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._outbox.finish()
        finally:
            self._outbox.close()
            self._worker.metrics.streams -= 1

    async def _serve_message(self, message: pb.StreamRequest, size: int) -> None:
        arrived = clock()
        answers = await self._work_through(message, size, arrived)
        if message.acknowledge:
            answers.message.acknowledged = 1
        await self._write(answers, arrived)
        self._rows = []

    async def _work_through(self, message: pb.StreamRequest, size: int, arrived: float) -> Answers:
        """Start all calls of a message, and return the replies that are available at once and have not been sent."""
        answers = Answers()
        count = len(message.calls) + len(message.resets.call_ids) + len(message.steps.call_ids)
        if count > CALLS_AT_ONCE:
            problem = f"one message holds {count} calls; send at most {CALLS_AT_ONCE}"
            raise CallError("TOO_LARGE", problem, {"limit": "calls_per_message"})
        calls: list[tuple[pb.Call, str | None]] = []
        extra_count = 0
        if message.calls:
            with self._tenant.working:
                calls = [(call, call.WhichOneof("request")) for call in message.calls]
                extra_count = sum(extra_members(getattr(call, verb)) for call, verb in calls if verb in _CREATING)
        try:
            self._tenant.take_calls(count + extra_count, size)
        except CallError as error:
            call_ids = [*(call.call_id for call in message.calls), *message.resets.call_ids, *message.steps.call_ids]
            await self._refuse(call_ids, error, arrived)
            return answers
        index = 0
        while index < len(calls):
            if index:
                await self._pause()
            await self._outbox.keep_up()
            with self._tenant.working:
                index = self._start_slice(calls, index, arrived, answers)
            # Collect slices, because a message for each would cost more than the slice. But send before the tenant has
            # to wait for its next turn.
            if answers.message.ByteSize() > _MESSAGE_BYTES or self._worker.share.exceeded(self._tenant):
                await self._write(answers, arrived)
                answers = Answers()
        for columns in (message.resets, message.steps):
            try:
                rows = ResetRows(columns) if isinstance(columns, pb.ResetColumns) else StepRows(columns)
            except CallError as error:
                await self._write(answers, arrived)
                answers = Answers()
                if len(columns.call_ids) > _RAGGED_ROWS:
                    raise
                await self._refuse(columns.call_ids, error, arrived)
            else:
                self._rows.append(rows)
                answers = await self._serve_rows(rows, size, arrived, answers)
        return answers

    async def _serve_rows(self, rows: ResetRows | StepRows, size: int, arrived: float, answers: Answers) -> Answers:
        """Start the calls of rows, which came in a message of `size` bytes. Return the replies that were not sent."""
        row_count, limits = len(rows), self._worker.limits
        max_rows = min(ROWS_AT_ONCE, 1 + row_count * _MESSAGE_BYTES // max(1, size))
        stop, deadline = 0, clock() + SLICE_SECONDS
        while (start := stop) < row_count:
            is_late = clock() > deadline
            # Rows that repeat a session run one by one, and a message for each would cost more than the rows.
            if (start and (is_late or answers.columns)) or len(answers) >= ROWS_AT_ONCE:
                await self._write(answers, arrived)
                answers = Answers()
            if is_late:
                await self._pause()
                deadline = clock() + SLICE_SECONDS
            stop = rows.until_repeated(start, min(start + self._rows_at_once, start + max_rows, row_count), self._table)
            with self._tenant.working:
                failures = list[tuple[int, Exception]]()
                if isinstance(rows, ResetRows):
                    single_rows, failures, stop = reset_rows(rows, start, stop, self._table, self._worker, answers)
                elif size > limits.max_step_bytes and rows.has_turn_beyond(limits.max_step_bytes, start, stop):
                    single_rows = list(range(start, stop))
                else:
                    single_rows, broken_rows, stop = step_rows(rows, start, stop, self._table, self._worker, answers)
                    failures = [
                        (row, self._worker.failures.break_off(session, cause)) for row, session, cause in broken_rows
                    ]
                for row, failure in failures:
                    status = self._status(rows.verb, failure)
                    answers.message.replies.append(pb.Reply(call_id=rows.call_ids[row], error=status))
                for row in single_rows:
                    self._start(rows.call_ids[row], 0, self._serve_row(rows, row), arrived, answers)
        return answers

    async def _pause(self) -> None:
        """Yield the event loop in the middle of a long batch."""
        await self._worker.share.pause(self._tenant)

    async def _refuse(self, call_ids: Sequence[int], error: CallError, arrived: float) -> None:
        """Answer calls with the same error."""
        self._worker.metrics.error("Stream", error.reason)
        status = error.status()
        for start in range(0, len(call_ids), ROWS_AT_ONCE):
            if start:
                await self._pause()
            answers = Answers()
            for call_id in call_ids[start : start + ROWS_AT_ONCE]:
                answers.message.replies.append(pb.Reply(call_id=call_id, error=status))
            await self._write(answers, arrived)

    def _refuse_large(self, call_id: int, size: int) -> CallError:
        """Return the error of a call whose reply is too large. If it is a row, its session was changed and is lost."""
        limit, error = self._worker.limits.max_message_bytes, None
        for rows in self._rows:
            if call_id in rows.call_ids:
                session = self._table.get(rows.session_ids[rows.call_ids.index(call_id)])
                if session is not None and not session.lost:
                    error = self._worker.failures.break_off_large(session, size, limit, rows.verb)
        error = error or too_large(size, limit)
        self._worker.metrics.error("Stream", error.reason)
        return error

    def _start_slice(
        self, calls: Sequence[tuple[pb.Call, str | None]], start: int, arrived: float, answers: Answers
    ) -> int:
        """Start calls for SLICE_SECONDS or until their replies fill a message. Return the index to continue at."""
        deadline, size = clock() + SLICE_SECONDS, 0
        for index in range(start, len(calls)):
            call, verb = calls[index]
            is_bulky = verb in _BULKY
            self._start(call.call_id, call.timeout_ms, self._serve(call, verb), arrived, answers, is_bulky)
            if is_bulky and answers.message.replies:
                size += answers.message.replies[-1].ByteSize()
            if size > _MESSAGE_BYTES or len(answers) >= ROWS_AT_ONCE or clock() > deadline:
                return index + 1
        return len(calls)

    def _start(
        self,
        call_id: int,
        timeout_ms: int,
        work: Coroutine[Any, Any, pb.Reply],
        arrived: float,
        answers: Answers,
        bulky: bool = False,
    ) -> None:
        """Run a call. Its reply is added to `answers` if it is available at once; otherwise it is sent later."""
        metrics = self._worker.metrics
        try:
            self._worker.check_in_flight()
            if bulky and self._bulky >= _BULKY_AT_ONCE:
                problem = f"{_BULKY_AT_ONCE} Renders and Snapshots of this stream are being worked on; try again later"
                raise overloaded("large_replies", problem, _RETRY_SECONDS)
        except CallError as error:
            work.close()
            metrics.error("Stream", error.reason)
            answers.message.replies.append(pb.Reply(call_id=call_id, error=error.status()))
            return
        timing = begin(arrived)
        reply, task = run_eagerly(work, self._tenant)
        if task is None:
            assert reply is not None
            answers.message.replies.append(reply)
            answers.environment_seconds += timing.environment
            return
        self._worker.keep(task)
        waiter = task if not timeout_ms else asyncio.get_running_loop().create_task(_expire(task, call_id, timeout_ms))
        self._tasks.add(waiter)
        if bulky:
            self._bulky += 1
            task.add_done_callback(self._count_down)
        waiter.add_done_callback(partial(self._finish, timing))

    def _count_down(self, _: asyncio.Task[pb.Reply]) -> None:
        self._bulky -= 1

    def _finish(self, timing: Timing, task: asyncio.Task[pb.Reply]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._outbox.add(task.result(), timing)

    async def _serve(self, call: pb.Call, verb: str | None) -> pb.Reply:
        try:
            if verb is None:
                raise bad_argument("call.request", f"is not set; set one of {', '.join(VERBS)}")
            response = await getattr(self._calls, verb)(self._table, getattr(call, verb))
            return pb.Reply(call_id=call.call_id, **{verb: response})
        except Exception as error:
            return pb.Reply(call_id=call.call_id, error=self._status(verb or "Stream", error))

    async def _serve_row(self, rows: ResetRows | StepRows, row: int) -> pb.Reply:
        call_id = rows.call_ids[row]
        try:
            if isinstance(rows, ResetRows):
                return pb.Reply(call_id=call_id, reset=await self._calls.reset(self._table, rows.request(row)))
            index, actions = rows.indices[row], rows.actions[row]
            session = self._table.find(rows.session_ids[row])
            check_texts(actions, self._worker.limits)
            transition = await self._calls.turn(session, rows.epochs[row], index, actions, None)
            reply = pb.Reply(call_id=call_id)
            reply.step.next_step_index = index + 1
            self._calls.write_transition(reply.step.transition, session, transition)
            return reply
        except Exception as error:
            return pb.Reply(call_id=call_id, error=self._status(rows.verb, error))

    def _status(self, verb: str, error: Exception) -> status_pb2.Status:
        failure = self._worker.failures.as_call_error(error)
        self._worker.metrics.error(verb.capitalize(), failure.reason)
        release(error)
        return failure.status()

    async def _write(self, answers: Answers, arrived: float) -> None:
        response, count = answers.message, len(answers)
        if count:
            response.timing.environment_ms = 1e3 * answers.environment_seconds
            response.timing.total_ms = 1e3 * (clock() - arrived) * count
        if count or response.acknowledged:
            size = await self._outbox.write(response)
        if count:
            self._rows_at_once = max(1, min(ROWS_AT_ONCE, count * _MESSAGE_BYTES // size))


async def _expire(task: asyncio.Task[pb.Reply], call_id: int, timeout_ms: int) -> pb.Reply:
    done, _ = await asyncio.wait([task], timeout=timeout_ms / 1000)
    if done:
        return task.result()
    error = CallError("DEADLINE", f"not done within {timeout_ms} ms, but still running; send the same call again")
    return pb.Reply(call_id=call_id, error=error.status())
