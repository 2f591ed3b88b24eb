"""Rebuild an episode on another server: the same start, then the same steps, each compared with the log."""

from __future__ import annotations

import uuid

from starpod.client.connection import FORK, OPEN, RESET, RESTORE, Step, step_request
from starpod.client.connection.calls import STEP
from starpod.client.errors import BadArgument, OutOfOrder
from starpod.client.history import History, Opened, Origin, Reseeded, Restarted, Restored, first_reply, step_reply
from starpod.client.pool.replica import Replica
from starpod.v1 import environment_pb2 as pb


async def rebuild(
    replica: Replica, history: History, until: float, *, member: int = 0, replay: bool = True
) -> pb.Session:
    """Open a session and replay an episode in it.

    Args:
        replica: the server for the session.
        history: the episode's log.
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
        if replay:
            await _replay(replica, session, history, until)
    except BaseException:
        replica.close_later([session.session_id])
        raise
    return session


async def _replay(replica: Replica, session: pb.Session, history: History, until: float) -> None:
    step = Step(session.session_id, session.epoch, session.step_index)
    for number, actions in enumerate(history.actions, 1):
        step.actions, step.want = actions, history.wants.get(number)
        try:
            response = await replica.call(STEP, step_request(step), until)
        except (BadArgument, OutOfOrder) as error:
            raise history.refused(number, error.message) from error
        history.check(number, step_reply(response.transition))
        step.step_index = session.step_index = response.next_step_index


async def _begin(replica: Replica, origin: Origin, member: int, until: float) -> tuple[pb.Session, str]:
    """Open a session at the start of an episode. Returns it and its instructions ("" if the call returns none)."""
    match origin:
        case Opened():
            open_response = await replica.call(
                OPEN,
                pb.OpenRequest(
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
                ),
                until,
            )
            return open_response.sessions[0], open_response.instructions
        case Restored():
            restore_response = await replica.call(
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
            return restore_response.sessions[0], restore_response.instructions
        case Restarted():
            base, _ = await _begin(replica, origin.base, member, until)
            reset = pb.ResetRequest()
            reset.CopyFrom(origin.reset)
            reset.session_id, reset.epoch = base.session_id, base.epoch
            try:
                reset_response = await replica.call(RESET, reset, until)
            except BaseException:
                replica.close_later([base.session_id])
                raise
            return reset_response.session, reset_response.instructions
        case Reseeded():
            parent = await rebuild(replica, origin.parent, until)
            try:
                forked = await replica.call(
                    FORK,
                    pb.ForkRequest(
                        session_id=parent.session_id,
                        epoch=parent.epoch,
                        step_index=parent.step_index,
                        count=1,
                        randomness=pb.FORK_RANDOMNESS_RESEED,
                        dynamics_seeds=[origin.dynamics_seed],
                        key=new_key(),
                        first_member=member,
                    ),
                    until,
                )
            finally:
                replica.close_later([parent.session_id])
            return forked.sessions[0], ""


def overrides(limits: pb.Limits) -> pb.LimitOverrides:
    """Return overrides that set exactly these limits."""
    return pb.LimitOverrides(
        max_turns=limits.max_turns, max_actions_per_turn=limits.max_actions_per_turn, max_actions=limits.max_actions
    )


def new_key() -> str:
    """Return a new idempotency key, which makes a call safe to repeat."""
    return uuid.uuid4().hex
