"""What plays an episode without a tokenizer of ours: scripts, and models behind an HTTP endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

from starpod.client import Fleet, Limits, Session, StarpodError, Transition, Want
from starpod.trainer.data.episode import Episode, Finish, Turn

MOST_TURNS = 1000
"""Of one episode, where neither the environment nor the task has a limit: an agent may never find a way to end it."""


class AgentError(Exception):
    """The agent gave no reply, through no fault of its own: the episode is failed, and the others go on."""


class AgentRefused(Exception):
    """The agent will never give a reply: the key is wrong, or there is no such model. The message says what to mend."""


@dataclass(frozen=True, slots=True)
class Task:
    """An environment to be played.

    environment, version, options, limits: as `Fleet.open` takes them. actions: its action names, if they are fixed.
    """

    environment: str
    version: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How replies are sampled. None: as the run that trained the policy does it, or as is usual where there is none."""

    temperature: float | None = None
    max_tokens: int | None = None
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """One reply of an agent: as text, and what is to be done by it. Without an action it costs a turn."""

    text: str
    actions: Sequence[str]
    thought: str | None = None
    well_formed: bool = True
    finish: Finish = "stop"


class Agent(Protocol):
    """Chooses what to do, one turn at a time, for many episodes together. It is given the episode so far.

    want: what it needs observations to carry. at_once: episodes that it plays at the same time.
    """

    want: Want
    at_once: int

    async def act(self, session: Session, episode: Episode, task: Task) -> Move | None:
        """The next move in the session's present state; None if it knows none and the episode ends here.

        Raises AgentError and AgentRefused.
        """


async def play_all(
    agent: Agent,
    fleet: Fleet,
    task: Task,
    seeds: Sequence[int],
    samples: int = 1,
    watch: Callable[[Episode], None] = lambda episode: None,
) -> list[Episode]:
    """`samples` episodes from each seed, in the order of the seeds; `watch` gets each one that is over.

    Raises what opening raises, and AgentRefused.
    """
    slots = asyncio.Semaphore(max(1, agent.at_once // samples))

    async def play_group(group: int, seed: int) -> list[Episode]:
        async with slots:
            sessions = await fleet.open(
                task.environment,
                seed=seed,
                count=samples,
                options=task.options or None,
                want=agent.want,
                limits=task.limits,
                version=task.version,
            )
            try:
                return await asyncio.gather(*(play(agent, session, task, group, watch) for session in sessions))
            finally:
                await fleet.close_sessions(sessions)

    tasks = [asyncio.ensure_future(play_group(group, seed)) for group, seed in enumerate(seeds)]
    try:
        return [episode for group in await asyncio.gather(*tasks) for episode in group]
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def play(
    agent: Agent, session: Session, task: Task, group: int = 0, watch: Callable[[Episode], None] = lambda episode: None
) -> Episode:
    """One episode to its end. What the infrastructure or the agent's endpoint failed has the end "failed"."""
    episode = Episode.begin(session, group)
    try:
        while not session.done:
            began = perf_counter()
            move = await agent.act(session, episode, task)
            if move is None:
                break
            await _step(session, episode, move, perf_counter() - began)
            if len(episode.turns) >= MOST_TURNS and not session.done:
                episode.end = "max_turns"
                break
    except (StarpodError, AgentError) as error:
        episode.end, episode.error = "failed", f"{type(error).__name__}: {error}"
    episode.final_observation = session.observation.text
    watch(episode)
    return episode


async def _step(session: Session, episode: Episode, move: Move, seconds: float) -> None:
    """Plays one move and records it. One without an action is sent too: it costs a turn there as it does here."""
    seen = session.observation
    turn = Turn(
        seen.text,
        [],
        not episode.turns,
        [],
        [],
        [],
        move.finish,
        move.text,
        move.thought,
        list(move.actions),
        move.well_formed,
        seen.state_key,
        agent_id=seen.agent_id,
        generating=seconds,
    )
    episode.turns.append(turn)
    began = perf_counter()
    transition: Transition = await session.step(list(move.actions))
    turn.stepping = perf_counter() - began
    turn.reward = transition.reward
    turn.parts = {"environment": transition.reward}
    turn.take(transition)
    episode.take(transition)
