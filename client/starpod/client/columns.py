"""Turns of plain text as columns, one message for many sessions: how they are written, and how their replies are taken.

The rules of the columns are those of the proto's StepColumns and TransitionColumns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any

from starpod.client.entries import Entry
from starpod.client.observation import EndReason, Transition
from starpod.v1 import environment_pb2 as pb

if TYPE_CHECKING:
    from starpod.client.session import Gather, Session

_SUCCESS = (None, False, True)
_ENDS = tuple(EndReason)


def write_steps(
    columns: pb.StepColumns, sessions: Sequence[Session], actions: Sequence[Any], counts: Sequence[int], first: int
) -> None:
    """Fills in the sessions' turns. actions: of all, in order. counts: how many each has; empty: one each.
    first: the call id of the first, from which the others count on.

    Raises UnicodeEncodeError if an action is no text that can travel.
    """
    columns.actions.extend(actions)
    columns.call_ids.extend(range(first, first + len(sessions)))
    columns.session_ids.extend([session._session_id for session in sessions])
    columns.epochs.extend([session._epoch for session in sessions])
    columns.step_indices.extend([session._step_index for session in sessions])
    columns.action_counts.extend(counts)


def take_transitions(columns: pb.TransitionColumns, pending: dict[int, Entry]) -> None:
    """Takes the rows' calls out of `pending` and hands each its transition. One that is not there is a late duplicate.

    Raises whatever a message raises that is not as it should be; calls of rows not yet taken are pending still then.
    """
    # Slices: a repeated field is slow to walk through.
    call_ids = columns.call_ids[:]
    count = len(call_ids)
    pop: Callable[[int, None], Any] = pending.pop
    new, none = object.__new__, EndReason.NONE
    keys = columns.state_keys[:] or repeat(b"", count)
    flags: Any = columns.outcome_flags[:]
    outcome_rewards: Any = columns.outcome_rewards[:]
    if columns.outcome_counts:
        ends = [0]
        for outcome_count in columns.outcome_counts:
            ends.append(ends[-1] + outcome_count)
        slices = [slice(start, end) for start, end in pairwise(ends)]
        flags = [tuple(flags[part]) for part in slices]
        outcome_rewards = [tuple(outcome_rewards[part]) for part in slices] if outcome_rewards else repeat((), count)
    else:
        outcome_rewards = [(reward,) for reward in outcome_rewards] if outcome_rewards else repeat((), count)
    over: dict[int, tuple[EndReason, bool | None]] = {}
    if columns.ended_rows:
        # Looked up before any row is taken, in case there is none such.
        reasons = map(_ENDS.__getitem__, columns.end_reasons)
        successes = map(_SUCCESS.__getitem__, columns.end_successes)
        over = dict(zip(columns.ended_rows, zip(reasons, successes, strict=True), strict=True))
    texts, rewards = columns.texts[:], columns.rewards[:]
    digests = map(hash, zip(texts, rewards, strict=True))
    rows = zip(call_ids, texts, rewards, keys, digests, flags, outcome_rewards, strict=True)
    # The hot path: what Session._finish does, written out.
    gather: Gather | None = None
    gathered = 0
    try:
        for row, (call_id, text, reward, key, digest, flag, shares) in enumerate(rows):
            session = pop(call_id, None)
            if session is None:
                continue
            end_reason, success = none, None
            if over and row in over:
                end_reason, success = over[row]
            shown = key if session._show_key else b""
            transition = new(Transition)  # its __init__ would take twice as long
            transition._text, transition.reward, transition._key = text, reward, shown
            transition._flags, transition._outcome_rewards, transition._message = flag, shares, None
            transition.end_reason, transition.success = end_reason, success
            if session._checkpoints or session._waiting is not None:
                session._settle(transition, key, digest)
                continue
            session._step_index += 1
            session._last = transition
            history = session._history
            if history is not None:
                history.turns.append(session._turn)
                history.keys.append(key)
                history.digests.append(digest)
            session._busy = False
            slot, sink = session._slot, session._sink
            if slot < 0:
                if not sink.done():
                    sink.set_result(transition)
                continue
            sink.results[slot] = transition
            if sink is gather:
                gathered += 1
            else:
                if gather is not None:
                    gather.count(gathered)
                gather, gathered = sink, 1
    finally:
        if gather is not None:
            gather.count(gathered)
