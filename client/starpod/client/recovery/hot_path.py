"""The hot path of the client: a step without errors, from the caller to the connection and back.

A step costs the client 3 to 6 microseconds (`python -m benchmarks.serving.throughput --way "starpod, step_many"`). Code
is repeated here, because one more function call, object or comparison per step shows in that benchmark.
"""

from __future__ import annotations

from asyncio import Future, InvalidStateError
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat

from starpod.client.connection import StepBatch
from starpod.client.connection.columns import End
from starpod.client.history import Reply, digest_end
from starpod.client.observation import Actions, Transition, Want
from starpod.client.pool.replica import Replica
from starpod.client.recovery.state import CLOSED, BatchResult, SessionState
from starpod.v1.values import Action, EndReason

new = object.__new__
ONGOING: End = (EndReason.NONE, None)


def submit_one(state: SessionState, actions: Actions, want: Want | None) -> Future[list[Transition]]:
    """Send a step. No other call of the session may be in flight.

    Args:
        want: optional fields for this step; None means the session's.

    Returns:
        A future of a list with one item: the transition or the error.
    """
    replica = state.replica
    result = state.single
    future = result.future = replica.loop.create_future()
    result.values = [None]  # type: ignore[list-item]
    result.missing = 1
    queue = replica.queue
    if want is not None or len(actions) != 1 or type(actions[0]) is not str or state.closed or not queue.columns:
        submit(state, actions, want, result, 0)
        return future
    state.busy = state.plain = True
    state.actions = actions
    state.want = None
    state.result = result
    state.slot = 0
    steps = queue.ready_steps
    steps.append(state)
    if len(steps) == 1:  # otherwise an earlier step has woken it
        replica.wake()
    return future


def submit(
    state: SessionState, actions: Actions, want: Want | None, result: BatchResult[Transition], slot: int
) -> None:
    """Send a step. No other call of the session may be in flight.

    Args:
        want: optional fields for this step; None means the session's.
        result: the results of all steps that were sent together.
        slot: index in `result` for the transition or the error.
    """
    state.busy = True
    state.result = result
    state.slot = slot
    if state.closed:
        fail(state, RuntimeError(CLOSED))
        return
    state.actions = actions
    if want is None:
        state.want = None
        state.plain = set(map(type, actions)) <= {str}
    else:
        state.want = state.message_of(want)
        state.step_shows_key = want.state_key
        state.plain = False
    state.replica.submit(state)


async def submit_texts(
    states: Sequence[SessionState], texts: Sequence[Action], result: BatchResult[Transition]
) -> None:
    """Send one text to each session. Wait for sessions that have another call in flight.

    Args:
        result: gets the transition or the error of session i in slot i.
    """
    replica: Replica | None = None
    steps: list[SessionState] = []
    for slot, (state, text) in enumerate(zip(states, texts, strict=True)):
        if state.busy:
            if replica is not None:
                replica.submit_steps(steps)
                steps = []
            await state.acquire()
        if state.closed:
            submit(state, (text,), None, result, slot)
            continue
        if state.replica is not replica:
            if replica is not None:
                replica.submit_steps(steps)
                steps = []
            replica = state.replica
        state.busy = state.plain = True
        state.actions = (text,)
        state.want = None
        state.result = result
        state.slot = slot
        steps.append(state)
    if replica is not None:
        replica.submit_steps(steps)


def deliver(batch: StepBatch, settle: Callable[[SessionState, Transition, Reply], None]) -> None:
    """Log replies and pass them to their callers.

    Args:
        settle: called instead for a session that takes checkpoints or has further calls waiting.
    """
    steps, texts, rewards, keys, flags, shares, ended_rows = batch
    ends: Iterable[End] = repeat(ONGOING)
    if ended_rows:
        ends = [ended_rows.get(row, ONGOING) for row in range(len(texts))]
    digests = map(hash, zip(texts, rewards, flags, shares, strict=True))  # equal to those of `history.step_reply`
    states: Iterable[SessionState] = steps  # type: ignore[assignment]
    rows = zip(states, texts, rewards, keys, flags, shares, digests, ends)  # noqa: B905 - strict is slower
    for state, text, reward, key, flag, share, digest, end in rows:
        transition = new(Transition)  # its __init__ would take twice as long
        transition.row_text, transition.reward = text, reward
        transition.row_flags, transition.row_shares, transition.message = flag, share, None
        transition.row_key = key if state.show_key else b""
        transition.end_reason, transition.success = end
        actions = transition.actions = state.actions
        if end is not ONGOING:
            digest = digest_end(digest, *end)
        if state.checkpoints or state.waiting is not None:
            settle(state, transition, (key, digest))
            continue
        state.step_index += 1
        state.last = transition
        history = state.history
        if history is not None:
            history.actions.append(actions)
            history.keys.append(key)
            history.digests.append(digest)
        state.busy = False
        result = state.result
        result.values[state.slot] = transition
        result.missing -= 1
        if not result.missing:
            try:  # noqa: SIM105 - contextlib.suppress is slower
                result.future.set_result(result.values)
            except InvalidStateError:
                pass  # the caller was cancelled


def finish(state: SessionState, transition: Transition, reply: Reply, *, log: bool = True) -> None:
    """Log a single reply and pass it to its caller.

    Args:
        log: False if a snapshot was taken after the step, because a replay then begins after it.
    """
    state.step_index += 1
    state.last = transition
    if log and state.history is not None:
        state.history.record(state.actions, reply, state.want)
    state.result.put(state.slot, transition)
    state.release()


def fail(state: SessionState, error: BaseException) -> None:
    """End the step in flight with an error. The episode does not advance."""
    state.result.fail(state.slot, error)
    state.release()
