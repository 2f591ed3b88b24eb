"""Start states near success: the expert plays until a few moves before it succeeds, and the policy plays the rest.

This is a reverse curriculum (arXiv 1707.05300). The start states are reached by playing, so the environment need not
support resets to a state. The members of a group are forks of one session, each with its own dynamics seed.
"""

from __future__ import annotations

from collections.abc import Sequence

from starpod.client import Fleet, Observation, Session, Want
from starpod.trainer.agents.base import Agent, Move, Stop, Task, extend_limits
from starpod.trainer.agents.scripted import REFERENCES, ReferenceAgents
from starpod.trainer.data.episode import Episode
from starpod.trainer.rollout.play import play


async def open_near_success(
    task: Task, fleet: Fleet, seed: int, count: int, *, want: Want, moves: int
) -> list[Session]:
    """Open `count` sessions in the state from which the expert succeeds in `moves` moves.

    The sessions are in the start state if the expert needs at most `moves` moves, or fails. The limits are extended by
    the number of moves that the expert made. Errors of `Fleet.open` are raised.
    """
    (session,) = await task.open(fleet, seed, 1, REFERENCES["expert"][1])
    try:
        record = await play(ReferenceAgents("expert").agent(session, task, 0), session)
    finally:
        await session.close()
    opening_moves = [turn.actions for turn in record.turns[:-moves]] if record.success else []
    if not opening_moves:
        return await task.open(fleet, seed, count, want)
    (base,) = await task.open(fleet, seed, 1, want)
    try:
        limits = extend_limits(base.limits, len(opening_moves))
        await base.reset(seed=base.seed, dynamics_seed=base.dynamics_seed, limits=limits)
        if not (await play(Repeater(opening_moves), base)).failed:
            return await base.fork(count, reseed=True)
    finally:
        await base.close()
    return await task.open(fleet, seed, count, want)


class Repeater(Agent):
    """Plays a fixed list of moves and then stops."""

    def __init__(self, moves: Sequence[Sequence[str]]) -> None:
        self._moves = moves

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        index = len(episode.turns)
        return Move("", self._moves[index]) if index < len(self._moves) else Stop()
