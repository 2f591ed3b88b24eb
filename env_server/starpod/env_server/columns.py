"""Steps in columns: the hot path. One pass over the rows, no message and no coroutine per step."""

from __future__ import annotations

import time
from starpod.env_server.convert import outcome_flags, transition_to
from starpod.env_server.environment import Environment
from starpod.env_server.episode import Transition
from starpod.env_server.errors import bad_argument
from starpod.env_server.metrics import Metrics
from starpod.env_server.session import SessionTable
from starpod.v1 import environment_pb2 as pb

ROWS_AT_ONCE = 512
"""Rows after which a batch answers and lets others have the event loop: a few milliseconds of inline steps."""


class Rows:
    """The columns of a request as lists, checked for equal length.

    Raises CallError (BAD_ARGUMENT) if the columns do not fit together: then no row can be told from another.
    """

    __slots__ = ("actions", "call_ids", "epochs", "indices", "session_ids")

    def __init__(self, columns: pb.StepColumns) -> None:
        self.call_ids = list(columns.call_ids)
        self.session_ids = list(columns.session_ids)
        self.epochs = list(columns.epochs)
        self.indices = list(columns.step_indices)
        texts = list(columns.actions)
        counts = columns.action_counts
        rows = len(self.call_ids)
        if counts:
            self.actions: list[list[str]] = []
            start = 0
            for count in counts:
                self.actions.append(texts[start : start + count])
                start += count
            if start != len(texts):
                raise bad_argument("steps.actions", f"has {len(texts)} entries; action_counts add up to {start}")
        else:
            self.actions = [[text] for text in texts]
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
    """Collects transitions as columns; those that do not fit become replies."""

    __slots__ = ("_call_ids", "_counts", "_end_reasons", "_ended_rows", "_flags", "_keys", "_rewards", "_shares",
                 "_single", "_successes", "_texts", "_wanted", "replies")

    def __init__(self) -> None:
        self.replies: list[pb.Reply] = []
        self._call_ids: list[int] = []
        self._texts: list[str] = []
        self._rewards: list[float] = []
        self._keys: list[bytes] = []
        self._counts: list[int] = []
        self._flags: list[int] = []
        self._shares: list[float] = []
        self._ended_rows: list[int] = []
        self._end_reasons: list[int] = []
        self._successes: list[int] = []
        self._single = True
        self._wanted = False

    def add(self, call_id: int, index: int, transition: Transition) -> None:
        """The reply to one step."""
        observation = transition.observation
        text = observation.parts
        if (
            type(text) is not str
            or transition.info is not None
            or transition.reward_parts is not None
            or transition.criteria is not None
            or observation.valid_actions is not None
            or observation.expert_action is not None
            or observation.score is not None
        ):
            step = pb.StepResponse(transition=transition_to(transition), next_step_index=index + 1)
            self.replies.append(pb.Reply(call_id=call_id, step=step))
            return
        reason = transition.end_reason
        if reason:
            self._ended_rows.append(len(self._call_ids))
            self._end_reasons.append(reason)
            success = transition.success
            self._successes.append(0 if success is None else 2 if success else 1)
        self._call_ids.append(call_id)
        self._texts.append(text)
        self._rewards.append(transition.reward)
        key = observation.state_key
        self._keys.append(key)
        if key:
            self._wanted = True
        outcomes = transition.outcomes
        self._counts.append(len(outcomes))
        if len(outcomes) != 1:
            self._single = False
        for outcome in outcomes:
            if outcome is None:
                self._flags.append(outcome_flags(None))
                self._shares.append(0.0)
            else:
                self._flags.append(7 if outcome.effective and outcome.valid else outcome_flags(outcome))
                self._shares.append(outcome.reward)

    def message(self) -> pb.StreamResponse:
        """Everything that was added."""
        response = pb.StreamResponse(replies=self.replies)
        if self._call_ids:
            response.transitions.CopyFrom(
                pb.TransitionColumns(
                    call_ids=self._call_ids,
                    texts=self._texts,
                    rewards=self._rewards,
                    state_keys=self._keys if self._wanted else (),
                    outcome_counts=() if self._single else self._counts,
                    outcome_flags=self._flags,
                    outcome_rewards=() if self._single else self._shares,
                    ended_rows=self._ended_rows,
                    end_reasons=self._end_reasons,  # type: ignore[arg-type]
                    end_successes=self._successes,
                )
            )
        return response


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
    call_ids, session_ids, epochs, indices, actions = (
        rows.call_ids,
        rows.session_ids,
        rows.epochs,
        rows.indices,
        rows.actions,
    )
    get, add, clock = table.get, transitions.add, time.perf_counter
    now = time.monotonic()
    environment: type[Environment] | None = None
    durations: list[float] = []
    for row in range(start, stop):
        session = get(session_ids[row])
        if (
            session is None
            or session.pending
            or session.over
            or session.next_index != indices[row]
            or session.epoch != epochs[row]
            or (episode := session.host.episode) is None
            or len(actions[row]) > max_actions
        ):
            others.append(row)
            continue
        if session.environment is not environment:
            if environment is not None:
                metrics.steps(environment.spec.id, durations)
                durations = []
            environment = session.environment
        before = clock()
        try:
            transition = episode.turn(actions[row], session.want)
        except Exception as error:
            session.broken = error
            others.append(row)
            continue
        durations.append(clock() - before)
        session.next_index += 1
        session.last_actions = actions[row]
        session.last_transition = transition
        session.touched = now
        if transition.end_reason:
            session.over = True
        add(call_ids[row], indices[row], transition)
    if environment is not None:
        metrics.steps(environment.spec.id, durations)
    return others
