"""Start states near success: the expert plays until a few moves before it succeeds, and the policy plays the rest.

This is a reverse curriculum (arXiv 1707.05300). The start states are reached by playing, so the environment need not
support resets to a state. The members of a group are forks of one session, each with its own dynamics seed.
"""

from __future__ import annotations

from dataclasses import replace

from starpod.client import Fleet, Session, StarpodError, Want
from starpod.trainer.agents.base import Task, extend_limits
from starpod.trainer.agents.scripted import REFERENCES, ReferenceAgents
from starpod.trainer.configuration.seeds import members_luck
from starpod.trainer.rollout.play import play


async def open_near_success(
    task: Task, fleet: Fleet, seed: int, count: int, *, want: Want, moves: int, group: int
) -> list[Session]:
    """Open sessions in the state from which the expert succeeds in a given number of moves.

    The sessions are in the start state if the expert needs at most that many moves, or fails. The limits are extended
    by the number of moves that the expert made. Errors of `Fleet.open` are raised.

    group: Number of the group. Another group from this seed has other random transitions.
    """
    (session,) = await task.open(fleet, seed, 1, REFERENCES["expert"][1])
    try:
        record = await play(ReferenceAgents("expert").agent(session, task, 0), session)
    finally:
        await session.close()
    turn = len(record.turns) - moves
    if not record.success or turn <= 0:
        return await task.open(fleet, seed, count, want)
    path = replace(task, limits=extend_limits(session.limits, turn)).path(record)
    try:
        base = await fleet.reach(path, turn, want=want)
    except StarpodError:
        return await task.open(fleet, seed, count, want)
    try:
        return await base.fork(count, reseed=True, dynamics_seeds=members_luck(seed, group, range(count)))
    finally:
        await base.close()
