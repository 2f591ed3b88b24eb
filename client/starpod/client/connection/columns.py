"""Turns of plain text as columns, one message for many sessions: how they are written and read.

The rules of the columns are those of the proto's StepColumns and TransitionColumns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress, repeat
from typing import Any, NamedTuple

from starpod.client.connection.calls import Call, Step
from starpod.client.observation import EndReason, Flags, Shares
from starpod.v1 import environment_pb2 as pb

End = tuple[EndReason, bool | None]
"""Why an episode ended, and whether the task was solved."""

_SUCCESS = (None, False, True)
_ENDS = tuple(EndReason)


class StepBatch(NamedTuple):
    """Replies to steps that came together. Row i of every list belongs to steps[i].

    texts: of the observations. rewards: of the turns. keys: state keys, empty where they are not wanted.
    flags, shares: of the sub-actions, as `Transition` takes them. ends: by row, where the episode ended.
    """

    steps: list[Step]
    texts: list[str]
    rewards: list[float]
    keys: list[bytes]
    flags: Sequence[Flags]
    shares: Sequence[Shares]
    ends: dict[int, End]


def write_steps(
    columns: pb.StepColumns, steps: Sequence[Step], actions: Sequence[str], counts: Sequence[int], first: int
) -> None:
    """Fills in the steps. actions: of all, in order. counts: how many each has; empty: one each.
    first: the call id of the first, from which the others count on.

    Raises UnicodeEncodeError if an action is no text that can travel.
    """
    columns.actions.extend(actions)
    columns.call_ids.extend(range(first, first + len(steps)))
    columns.session_ids.extend([step.session_id for step in steps])
    columns.epochs.extend([step.epoch for step in steps])
    columns.step_indices.extend([step.step_index for step in steps])
    columns.action_counts.extend(counts)


def read_transitions(columns: pb.TransitionColumns, pending: dict[int, Step | Call[Any, Any]]) -> StepBatch:
    """Takes the rows' steps out of `pending`. A row whose id is not there is a late duplicate and left out.

    Raises whatever a message raises that is not as it should be; nothing was taken out of `pending` then.
    """
    # Slices: a repeated field is slow to walk through.
    call_ids = columns.call_ids[:]
    count = len(call_ids)
    texts, rewards = columns.texts[:], columns.rewards[:]
    keys = columns.state_keys[:] or [b""] * count
    flags: Sequence[Flags] = columns.outcome_flags[:]
    shares: Sequence[Shares] = columns.outcome_rewards[:] or rewards
    if columns.outcome_counts:
        flags, shares = _per_row(columns)
    if not count == len(texts) == len(rewards) == len(keys) == len(flags) == len(shares):
        raise ValueError("its columns differ in length")
    ends: dict[int, End] = {}
    if columns.ended_rows:
        reasons = map(_ENDS.__getitem__, columns.end_reasons)
        successes = map(_SUCCESS.__getitem__, columns.end_successes)
        ends = dict(zip(columns.ended_rows, zip(reasons, successes, strict=True), strict=True))
    steps = list(map(pending.pop, call_ids, repeat(None)))
    batch = StepBatch(steps, texts, rewards, keys, flags, shares, ends)  # type: ignore[arg-type]
    kinds = set(map(type, steps))
    if len(kinds) == 1 and issubclass(kinds.pop(), Step):
        return batch
    for call_id, call in zip(call_ids, steps, strict=True):
        if isinstance(call, Call):
            pending[call_id] = call  # no row can answer it
    return _keep(batch, [isinstance(step, Step) for step in steps])


def _per_row(columns: pb.TransitionColumns) -> tuple[list[Flags], list[Shares]]:
    """Flags and shares where rows have other numbers of sub-actions than one."""
    flags: list[Flags] = []
    shares: list[Shares] = []
    all_flags, all_shares = tuple(columns.outcome_flags), tuple(columns.outcome_rewards)
    start = 0
    for count, reward in zip(columns.outcome_counts, columns.rewards, strict=True):
        part = slice(start, start + count)
        row_shares = all_shares[part] if all_shares else (reward,) * count
        if len(all_flags[part]) != count or len(row_shares) != count:
            raise ValueError("the outcomes are fewer than their counts say")
        flags.append(all_flags[start] if count == 1 else all_flags[part])
        shares.append(row_shares[0] if count == 1 else row_shares)
        start += count
    return flags, shares


def _keep(batch: StepBatch, kept: list[bool]) -> StepBatch:
    """The batch without the rows that are not kept."""
    place = list(accumulate(kept, initial=0))
    return StepBatch(
        list(compress(batch.steps, kept)),
        list(compress(batch.texts, kept)),
        list(compress(batch.rewards, kept)),
        list(compress(batch.keys, kept)),
        list(compress(batch.flags, kept)),
        list(compress(batch.shares, kept)),
        {place[row]: end for row, end in batch.ends.items() if kept[row]},
    )
