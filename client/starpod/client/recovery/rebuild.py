"""Rebuild an episode on another server: the same start, then the same steps, each compared with the log."""

from __future__ import annotations

import uuid

from starpod.client.connection import FORK, OPEN, RESET, RESTORE, SessionStep, step_request
from starpod.client.connection.calls import STEP
from starpod.client.errors import BadArgument, OutOfOrder
from starpod.client.history import History, Opened, Origin, first_reply, step_reply
from starpod.client.pool.replica import Replica
from starpod.v1 import environment_pb2 as pb


async def rebuild(
    replica: Replica, history: History, until: float, *, member: int = 0, replay: bool = True
) -> pb.Session:
    """Open a session and replay an episode in it.

    Args:
        until: the event loop's time until which calls are retried.
        member: the session's index in its group, from which the server derives the seeds of later resets.
        replay: if False, only begin the episode.

    Raises:
        ReplayDiverged: a reply differs from the log.
        StarpodError: a call failed. The new session is closed then.
    """
    session, instructions = await _begin(replica, history.origin, member, until)
    try:
        history.check(0, first_reply(session.observation, instructions))
        for number in range(len(history.actions) + 1 if replay else 0):
            if number:
                session.step_index = await _replay_step(replica, session, history, number, until)
            if number in history.reseedings:
                parent = session
                session = await _fork(replica, parent, history.reseedings[number], member, until)
                replica.closer.close_later([parent.session_id])
    except BaseException:
        replica.closer.close_later([session.session_id])
        raise
    return session


async def _begin(replica: Replica, origin: Origin, member: int, until: float) -> tuple[pb.Session, str]:
    """Open a session at the start of an episode. Returns it and its instructions."""
    response: pb.OpenResponse | pb.RestoreResponse
    if isinstance(origin, Opened):
        request = pb.OpenRequest(
            environment_id=origin.environment_id,
            version=f"=={origin.version}",
            options=origin.options,
            seed=origin.seed,
            dynamics_seed=origin.dynamics_seed,
            key=new_key(),
            want=origin.want,
            limits=overrides(origin.limits),
            lease_seconds=origin.lease_seconds,
            first_member=member,
        )
        response = await replica.call(OPEN, request, until)
        return response.sessions[0], response.instructions
    response = await replica.call(
        RESTORE,
        pb.RestoreRequest(
            snapshot=origin.snapshot,
            key=new_key(),
            want=origin.want,
            lease_seconds=origin.lease_seconds,
            first_member=member,
        ),
        until,
    )
    session = response.sessions[0]
    if origin.reset is None:
        return session, response.instructions
    reset = pb.ResetRequest(session_id=session.session_id, epoch=session.epoch)
    reset.MergeFrom(origin.reset)
    try:
        reset_response = await replica.call(RESET, reset, until)
    except BaseException:
        replica.closer.close_later([session.session_id])
        raise
    return reset_response.session, reset_response.instructions


async def _replay_step(replica: Replica, session: pb.Session, history: History, number: int, until: float) -> int:
    """Replay a step, compare its reply with the log, and return the index of the next step."""
    step = SessionStep(session.session_id, session.epoch, session.step_index)
    step.actions, step.want = history.actions[number - 1], history.wants.get(number)
    try:
        response = await replica.call(STEP, step_request(step), until)
    except (BadArgument, OutOfOrder) as error:
        raise history.refused(number, error.message) from error
    history.check(number, step_reply(response.transition))
    return response.next_step_index


async def _fork(replica: Replica, parent: pb.Session, dynamics_seed: int, member: int, until: float) -> pb.Session:
    """Return a copy of the session with another dynamics seed."""
    request = pb.ForkRequest(
        session_id=parent.session_id,
        epoch=parent.epoch,
        step_index=parent.step_index,
        count=1,
        randomness=pb.FORK_RANDOMNESS_RESEED,
        dynamics_seeds=[dynamics_seed],
        key=new_key(),
        first_member=member,
    )
    return (await replica.call(FORK, request, until)).sessions[0]


def overrides(limits: pb.Limits) -> pb.LimitOverrides:
    """Return overrides that set exactly these limits."""
    return pb.LimitOverrides(
        max_turns=limits.max_turns, max_actions_per_turn=limits.max_actions_per_turn, max_actions=limits.max_actions
    )


def new_key() -> str:
    """Return a new idempotency key, which makes a call safe to repeat."""
    return uuid.uuid4().hex
