"""Bringing an episode back on another server: the same start, then the same turns, each compared with the log."""

from __future__ import annotations

import asyncio
import uuid

from starpod.client.errors import StarpodError
from starpod.client.log import History, Opened, Origin, Reseeded, Restarted, Restored, digest_observation
from starpod.client.observation import Turn, action_to_proto
from starpod.client.replica import Replica
from starpod.v1 import environment_pb2 as pb


async def rebuild(
    replica: Replica, history: History, until: float, *, member: int = 0, replay: bool = True
) -> pb.Session:
    """A session on `replica` that stands where `history` ends, or at its beginning without `replay`.

    member: its place in its group, from which later resets derive their luck.

    Raises ReplayDiverged if a step comes out differently, and whatever the server's errors are. A session that was
    begun is closed again then.
    """
    session = await _begin(replica, history.origin, member, until)
    try:
        history.check(0, session.observation.state_key, digest_observation(session.observation))
        for step, turn in enumerate(history.turns if replay else (), 1):
            response: pb.StepResponse = await replica.call("step", step_request(session, turn), until)
            transition = response.transition
            history.check(
                step,
                transition.observation.state_key,
                digest_observation(transition.observation, transition.reward),
            )
            session.step_index = response.next_step_index
    except asyncio.CancelledError:
        replica.orphans.append(session.session_id)
        raise
    except StarpodError:
        await _discard(replica, session, until)
        raise
    return session


async def _begin(replica: Replica, origin: Origin, member: int, until: float) -> pb.Session:
    match origin:
        case Opened():
            opened: pb.OpenResponse = await replica.call(
                "open",
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
            return opened.sessions[0]
        case Restored():
            restored: pb.RestoreResponse = await replica.call(
                "restore",
                pb.RestoreRequest(
                    snapshot=origin.snapshot,
                    key=new_key(),
                    want=origin.want,
                    lease_seconds=origin.lease_seconds,
                    first_member=member,
                ),
                until,
            )
            return restored.sessions[0]
        case Restarted():
            base = await _begin(replica, origin.base, member, until)
            reset = pb.ResetRequest()
            reset.CopyFrom(origin.reset)
            reset.session_id, reset.epoch = base.session_id, base.epoch
            restarted: pb.ResetResponse = await replica.call("reset", reset, until)
            return restarted.session
        case Reseeded():
            parent = await rebuild(replica, origin.parent, until)
            try:
                forked: pb.ForkResponse = await replica.call(
                    "fork",
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
                await _discard(replica, parent, until)
            return forked.sessions[0]


async def _discard(replica: Replica, session: pb.Session, until: float) -> None:
    try:
        await replica.call("close", pb.CloseRequest(session_ids=[session.session_id]), until)
    except StarpodError:
        replica.orphans.append(session.session_id)


def step_request(session: pb.Session, turn: Turn) -> pb.StepRequest:
    return pb.StepRequest(
        session_id=session.session_id,
        epoch=session.epoch,
        step_index=session.step_index,
        actions=map(action_to_proto, turn),
    )


def overrides(limits: pb.Limits) -> pb.LimitOverrides:
    """Overrides that give exactly these limits."""
    return pb.LimitOverrides(
        max_turns=limits.max_turns, max_actions_per_turn=limits.max_actions_per_turn, max_actions=limits.max_actions
    )


def new_key() -> str:
    """A key that makes a call safe to repeat."""
    return uuid.uuid4().hex
