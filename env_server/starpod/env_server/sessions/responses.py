"""Split replies that are too large for one message. A single reply that is too large becomes an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from starpod.env_server.episodes.errors import CallError
from starpod.v1 import environment_pb2 as pb

ENVELOPE_BYTES = 64
"""Maximum number of bytes that a Stream message with one reply has in addition to the reply."""


def split_response(
    response: pb.StreamResponse, size: int, limit: int, refuse: Callable[[int, int], CallError]
) -> Iterator[pb.StreamResponse]:
    """Split a response into messages of at most `limit` bytes.

    Args:
        size: bytes of the response.
        limit: maximum bytes of a message; 0 means no limit.
        refuse: returns the error of a call whose reply is too large, given the call's id and the bytes of the reply.
    """
    if not limit or size <= limit:
        yield response
        return
    replies, starts, transitions = response.replies, response.starts, response.transitions
    call_ids = [*(reply.call_id for reply in replies), *starts.call_ids, *transitions.call_ids]
    if len(call_ids) == 1:
        error = refuse(call_ids[0], size).status()
        yield pb.StreamResponse(
            replies=[pb.Reply(call_id=call_ids[0], error=error)], acknowledged=response.acknowledged
        )
        return
    if len(call_ids) == len(replies):
        middle = len(replies) // 2
        halves = [pb.StreamResponse(replies=part) for part in (replies[:middle], replies[middle:])]
    elif len(call_ids) == len(transitions.call_ids):
        halves = [pb.StreamResponse(transitions=half) for half in _halves(transitions)]
    elif len(call_ids) == len(starts.call_ids):
        halves = [pb.StreamResponse(starts=half) for half in _start_halves(starts)]
    else:
        halves = [pb.StreamResponse(replies=replies)] if replies else []
        halves += [pb.StreamResponse(starts=starts)] if starts.call_ids else []
        halves += [pb.StreamResponse(transitions=transitions)] if transitions.call_ids else []
    if response.HasField("timing"):
        halves[0].timing.CopyFrom(response.timing)
    halves[-1].acknowledged = response.acknowledged
    for half in halves:
        yield from split_response(half, half.ByteSize(), limit, refuse)


def _start_halves(columns: pb.StartColumns) -> Iterator[pb.StartColumns]:
    middle = len(columns.call_ids) // 2
    for part in (slice(None, middle), slice(middle, None)):
        yield pb.StartColumns(
            call_ids=columns.call_ids[part],
            texts=columns.texts[part],
            state_keys=columns.state_keys[part],
            seeds=columns.seeds[part],
            dynamics_seeds=columns.dynamics_seeds[part],
            instructions=columns.instructions,
            instruction_places=columns.instruction_places[part],
        )


def too_large(size: int, limit: int) -> CallError:
    """Return the TOO_LARGE error for a reply. The call was executed, but its reply cannot be sent."""
    return CallError(
        "TOO_LARGE",
        f"the reply has {size} bytes; this server sends at most {limit} in a message; ask for less at once, or raise "
        "its --max-message-bytes",
        {"limit": "max_message_bytes"},
    )


def _halves(columns: pb.TransitionColumns) -> Iterator[pb.TransitionColumns]:
    rows = len(columns.call_ids)
    middle = rows // 2
    flags_before = sum(columns.outcome_counts[:middle]) if columns.outcome_counts else middle
    ends_before = sum(row < middle for row in columns.ended_rows)
    for start, stop, flag_slice, end_slice in (
        (0, middle, slice(None, flags_before), slice(None, ends_before)),
        (middle, rows, slice(flags_before, None), slice(ends_before, None)),
    ):
        yield pb.TransitionColumns(
            call_ids=columns.call_ids[start:stop],
            texts=columns.texts[start:stop],
            rewards=columns.rewards[start:stop],
            state_keys=columns.state_keys[start:stop],
            outcome_counts=columns.outcome_counts[start:stop],
            outcome_flags=columns.outcome_flags[flag_slice],
            outcome_rewards=columns.outcome_rewards[flag_slice],
            ended_rows=[row - start for row in columns.ended_rows[end_slice]],
            end_reasons=columns.end_reasons[end_slice],
            end_successes=columns.end_successes[end_slice],
        )
