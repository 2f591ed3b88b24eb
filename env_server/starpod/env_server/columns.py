"""Steps in columns: the hot path. One pass over the rows, no message and no coroutine per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain, compress

from starpod.env_server.convert import fill_transition, outcome_flags
from starpod.env_server.environment import Busy, Environment
from starpod.env_server.episode import Transition
from starpod.env_server.errors import bad_argument
from starpod.env_server.metrics import Metrics
from starpod.env_server.session import SessionTable
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

    def take(self, call_ids: list[int], indices: list[int], transitions: list[Transition]) -> None:
        """Adds the transitions of a batch, one per call. indices: the steps' own."""
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
            self.take(list(compress(call_ids, fit)), list(compress(indices, fit)), list(compress(transitions, fit)))
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


def step_rows(
    rows: Rows,
    start: int,
    stop: int,
    table: SessionTable,
    max_actions: int,
    metrics: Metrics,
    transitions: Transitions,
) -> list[int]:
    """Steps the rows whose sessions can be stepped here and now; returns the others.

    The others are repeated, late, malformed or of another concurrency class, or their session is busy, or their
    environment raised: then the session keeps the exception for the slow path to report.
    """
    others: list[int] = []
    get, clock, now = table.get, time.perf_counter, time.monotonic()
    done: list[Transition] = []
    environment: type[Environment] | None = None
    stepped = 0
    seconds: list[float] = []
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
            others.append(row)
            continue
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
            others.append(row)  # nothing has changed; the slow path tries once more and reports
            continue
        except Exception as error:
            session.broken = error
            others.append(row)
            continue
        stepped += 1
        session.next_index = index + 1
        session.last_actions = actions
        session.last_transition = transition
        session.touched = now
        if transition.end_reason:
            session.over = True
        done.append(transition)
    if environment is not None:
        metrics.steps(environment.spec.id, stepped, seconds)
        transitions.environment_seconds += _scaled(seconds, stepped)
    if others:
        left = set(others)
        stayed = [row not in left for row in range(start, stop)]
        call_ids = list(compress(rows.call_ids[start:stop], stayed))
        indices = list(compress(rows.indices[start:stop], stayed))
    else:
        call_ids, indices = rows.call_ids[start:stop], rows.indices[start:stop]
    transitions.take(call_ids, indices, done)
    return others


def fill_step_reply(reply: pb.Reply, call_id: int, transition: Transition | pb.Transition, next_index: int) -> None:
    """Writes the reply to a turn, as a message of its own, into an empty one."""
    reply.call_id = call_id
    if isinstance(transition, Transition):
        fill_transition(reply.step.transition, transition)
    else:
        reply.step.transition.CopyFrom(transition)
    reply.step.next_step_index = next_index


def _scaled(sample: list[float], count: int) -> float:
    """The seconds of `count` steps of which a sample was timed."""
    return sum(sample) * count / len(sample) if sample else 0.0
