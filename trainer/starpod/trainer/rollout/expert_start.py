"""Start states near success: the environment's expert plays to within some moves of its end, the policy the rest.

A reverse curriculum (arXiv 1707.05300) whose start states are reached by playing, so that no reset to a state is
needed. The group's members are forks of one session, each with luck of its own.
"""

from __future__ import annotations

from starpod.client import Fleet, Session, Want
from starpod.trainer.agents.base import Task, longer

MOST_MOVES = 1000
"""Moves of an expert that is given up where no limit ends its episode."""


async def open_near_success(
    task: Task, fleet: Fleet, seed: int, count: int, want: Want, *, moves: int
) -> list[Session]:
    """A group of `count` sessions that share the state `moves` moves of the expert before its success.

    Where it has no more than so many moves, or fails, they share the start state. The expert's moves take nothing off
    the limits: those in force are longer by them. Raises as `Fleet.open` does.
    """
    played = await _expert_moves(task, fleet, seed)
    ahead = played[: max(len(played) - moves, 0)]
    if not ahead:
        return await task.open(fleet, seed, count, want)
    (base,) = await task.open(fleet, seed, 1, want)
    try:
        limits = longer(base.limits, len(ahead))
        await base.reset(seed=base.seed, dynamics_seed=base.dynamics_seed, limits=limits)
        for action in ahead:
            await base.step([action])
        return await base.fork(count, reseed=True)
    finally:
        await base.close()


async def _expert_moves(task: Task, fleet: Fleet, seed: int) -> list[str]:
    """The expert's actions from the start state to its success; none where it fails."""
    (session,) = await task.open(fleet, seed, 1, Want(expert_action=True))
    actions: list[str] = []
    try:
        while len(actions) < (session.limits.max_turns or MOST_MOVES):
            action = session.observation.expert_action
            if not isinstance(action, str):
                return []
            actions.append(action)
            transition = await session.step([action])
            if transition.done:
                return actions if transition.success else []
        return []
    finally:
        await session.close()
