"""Steps in columns, the hot path: one pass over the rows, without a message or a coroutine per step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple

from starpod.env_server.authoring.environment import Busy, Environment
from starpod.env_server.episodes.convert import fill_transition, outcome_flags
from starpod.env_server.episodes.errors import bad_argument
from starpod.env_server.episodes.live_episode import ObservedState, TurnResult
from starpod.env_server.operation.metrics import Metrics
from starpod.env_server.operation.tenants import SLICE_SECONDS
from starpod.env_server.processes.hosts import LocalHost
from starpod.env_server.sessions.requests import count_bytes
from starpod.env_server.sessions.session import SHORT_TEXT, ServedSession, digest_actions
from starpod.env_server.sessions.table import SessionTable
from starpod.env_server.sessions.worker import Worker
from starpod.serving.user_code import end_forked_copy, is_ctrl_c
from starpod.v1 import environment_pb2 as pb

ROWS_AT_ONCE = 512
"""Rows after which a batch sends its replies and yields the event loop, after a few milliseconds of inline steps."""

SAMPLED = 8
"""One in this many inline steps is timed, because reading a clock costs a good part of such a step."""


class Rows:
    """The columns of a request as lists of equal length, with one row for each call."""

    __slots__ = ("call_ids", "epochs", "session_ids")

    def __init__(self, columns: pb.StepColumns | pb.ResetColumns) -> None:
        # Copy the columns, because iterating over a repeated field is slow.
        self.call_ids = columns.call_ids[:]
        self.session_ids = columns.session_ids[:]
        self.epochs = columns.epochs[:]

    def __len__(self) -> int:
        return len(self.call_ids)

    def check_lengths(self, field: str, columns: Mapping[str, Sequence[Any]]) -> None:
        """Raise BAD_ARGUMENT if the columns, which `field` has by name, differ in length."""
        all_columns: dict[str, Sequence[Any]] = {"session_ids": self.session_ids, "epochs": self.epochs, **columns}
        for name, column in all_columns.items():
            if len(column) != len(self):
                raise bad_argument(f"{field}.{name}", f"has {len(column)} rows; call_ids has {len(self)}")

    def until_repeated(self, start: int, stop: int, sessions: Container[str]) -> int:
        """Return the first row in [start, stop) whose session has an earlier row there, or `stop` if there is none.

        Args:
            sessions: ids of the sessions that count; others may repeat.
        """
        ids = self.session_ids[start:stop]
        if len(set(ids)) == len(ids):
            return stop
        seen_ids: set[str] = set()
        for row, session_id in enumerate(ids, start):
            if session_id in seen_ids:
                return row
            if session_id in sessions:
                seen_ids.add(session_id)
        return stop


class StepRows(Rows):
    """The rows of steps.

    Attributes:
        long: whether a row may hold actions that are longer than a session keeps as text.

    Raises:
        CallError: BAD_ARGUMENT if the columns differ in length, so that rows cannot be identified.
    """

    __slots__ = ("actions", "indices", "long")
    verb = "Step"

    def __init__(self, columns: pb.StepColumns) -> None:
        super().__init__(columns)
        self.indices = columns.step_indices[:]
        texts = columns.actions[:]
        counts = columns.action_counts
        self.long = max(map(len, texts), default=0) * (max(counts) if counts else 1) > SHORT_TEXT
        if counts:
            self.actions: list[tuple[str, ...]] = []
            start = 0
            for count in counts:
                self.actions.append(tuple(texts[start : start + count]))
                start += count
            if start != len(texts):
                raise bad_argument("steps.actions", f"has {len(texts)} entries; action_counts add up to {start}")
        else:
            self.actions = list(zip(texts, strict=True))
        self.check_lengths("steps", {"step_indices": self.indices, "actions": self.actions})

    def has_turn_beyond(self, max_bytes: int, start: int, stop: int) -> bool:
        """Return whether a row in [start, stop) has more bytes of actions."""
        return any(count_bytes(turn, max_bytes) > max_bytes for turn in self.actions[start:stop])


class ResetRows(Rows):
    """The rows of resets. A seed is None if it is to be drawn, and a dynamics seed if it is to be derived.

    Raises:
        CallError: BAD_ARGUMENT if the columns differ in length.
    """

    __slots__ = ("dynamics_seeds", "seeds")
    verb = "Reset"

    def __init__(self, columns: pb.ResetColumns) -> None:
        super().__init__(columns)
        self.seeds: list[int | None] = [*columns.seeds] or [None] * len(self)
        self.dynamics_seeds: list[int | None] = [*columns.dynamics_seeds] or [None] * len(self)
        self.check_lengths("resets", {"seeds": self.seeds, "dynamics_seeds": self.dynamics_seeds})

    def request(self, row: int) -> pb.ResetRequest:
        """Return one row as a request."""
        return pb.ResetRequest(
            session_id=self.session_ids[row],
            epoch=self.epochs[row],
            seed=self.seeds[row],
            dynamics_seed=self.dynamics_seeds[row],
        )


Start = tuple[int, str, bytes, int, int, str]
"""A row of StartColumns: call id, text, state key, seed, dynamics seed, instructions."""


class Answers:
    """The response to a message while it is collected: plain transitions and starts as columns, others as replies.

    Attributes:
        environment_seconds: time that environments spent on the message.
    """

    __slots__ = ("environment_seconds", "message")

    def __init__(self) -> None:
        # Fill the message in place: protobuf copies a message that is put into another one.
        self.message = pb.StreamResponse()
        self.environment_seconds = 0.0

    def __len__(self) -> int:
        """Return the number of calls that it answers."""
        message = self.message
        return len(message.replies) + len(message.transitions.call_ids) + len(message.starts.call_ids)

    @property
    def columns(self) -> bool:
        """Whether a batch of rows was added. A second one of its kind cannot be, because rows count within a batch."""
        return len(self.message.transitions.call_ids) + len(self.message.starts.call_ids) > 0

    def add_starts(self, starts: list[Start]) -> None:
        """Add new episodes, one per call."""
        if not starts:
            return
        columns = self.message.starts
        call_ids, texts, keys, seeds, dynamics_seeds, instructions = zip(*starts, strict=True)
        columns.call_ids.extend(call_ids)
        columns.texts.extend(texts)
        if any(keys):
            columns.state_keys.extend(keys)
        columns.seeds.extend(seeds)
        columns.dynamics_seeds.extend(dynamics_seeds)
        places = {text: place for place, text in enumerate(dict.fromkeys(instructions))}
        columns.instructions.extend(places)
        if len(places) > 1:
            columns.instruction_places.extend([places[text] for text in instructions])

    def take(
        self,
        call_ids: list[int],
        indices: list[int],
        transitions: list[TurnResult],
        session_at: Callable[[int], ServedSession],
    ) -> dict[int, Exception]:
        """Add the transitions of a batch, one per call.

        The session keeps the serialized reply of a transition that is more than a text, because the environment may
        change the objects it returned.

        Args:
            indices: step index of each call, before the step.
            session_at: returns the session of the call at a position in these lists.

        Returns:
            The errors of transitions that no message can hold, by position. The others are added.
        """
        before = len(self.message.replies)
        try:
            self._write(call_ids, indices, transitions, session_at)
            return {}
        except Exception:
            self.message.ClearField("transitions")
            del self.message.replies[before:]
        errors: dict[int, Exception] = {}
        for position, (call_id, index, transition) in enumerate(zip(call_ids, indices, transitions, strict=True)):
            reply = pb.Reply()
            try:
                _fill_reply(reply, call_id, transition, index + 1, session_at(position))
            except Exception as error:
                errors[position] = error
            else:
                self.message.replies.append(reply)
        return errors

    def _write(
        self,
        call_ids: list[int],
        indices: list[int],
        transitions: list[TurnResult],
        session_at: Callable[[int], ServedSession],
    ) -> None:
        if not transitions:
            return
        # Transpose in C instead of looping over rows. Rows that need a reply of their own are rare.
        texts, keys, extras, rewards, outcomes, ends, successes, details = zip(*transitions, strict=True)
        count = len(texts)
        if not (extras.count(None) == details.count(None) == count and set(map(type, texts)) == {str}):
            immutable_flags = [transition.is_immutable for transition in transitions]
            steps = zip(call_ids, transitions, indices, immutable_flags, strict=True)
            for position, (call_id, transition, index, is_immutable) in enumerate(steps):
                if not is_immutable:
                    _fill_reply(self.message.replies.add(), call_id, transition, index + 1, session_at(position))
            self._write(
                list(compress(call_ids, immutable_flags)),
                list(compress(indices, immutable_flags)),
                list(compress(transitions, immutable_flags)),
                session_at,
            )
            return
        columns = self.message.transitions
        columns.call_ids.extend(call_ids)
        columns.texts.extend(texts)
        columns.rewards.extend(rewards)
        if any(keys):
            columns.state_keys.extend(keys)
        if set(map(len, outcomes)) == {1}:
            flat = [outcome for (outcome,) in outcomes]
        else:
            flat = list(chain.from_iterable(outcomes))
            columns.outcome_counts.extend(map(len, outcomes))
            columns.outcome_rewards.extend([0.0 if outcome is None else outcome[0] for outcome in flat])
        columns.outcome_flags.extend(
            [7 if each is not None and each[4] and each[5] else outcome_flags(each) for each in flat]  # the common case
        )
        if any(ends):
            ended_rows = [row for row, end in enumerate(ends) if end]
            columns.ended_rows.extend(ended_rows)
            columns.end_reasons.extend([ends[row].value for row in ended_rows])
            columns.end_successes.extend([_SUCCESSES[successes[row]] for row in ended_rows])


_SUCCESSES = {None: 0, False: 1, True: 2}


class BrokenRow(NamedTuple):
    """A row whose environment raised, or returned values that cannot be sent. Its session is lost."""

    row: int
    session: ServedSession
    error: BaseException


def reset_rows(
    rows: ResetRows, start: int, stop: int, table: SessionTable, worker: Worker, answers: Answers
) -> tuple[list[int], list[tuple[int, Exception]], int]:
    """Reset the sessions of the rows from `start` to `stop` as `step_rows` steps them.

    Returns:
        The rows that need the slow path, the rows that failed, each with its error, and the row at which to continue.
    """
    other_rows: list[int] = []
    failures: list[tuple[int, Exception]] = []
    starts: list[Start] = []
    now, deadline, process_id = time.monotonic(), time.perf_counter() + SLICE_SECONDS, os.getpid()
    for row in range(start, stop):
        session, host = table.get(rows.session_ids[row]), None
        if session is not None and session.epoch == rows.epochs[row] and not session.pending:
            host = session.host
        if (
            session is None
            or not isinstance(host, LocalHost)
            or host.episode is None
            or session.environment.spec.slow_reset
        ):
            other_rows.append(row)
            continue
        before = time.perf_counter()
        if before > deadline:
            stop = row
            break
        seeds = rows.seeds[row], rows.dynamics_seeds[row]
        plan = session.plan_episode(*seeds)
        try:
            started = host.start(plan)
        except Exception as error:
            failures.append((row, worker.failures.convert(session, error, "Reset")))
            continue
        answers.environment_seconds += time.perf_counter() - before
        session.begin_episode(plan)
        session.last_request, session.last_reply, session.last_call = seeds, started, now
        observation, instructions = started
        if isinstance(observation, ObservedState):
            text, key, _ = observation
            assert isinstance(text, str)
            starts.append((rows.call_ids[row], text, key, plan.seed, plan.dynamics_seed, instructions))
        else:
            reply = answers.message.replies.add(call_id=rows.call_ids[row])
            reply.reset.CopyFrom(session.reset_response(started))
            session.last_reply = reply.reset.SerializeToString()
    end_forked_copy(process_id, "an environment")
    answers.add_starts(starts)
    return other_rows, failures, stop


def step_rows(
    rows: StepRows, start: int, stop: int, table: SessionTable, worker: Worker, answers: Answers
) -> tuple[list[int], list[BrokenRow], int]:
    """Step the rows from `start` to `stop` whose sessions can be stepped inline, until SLICE_SECONDS have passed.

    No session may occur twice among them.

    Args:
        start: first row to step.
        stop: row after the last one.

    Returns:
        The rows that need the slow path (repeated, late, malformed, of another concurrency class or of a busy session),
        the rows that broke their session, and the row at which to continue.
    """
    other_rows: list[int] = []
    broken_rows: list[BrokenRow] = []
    results: list[TurnResult] = []
    get, clock, now, max_actions = table.get, time.perf_counter, time.monotonic(), worker.limits.max_step_actions
    deadline, has_long, process_id = clock() + SLICE_SECONDS, rows.long, os.getpid()
    environment: type[Environment] | None = None
    step_count, seconds = 0, list[float]()
    columns = (rows.session_ids, rows.epochs, rows.indices, rows.actions)
    if (start, stop) != (0, len(rows)):
        columns = tuple(column[start:stop] for column in columns)  # type: ignore[assignment]
    for row, (session_id, epoch, index, actions) in enumerate(zip(*columns, strict=True), start):
        session = get(session_id)
        if (
            session is None
            or session.next_index != index
            or session.epoch != epoch
            or session.over
            or session.pending
            or (episode := session.host.episode) is None
            or len(actions) > max_actions
        ):
            other_rows.append(row)
            continue
        if session.environment is not environment:
            _count_steps(environment, step_count, seconds, worker.metrics, answers)
            environment, step_count, seconds = session.environment, 0, []
        try:
            if step_count % SAMPLED:
                transition = episode.turn(actions, session.want)
            else:
                before = clock()
                if before > deadline:
                    break
                transition = episode.turn(actions, session.want)
                seconds.append(clock() - before)
        except Busy:
            other_rows.append(row)  # nothing has changed; the slow path retries and reports
            continue
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            session.host.close()  # no later row may step the state that the exception left
            broken_rows.append(BrokenRow(row, session, error))
            continue
        step_count += 1
        session.next_index = index + 1
        session.last_request = digest_actions(actions) if has_long else actions
        session.last_reply = transition
        session.last_call = now
        if episode.end_reason:
            session.over = True
        results.append(transition)
    end_forked_copy(process_id, "an environment")
    _count_steps(environment, step_count, seconds, worker.metrics, answers)
    stop = start + len(results) + len(other_rows) + len(broken_rows)
    skipped_rows = {*other_rows, *(failure.row for failure in broken_rows)}
    stepped_rows: Sequence[int] = range(start, stop)
    if skipped_rows:
        stepped_rows = [row for row in stepped_rows if row not in skipped_rows]
    return other_rows, [*broken_rows, *_answer(rows, stepped_rows, results, table, answers)], stop


def _answer(
    rows: StepRows, stepped_rows: Sequence[int], results: list[TurnResult], table: SessionTable, answers: Answers
) -> Iterator[BrokenRow]:
    """Add the results of rows to the answers. Yield the rows whose result cannot be sent."""

    def session_at(place: int) -> ServedSession:
        return table[rows.session_ids[stepped_rows[place]]]

    if isinstance(stepped_rows, range):
        part = slice(stepped_rows.start, stepped_rows.stop)
        call_ids, indices = rows.call_ids[part], rows.indices[part]
    else:
        call_ids, indices = [rows.call_ids[row] for row in stepped_rows], [rows.indices[row] for row in stepped_rows]
    for position, problem in answers.take(call_ids, indices, results, session_at).items():
        yield BrokenRow(stepped_rows[position], session_at(position), problem)


def _fill_reply(reply: pb.Reply, call_id: int, transition: TurnResult, next_index: int, session: ServedSession) -> None:
    """Write the reply to a turn into an empty message, and keep it in the session."""
    reply.call_id = call_id
    fill_transition(reply.step.transition, transition)
    reply.step.next_step_index = next_index
    session.last_reply = reply.step.transition.SerializeToString()


def _count_steps(
    environment: type[Environment] | None, count: int, sample: list[float], metrics: Metrics, answers: Answers
) -> None:
    """Count steps of an environment, of which a sample was timed."""
    if environment is not None and sample:
        metrics.steps(environment.spec.id, count, sample)
        answers.environment_seconds += sum(sample) * count / len(sample)
