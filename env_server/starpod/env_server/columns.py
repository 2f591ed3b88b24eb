"""Steps in columns: the hot path. One pass over the rows, no message and no coroutine per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain, compress
from typing import NamedTuple

from starpod.env_server.convert import fill_transition, outcome_flags
from starpod.env_server.environment import Busy, Environment
from starpod.env_server.episode import Transition
from starpod.env_server.errors import bad_argument
from starpod.env_server.metrics import Metrics
from starpod.env_server.session import Session, SessionTable
from starpod.v1 import environment_pb2 as pb

ROWS_AT_ONCE = 512
"""Rows after which a batch answers and lets others have the event loop: a few milliseconds of inline steps."""

SAMPLED = 8
"""One inline step in so many is timed: a clock costs a good part of such a step."""


class Rows:
    """The columns of a request as lists, checked for equal length.

    Raises CallError (BAD_ARGUMENT) if the columns do not fit together: then no row can be told from another.
    """

    __slots__ = ("actions", "call_ids", "epochs", "indices", "session_ids")

    def __init__(self, columns: pb.StepColumns) -> None:
        # Slices: a repeated field is slow to walk through.
        self.call_ids = columns.call_ids[:]
        self.session_ids = columns.session_ids[:]
        self.epochs = columns.epochs[:]
        self.indices = columns.step_indices[:]
        texts = columns.actions[:]
        counts = columns.action_counts
        rows = len(self.call_ids)
        if counts:
            self.actions: list[Sequence[str]] = []
            start = 0
            for count in counts:
                self.actions.append(texts[start : start + count])
                start += count
            if start != len(texts):
                raise bad_argument("steps.actions", f"has {len(texts)} entries; action_counts add up to {start}")
        else:
            self.actions = list(zip(texts, strict=True))
        for name, column in (
            ("session_ids", self.session_ids),
            ("epochs", self.epochs),
            ("step_indices", self.indices),
            ("actions", self.actions),
        ):
            if len(column) != rows:
                raise bad_argument(f"steps.{name}", f"has {len(column)} rows; call_ids has {rows}")

    def __len__(self) -> int:
        return len(self.call_ids)


class Transitions:
    """The answer to a message, while it is collected: transitions that fit travel as columns, all else as replies.

    environment_seconds: how long environments worked for it.
    """

    __slots__ = ("environment_seconds", "message")

    def __init__(self) -> None:
        # Filled in place: a message that is put into another one is copied.
        self.message = pb.StreamResponse()
        self.environment_seconds = 0.0

    def __len__(self) -> int:
        """How many calls it answers."""
        return len(self.message.replies) + len(self.message.transitions.call_ids)

    def take(self, call_ids: list[int], indices: list[int], transitions: list[Transition]) -> dict[int, Exception]:
        """Adds the transitions of a batch, one per call. indices: the steps' own.

        Returns the places of those that no message can hold, with what is wrong: their environments gave what cannot
        travel. The others are added.
        """
        before = len(self.message.replies)
        try:
            self._write(call_ids, indices, transitions)
            return {}
        except Exception:
            self.message.ClearField("transitions")
            del self.message.replies[before:]
        wrong: dict[int, Exception] = {}
        for place, (call_id, index, transition) in enumerate(zip(call_ids, indices, transitions, strict=True)):
            reply = pb.Reply()
            try:
                fill_step_reply(reply, call_id, transition, index + 1)
            except Exception as error:
                wrong[place] = error
            else:
                self.message.replies.append(reply)
        return wrong

    def _write(self, call_ids: list[int], indices: list[int], transitions: list[Transition]) -> None:
        if not transitions:
            return
        # Column by column in C, not row by row: rows that do not fit are rare, and looked for only if there are any.
        texts, keys, extras, rewards, outcomes, ends, successes, details = zip(*transitions, strict=True)
        count = len(texts)
        if not (extras.count(None) == details.count(None) == count and set(map(type, texts)) == {str}):
            fit = [type(each[0]) is str and each[2] is None and each[7] is None for each in transitions]
            for call_id, transition, index, fits in zip(call_ids, transitions, indices, fit, strict=True):
                if not fits:
                    fill_step_reply(self.message.replies.add(), call_id, transition, index + 1)
            self._write(list(compress(call_ids, fit)), list(compress(indices, fit)), list(compress(transitions, fit)))
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
            over = [row for row, end in enumerate(ends) if end]
            columns.ended_rows.extend(over)
            columns.end_reasons.extend([ends[row].value for row in over])
            columns.end_successes.extend([_SUCCESSES[successes[row]] for row in over])


_SUCCESSES = {None: 0, False: 1, True: 2}


class Broken(NamedTuple):
    """A row whose environment raised, or gave what cannot travel: its session cannot go on."""

    row: int
    session: Session
    error: Exception | SystemExit


def step_rows(
    rows: Rows,
    start: int,
    stop: int,
    table: SessionTable,
    max_actions: int,
    metrics: Metrics,
    transitions: Transitions,
) -> tuple[list[int], list[Broken]]:
    """Steps the rows whose sessions can be stepped here and now; returns the others, and those that broke a session.

    The others are repeated, late, malformed or of another concurrency class, or their session is busy.
    """
    others: list[int] = []
    broken: list[Broken] = []
    get, clock, now = table.get, time.perf_counter, time.monotonic()
    done: list[Transition] = []
    environment: type[Environment] | None = None
    stepped = 0
    seconds: list[float] = []
    columns = (rows.session_ids, rows.epochs, rows.indices, rows.actions)
    if (start, stop) != (0, len(rows)):
        columns = tuple(column[start:stop] for column in columns)  # type: ignore[assignment]
    for session_id, epoch, index, actions in zip(*columns, strict=True):
        session = get(session_id)
        if (
            session is not None
            and session.next_index == index
            and session.epoch == epoch
            and not session.over
            and not session.pending
            and (episode := session.host.episode) is not None
            and len(actions) <= max_actions
        ):
            if session.environment is not environment:
                if environment is not None:
                    metrics.steps(environment.spec.id, stepped, seconds)
                    transitions.environment_seconds += _scaled(seconds, stepped)
                    stepped, seconds = 0, []
                environment = session.environment
            try:
                if stepped % SAMPLED:
                    transition = episode.turn(actions, session.want)
                else:
                    before = clock()
                    transition = episode.turn(actions, session.want)
                    seconds.append(clock() - before)
            except Busy:
                pass  # nothing has changed; the slow path tries once more and reports
            except (Exception, SystemExit) as error:
                session.host.close()  # no later row may play on in what the exception left
                broken.append(Broken(start + len(done) + len(others) + len(broken), session, error))
                continue
            else:
                stepped += 1
                session.next_index = index + 1
                session.last_actions = actions
                session.last_transition = transition
                session.touched = now
                if episode.end_reason:
                    session.over = True
                done.append(transition)
                continue
        others.append(start + len(done) + len(others) + len(broken))
    if environment is not None:
        metrics.steps(environment.spec.id, stepped, seconds)
        transitions.environment_seconds += _scaled(seconds, stepped)
    stepped_rows: Sequence[int] = range(start, stop)
    call_ids, indices = rows.call_ids[start:stop], rows.indices[start:stop]
    if others or broken:
        left = {*others, *(each.row for each in broken)}
        stayed = [row not in left for row in stepped_rows]
        call_ids, indices = list(compress(call_ids, stayed)), list(compress(indices, stayed))
        stepped_rows = list(compress(stepped_rows, stayed))
    for place, problem in transitions.take(call_ids, indices, done).items():
        row = stepped_rows[place]
        broken.append(Broken(row, table[rows.session_ids[row]], problem))
    return others, broken


def fill_step_reply(reply: pb.Reply, call_id: int, transition: Transition, next_index: int) -> None:
    """Writes the reply to a turn, as a message of its own, into an empty one."""
    reply.call_id = call_id
    fill_transition(reply.step.transition, transition)
    reply.step.next_step_index = next_index


def _scaled(sample: list[float], count: int) -> float:
    """The seconds of `count` steps of which a sample was timed."""
    return sum(sample) * count / len(sample) if sample else 0.0
