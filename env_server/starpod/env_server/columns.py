"""Steps in columns: the hot path. One pass over the rows, no message and no coroutine per step."""

from __future__ import annotations

import time
from collections.abc import Sequence

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
    """Collects transitions; those that fit travel as columns, the others as replies."""

    __slots__ = (
        "call_ids",
        "counts",
        "end_reasons",
        "ended_rows",
        "environment_seconds",
        "flags",
        "keys",
        "replies",
        "rewards",
        "shares",
        "successes",
        "texts",
    )

    def __init__(self) -> None:
        self.replies: list[pb.Reply] = []
        self.call_ids: list[int] = []
        self.texts: list[str] = []
        self.rewards: list[float] = []
        self.keys: list[bytes] = []
        self.counts: list[int] = []
        self.flags: list[int] = []
        self.shares: list[float] = []
        self.ended_rows: list[int] = []
        self.end_reasons: list[int] = []
        self.successes: list[int] = []
        self.environment_seconds = 0.0

    def message(self) -> pb.StreamResponse:
        """Everything that was collected."""
        if not self.call_ids:
            return pb.StreamResponse(replies=self.replies)
        single = len(self.flags) == len(self.call_ids) and max(self.counts) == 1
        columns = pb.TransitionColumns(
            call_ids=self.call_ids,
            texts=self.texts,
            rewards=self.rewards,
            state_keys=self.keys if any(self.keys) else None,
            outcome_counts=None if single else self.counts,
            outcome_flags=self.flags,
            outcome_rewards=None if single else self.shares,
            ended_rows=self.ended_rows,
            end_reasons=self.end_reasons,  # type: ignore[arg-type]
            end_successes=self.successes,
        )
        return pb.StreamResponse(replies=self.replies, transitions=columns)


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
    texts, call_ids, rewards, keys = transitions.texts, transitions.call_ids, transitions.rewards, transitions.keys
    counts, flags, shares = transitions.counts, transitions.flags, transitions.shares
    environment: type[Environment] | None = None
    stepped = 0
    seconds: list[float] = []
    columns = (rows.call_ids, rows.session_ids, rows.epochs, rows.indices, rows.actions)
    if (start, stop) != (0, len(rows)):
        columns = tuple(column[start:stop] for column in columns)  # type: ignore[assignment]
    for row, (call_id, session_id, epoch, index, actions) in enumerate(zip(*columns, strict=True), start):
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
        text, key, extras, reward, outcomes, end, success, details = transition
        if end:
            session.over = True
        if extras is not None or details is not None or type(text) is not str:
            transitions.replies.append(step_reply(call_id, transition, index + 1))
            continue
        if end:
            transitions.ended_rows.append(len(call_ids))
            transitions.end_reasons.append(end)
            transitions.successes.append(0 if success is None else 2 if success else 1)
        call_ids.append(call_id)
        texts.append(text)
        rewards.append(reward)
        keys.append(key)
        counts.append(len(outcomes))
        for outcome in outcomes:
            if outcome is None:
                flags.append(outcome_flags(None))
                shares.append(0.0)
            else:
                share, _, _, _, valid, effective, _, _, _ = outcome
                flags.append(7 if valid and effective else outcome_flags(outcome))
                shares.append(share)
    if environment is not None:
        metrics.steps(environment.spec.id, stepped, seconds)
        transitions.environment_seconds += _scaled(seconds, stepped)
    return others


def step_reply(call_id: int, transition: Transition | pb.Transition, next_index: int) -> pb.Reply:
    """The reply to a turn as a message of its own."""
    reply = pb.Reply(call_id=call_id)
    if isinstance(transition, Transition):
        fill_transition(reply.step.transition, transition)
    else:
        reply.step.transition.CopyFrom(transition)
    reply.step.next_step_index = next_index
    return reply


def _scaled(sample: list[float], count: int) -> float:
    """The seconds of `count` steps of which a sample was timed."""
    return sum(sample) * count / len(sample) if sample else 0.0
