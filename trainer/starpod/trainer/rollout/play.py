"""Plays one episode: the only place where an agent and an environment meet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

from starpod.client import Observation, Session, StarpodError
from starpod.trainer.agents.base import Agent, AgentError, Move, Stop
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.reward import RewardConfig, Rewards

MOST_TURNS = 1000
"""Turns of an episode where neither the environment nor the task has a limit: an agent may never end it."""

OWN_REWARD = Rewards(RewardConfig(format_penalty=0.0))
"""The environment's own reward, with no penalty and no shaping."""


async def play(
    agent: Agent,
    session: Session,
    *,
    group: int = 0,
    task: str = "",
    rewards: Rewards = OWN_REWARD,
    watch: Callable[[Episode], None] = lambda episode: None,
    deadline: float | None = None,
    episode: Episode | None = None,
    past: Sequence[Turn] = (),
    turns: int | None = None,
) -> Episode:
    """One episode from the session's present state to its end; `watch` gets it when it is over.

    group, task: as in `Episode`. deadline: seconds after which it is failed; None: no limit. episode: the record to
    fill, for those who want to see it grow; its turns so far are the agent's own, or it was told of them (`recall`).
    past: turns that were played before from the same state: their replies are sent again, not sampled again, as long as
    the environment answers them as it did. turns: that are played now; None: all. An episode that they do not end can
    be played on by another call, and nobody is told of its end.

    What the infrastructure or the agent's endpoint failed has the end "failed". Raises AgentRefused and RewardError.
    """
    episode = episode or Episode.begin(session, group, task)
    limit = asyncio.timeout(deadline)
    over = True
    try:
        async with limit:
            until = None if turns is None else len(episode.turns) + turns
            over = await _play_attempts(agent, session, episode, rewards, known=deque(past), until=until)
    except (StarpodError, AgentError) as error:
        episode.end, episode.error = "failed", f"{type(error).__name__}: {error}"
    except TimeoutError:
        if not limit.expired():
            raise
        # A turn has no reward before the environment answered it.
        stepping = bool(episode.turns) and not episode.turns[-1].parts
        awaited = "the environment to step" if stepping else "the policy's reply"
        episode.end = "failed"
        episode.error = (
            f"an episode was not over after {deadline:g} seconds (collect.deadline), and waited for {awaited} in turn "
            f"{len(episode.turns) + (not stepping)}"
        )
    finally:
        if over:
            agent.close()
    if over:
        episode.final_observation = session.observation.text
        watch(episode)
    return episode


async def _play_attempts(
    agent: Agent, session: Session, episode: Episode, rewards: Rewards, *, known: deque[Turn], until: int | None
) -> bool:
    """Each attempt but the last on a fork of the start state, which no other one sees anything of.

    Plays until so many turns are played; returns whether the episode is over.
    """
    before: list[Turn] = []
    for number in range(agent.attempts - 1):
        agent.begin_attempt(number)
        begun = len(episode.turns)
        (fork,) = await session.fork(reseed=True)
        try:
            await _play_turns(agent, fork, episode, rewards, known=known, attempt=number)
        finally:
            await fork.close()
        own = episode.turns[begun:]
        rewards.compare(before, own)
        rewards.set_apart(own, episode)
        before = own
    last = agent.attempts - 1
    agent.begin_attempt(last)
    over = await _play_turns(agent, session, episode, rewards, known=known, until=until, attempt=last)
    rewards.compare(before, [turn for turn in episode.turns if turn.attempt == last])
    return over


async def _play_turns(
    agent: Agent,
    session: Session,
    episode: Episode,
    rewards: Rewards,
    *,
    known: deque[Turn],
    until: int | None = None,
    attempt: int,
) -> bool:
    """Plays the attempt of this number, likewise."""
    most_turns = agent.replies * (session.limits.max_turns or MOST_TURNS)
    while not (episode.end or session.done):
        if sum(turn.attempt == attempt for turn in episode.turns) >= most_turns:
            episode.end = "max_turns"
            break
        if until is not None and len(episode.turns) >= until:
            return False
        observation = session.observation
        began = perf_counter()
        move: Move | Stop | None = agent.repeat(observation, episode, known.popleft()) if known else None
        if move is None:
            known.clear()
            move = await agent.act(observation, episode)
        if isinstance(move, Stop):
            episode.end = move.end
            break
        turn = _record(observation, move, attempt, first=not episode.turns, seconds=perf_counter() - began)
        turn.image = agent.image_of(observation)
        episode.turns.append(turn)
        acting, transition = episode.turns[-1 - move.of], None
        if move.actions is not None:
            began = perf_counter()
            acting.actions = list(move.actions)
            transition = await session.step(acting.actions)
            acting.stepping = perf_counter() - began
            acting.take(transition)
            episode.take(transition)
            if (before := observation.score) is not None and (after := transition.observation.score) is not None:
                acting.progress = after - before
        acting.pay(rewards.score(acting, transition, episode))
        if acting is not turn:
            turn.pay(rewards.judge(turn, transition, episode))
    rewards.settle(episode, attempt)
    if episode.end and not episode.terminated:
        # A limit solves no task: a server says so of its own limits.
        episode.success = bool(episode.success)
        episode.tail, episode.tail_fresh = agent.unanswered(session.observation, episode)
        episode.final_image = agent.image_of(session.observation)
    return True


def _record(observation: Observation, move: Move, attempt: int, *, first: bool, seconds: float) -> Turn:
    turn = Turn(
        observation=observation.text,
        fresh=first,
        finish=move.finish,
        text=move.text,
        thought=move.thought,
        blocks=dict(move.blocks),
        well_formed=move.well_formed,
        state_key=observation.state_key,
        agent_id=move.agent_id or observation.agent_id,
        attempt=attempt,
        generating=seconds,
    )
    if (tokens := move.tokens) is not None:
        turn.prompt, turn.fresh, turn.reply = tokens.prompt, tokens.fresh, tokens.reply
        turn.logprobs, turn.versions, turn.spans = tokens.logprobs, tokens.versions, tokens.spans
    return turn
