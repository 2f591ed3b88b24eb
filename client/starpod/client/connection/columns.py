"""Encoding and decoding of text turns and resets as columns: one message for the calls of many sessions.

The proto defines the format: see StepColumns and TransitionColumns, ResetColumns and StartColumns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress, repeat
from operator import attrgetter
from typing import Any, NamedTuple

from starpod.client.connection.calls import Reset, ServerCall, SessionStep, StartRow
from starpod.client.connection.replies import BrokenReply, check_rewards
from starpod.client.observation import Flags, Shares
from starpod.v1 import environment_pb2 as pb
from starpod.v1.values import EndReason

End = tuple[EndReason, bool | None]
"""Reason for which an episode ended, and whether the task was solved; None means unknown."""

_actions = attrgetter("actions")
_SUCCESS = (None, False, True)
_ENDS = tuple(EndReason)


class StepBatch(NamedTuple):
    """Replies that came in one message. Row i of every list belongs to steps[i]."""

    steps: list[SessionStep]
    texts: list[str]
    """Texts of the observations."""
    rewards: list[float]
    """Rewards of the turns."""
    keys: list[bytes]
    """State keys; b"" if they are not wanted."""
    flags: Sequence[Flags]
    shares: Sequence[Shares]
    ends: dict[int, End]
    """Rows at which the episode ended."""


def write_steps(
    columns: pb.StepColumns, steps: Sequence[SessionStep], actions: Sequence[str], counts: Sequence[int], first: int
) -> None:
    """Append steps to the columns.

    Args:
        actions: the actions of all steps, concatenated.
        counts: number of actions per step; empty means one per step.
        first: call id of the first step; the following steps have consecutive ids.

    Raises:
        UnicodeEncodeError: an action cannot be encoded as UTF-8.
    """
    columns.actions.extend(actions)
    columns.call_ids.extend(range(first, first + len(steps)))
    columns.session_ids.extend([step.session_id for step in steps])
    columns.epochs.extend([step.epoch for step in steps])
    columns.step_indices.extend([step.step_index for step in steps])
    columns.action_counts.extend(counts)


def read_transitions(
    columns: pb.TransitionColumns, pending: dict[int, SessionStep | ServerCall[Any, Any]]
) -> tuple[StepBatch, list[tuple[SessionStep, BrokenReply]]]:
    """Decode replies and remove their steps from `pending`. Skip rows with an unknown id, which are late duplicates.

    Returns:
        The valid rows, and the steps whose row breaks the protocol, each with the error.

    Raises:
        Exception: the message is malformed. `pending` is unchanged then.
    """
    # Slices make lists, which are faster to iterate over than repeated fields.
    call_ids = columns.call_ids[:]
    count = len(call_ids)
    texts, rewards = columns.texts[:], columns.rewards[:]
    keys = columns.state_keys[:] or [b""] * count
    flags: Sequence[Flags] = columns.outcome_flags[:]
    shares: Sequence[Shares] = columns.outcome_rewards[:] or rewards
    if columns.outcome_counts:
        flags, shares = _split_rows(columns)
    if not count == len(texts) == len(rewards) == len(keys) == len(flags) == len(shares):
        raise ValueError("its columns differ in length")
    ends: dict[int, End] = {}
    if columns.ended_rows and max(columns.ended_rows) >= count:
        raise ValueError("it ends a row that it does not have")
    if columns.ended_rows:
        reasons = map(_ENDS.__getitem__, columns.end_reasons)
        successes = map(_SUCCESS.__getitem__, columns.end_successes)
        ends = dict(zip(columns.ended_rows, zip(reasons, successes, strict=True), strict=True))
    steps = list(map(pending.pop, call_ids, repeat(None)))
    batch = StepBatch(steps, texts, rewards, keys, flags, shares, ends)  # type: ignore[arg-type]
    kinds = set(map(type, steps))
    if len(kinds) != 1 or not issubclass(kinds.pop(), SessionStep):
        for call_id, call in zip(call_ids, steps, strict=True):
            if isinstance(call, ServerCall):
                pending[call_id] = call  # a row can only answer a step
        batch = _keep_rows(batch, [isinstance(step, SessionStep) for step in steps])
    errors = _broken_rows(batch, single=not columns.outcome_counts)
    refusals = [(batch.steps[row], reason) for row, reason in errors.items()]
    return (_keep_rows(batch, [row not in errors for row in range(len(batch.steps))]) if errors else batch), refusals


def write_resets(columns: pb.ResetColumns, resets: Sequence[Reset], first: int) -> None:
    """Append resets, whose call ids begin at `first`. All or none of them have a seed, and a dynamics seed."""
    sessions = [reset.session for reset in resets]
    columns.call_ids.extend(range(first, first + len(resets)))
    columns.session_ids.extend([session.session_id for session in sessions])
    columns.epochs.extend([session.epoch for session in sessions])
    columns.seeds.extend([reset.seed for reset in resets if reset.seed is not None])
    columns.dynamics_seeds.extend([reset.dynamics_seed for reset in resets if reset.dynamics_seed is not None])


def read_starts(
    columns: pb.StartColumns, pending: dict[int, SessionStep | ServerCall[Any, Any]]
) -> list[tuple[Reset, StartRow | BrokenReply]]:
    """Decode replies and remove their resets from `pending`. Skip rows with an unknown id, which are late duplicates.

    Returns:
        The resets, each with its new episode, or with the error if its row breaks the protocol.

    Raises:
        Exception: the message is malformed. `pending` is unchanged then.
    """
    call_ids, texts = columns.call_ids[:], columns.instructions[:]
    keys = columns.state_keys[:] or [b""] * len(call_ids)
    places = columns.instruction_places[:] or [0] * len(call_ids)
    instructions = [texts[place] for place in places]
    rows = zip(columns.texts, keys, columns.seeds, columns.dynamics_seeds, instructions, strict=True)
    starts = list(map(StartRow._make, rows))
    results: list[tuple[Reset, StartRow | BrokenReply]] = []
    for call_id, start in list(zip(call_ids, starts, strict=True)):
        reset = pending.get(call_id)
        if not isinstance(reset, Reset):
            continue  # a row can only answer a reset
        del pending[call_id]
        if not reset.plain:
            results.append((reset, BrokenReply("a row of columns for a reset of more than seeds")))
        elif reset.seed is not None and start.seed != reset.seed:
            results.append((reset, BrokenReply(f"asked for seed {reset.seed}, it began {start.seed}")))
        else:
            results.append((reset, start))
    return results


def _broken_rows(batch: StepBatch, *, single: bool) -> dict[int, BrokenReply]:
    """Return the error of each invalid row.

    `single` says that each row has one outcome. A valid batch is then checked by a few calls of built-in functions,
    which is faster than a loop over the rows.
    """
    try:
        check_rewards(batch.rewards)
        if single:
            if batch.shares is not batch.rewards:
                check_rewards(batch.shares)  # type: ignore[arg-type]
            if set(map(len, map(_actions, batch.steps))) <= {1}:
                return {}
    except BrokenReply:
        pass
    errors: dict[int, BrokenReply] = {}
    for row, (step, reward, flags, shares) in enumerate(
        zip(batch.steps, batch.rewards, batch.flags, batch.shares, strict=True)
    ):
        outcome_count = len(flags) if isinstance(flags, tuple) else 1
        try:
            check_rewards([reward, *(shares if isinstance(shares, tuple) else (shares,))])
            if outcome_count != len(step.actions):
                raise BrokenReply(f"{outcome_count} outcomes for {len(step.actions)} sub-actions")
        except BrokenReply as error:
            errors[row] = error
    return errors


def _split_rows(columns: pb.TransitionColumns) -> tuple[list[Flags], list[Shares]]:
    """Return the flags and reward shares of each row, for columns whose rows may have several sub-actions or none."""
    flags: list[Flags] = []
    shares: list[Shares] = []
    all_flags, all_shares = tuple(columns.outcome_flags), tuple(columns.outcome_rewards)
    start = 0
    for count, reward in zip(columns.outcome_counts, columns.rewards, strict=True):
        row_slice = slice(start, start + count)
        row_shares = all_shares[row_slice] if all_shares else (reward,) * count
        if len(all_flags[row_slice]) != count or len(row_shares) != count:
            raise ValueError("the outcomes are fewer than their counts say")
        flags.append(all_flags[start] if count == 1 else all_flags[row_slice])
        shares.append(row_shares[0] if count == 1 else row_shares)
        start += count
    return flags, shares


def _keep_rows(batch: StepBatch, mask: list[bool]) -> StepBatch:
    new_row = list(accumulate(mask, initial=0))
    return StepBatch(
        list(compress(batch.steps, mask)),
        list(compress(batch.texts, mask)),
        list(compress(batch.rewards, mask)),
        list(compress(batch.keys, mask)),
        list(compress(batch.flags, mask)),
        list(compress(batch.shares, mask)),
        {new_row[row]: end for row, end in batch.ends.items() if mask[row]},
    )
