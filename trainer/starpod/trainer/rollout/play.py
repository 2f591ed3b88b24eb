"""The loop that plays one episode: the agent's moves are sent to the environment and recorded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import perf_counter
from typing import TypeVar

from starpod.client import Observation, Session, StarpodError
from starpod.trainer.agents.base import Agent, AgentError, Move, Stop, limits_left
from starpod.trainer.configuration.seeds import derive
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.rewards.judge import JudgeFailed
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.v1.values import action_text

Result = TypeVar("Result")
MOST_TURNS = 1000
"""Maximum number of turns if neither the environment nor the task has a limit."""

OWN_REWARD = Rewards(RewardConfig(format_penalty=0.0))
"""The environment's own reward, without penalties and shaping."""


async def together(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """Await calls at the same time, and return their results in order.

    If a call fails, the others are cancelled and awaited before its error is raised, so that none plays on.
    """
    futures = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*futures)
    except BaseException:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        raise


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
    past_turns: Sequence[Turn] = (),
    turns: int | None = None,
) -> Episode:
    """Play an episode from the session's current state to its end and return its record.

    Failures of the infrastructure, of the agent's endpoint or of a judge set the end to "failed". AgentRefused,
    UserCodeError and ConfigError are raised.

    Args:
        group, task: Number of the group and name of the task, for a new record.
        watch: Called with the episode when it is over.
        deadline: Seconds after which the episode fails; None is no limit.
        episode: Record to extend. The agent must have played its turns so far, or know them from `Agent.recall`.
        past_turns: Turns played earlier from the same state. Their replies are reused instead of sampled as long as
            `Agent.repeat` accepts them.
        turns: Maximum number of turns to play now; another call can then continue the episode. None plays to the end.
    """
    episode = episode or Episode.begin(session, group, task)
    limit = asyncio.timeout(deadline)
    over = True
    try:
        async with limit:
            until = None if turns is None else len(episode.turns) + turns
            over = await _play_attempts(agent, session, episode, rewards, recorded_turns=deque(past_turns), until=until)
            if over:
                episode.final_observation = session.observation.text
                await rewards.ask_judges(episode)
    except (StarpodError, AgentError, JudgeFailed) as error:
        episode.end, episode.error = "failed", f"{type(error).__name__}: {error}"
    except TimeoutError:
        if not limit.expired():
            raise
        # A turn without a reward is still waiting for the environment.
        stepping = bool(episode.turns) and not episode.turns[-1].parts
        event = "the environment to step" if stepping else "the policy's reply"
        episode.end = "failed"
        episode.error = (
            f"an episode was not over after {deadline:g} seconds (collect.deadline), and waited for {event} in turn "
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
    agent: Agent,
    session: Session,
    episode: Episode,
    rewards: Rewards,
    *,
    recorded_turns: deque[Turn],
    until: int | None,
) -> bool:
    """Play the attempts, all but the last one on separate forks of the start state.

    Stop when the episode has `until` turns, and return whether it is over.
    """
    previous_turns: list[Turn] = []
    for number in range(agent.attempts - 1):
        agent.begin_attempt(number)
        turn_count = len(episode.turns)
        # Without a seed, forks of one state all get the same random state.
        (fork,) = await session.fork(reseed=True, dynamics_seeds=[derive(session.dynamics_seed, "attempt", number)])
        try:
            await _play_turns(agent, fork, episode, rewards, recorded_turns=recorded_turns, attempt=number)
            # Do this before anything is awaited: a checkpoint that finds the attempt's end takes it for the episode's.
            attempt_turns = episode.turns[turn_count:]
            rewards.reward_improvement(previous_turns, attempt_turns)
            rewards.set_apart(attempt_turns, episode)
            previous_turns = attempt_turns
        finally:
            await fork.close()
    last_attempt = agent.attempts - 1
    agent.begin_attempt(last_attempt)
    over = await _play_turns(
        agent, session, episode, rewards, recorded_turns=recorded_turns, until=until, attempt=last_attempt
    )
    rewards.reward_improvement(previous_turns, [turn for turn in episode.turns if turn.attempt == last_attempt])
    return over


async def _play_turns(
    agent: Agent,
    session: Session,
    episode: Episode,
    rewards: Rewards,
    *,
    recorded_turns: deque[Turn],
    until: int | None = None,
    attempt: int,
) -> bool:
    """Play one attempt until it ends or the episode has `until` turns. Return whether it ended."""
    most_turns = agent.replies * (limits_left(session, episode.begun_at).max_turns or MOST_TURNS)
    while not (episode.end or session.done):
        if sum(turn.attempt == attempt for turn in episode.turns) >= most_turns:
            episode.end = "max_turns"
            break
        if until is not None and len(episode.turns) >= until:
            return False
        observation = session.observation
        start_time = perf_counter()
        move: Move | Stop | None = (
            agent.repeat(observation, episode, recorded_turns.popleft()) if recorded_turns else None
        )
        if move is None:
            recorded_turns.clear()
            move = await agent.act(observation, episode)
        if isinstance(move, Stop):
            episode.end = move.end
            break
        turn = _record(observation, move, attempt, first=not episode.turns, seconds=perf_counter() - start_time)
        turn.image = agent.image_of(observation)
        episode.turns.append(turn)
        acting_turn, transition = episode.turns[-1 - move.of], None
        if move.actions is not None:
            start_time = perf_counter()
            acting_turn.actions = [action_text(action) for action in move.actions]
            transition = await session.step(move.actions)
            acting_turn.stepping = perf_counter() - start_time
            acting_turn.take(transition)
            episode.take(transition)
            if (before := observation.score) is not None and (after := transition.observation.score) is not None:
                acting_turn.progress = after - before
        acting_turn.pay(rewards.score(acting_turn, transition, episode))
        if acting_turn is not turn:
            turn.pay(rewards.judge(turn, transition, episode))
    rewards.settle(episode, attempt)
    if episode.end and not episode.terminated:
        # The task is not solved if a limit of the trainer ended the episode. Servers report this for their own limits.
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
        turn.hinted, turn.structure = tokens.hinted, tokens.structure
    return turn
