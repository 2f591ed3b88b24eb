"""Branches of episodes: any number of continuations of a state that an episode has met, each with luck of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from starpod.client import Fleet, Observation, Session, Snapshot, StarpodError
from starpod.client.errors import Unsupported
from starpod.trainer.agents.base import Agent, AgentError, Agents, Move, Stop, Task
from starpod.trainer.data.episode import Episode, Spent, Turn
from starpod.trainer.rewards.reward import Rewards
from starpod.trainer.rollout.play import OWN_REWARD, play
from starpod.trainer.seeds import derive


@dataclass(slots=True)
class Line:
    """An episode, and the session and the agent that stand at its end. over: whether nothing more can be played.

    snapshots: of the states before its turns, by index, where they are kept.
    """

    episode: Episode
    session: Session
    agent: Agent
    over: bool = False
    snapshots: dict[int, Snapshot] = field(default_factory=dict)


@dataclass(kw_only=True)
class Brancher:
    """Plays the episodes of one group and branches them.

    `episode.member` names the random stream of a line's replies and of its luck; it must be unique in the group.
    watch: is told of each episode that `play` ends. spent: adds up all that is played.
    """

    fleet: Fleet
    agents: Agents
    task: Task
    group: int
    seed: int
    rewards: Rewards = OWN_REWARD
    watch: Callable[[Episode], None] = lambda episode: None
    deadline: float | None = None
    spent: Spent = field(default_factory=Spent)
    lines: dict[int, Line] = field(default_factory=dict)
    _open: list[Session] = field(default_factory=list)

    async def open(self, count: int) -> list[Line]:
        """Lines at the start state, with members from 0."""
        sessions = await self.task.open(self.fleet, self.seed, count, self.agents.want)
        self._open += sessions
        return [self._line(Episode.begin(each, self.group, self.task.name), each) for each in sessions]

    async def grow(self, line: Line, turn: int, members: Sequence[int]) -> list[Line]:
        """A branch for each of these member numbers, from the state before a turn of a line, to be played.

        A line that stands there is forked; else a snapshot is restored, and where there is none, or it cannot be, the
        turns are played again from the start. Copies get luck of their own as far as the environment can be forked.
        Where nothing of this is possible the branches are failed episodes.
        """
        parent = line.episode
        try:
            sessions = await self._copies(line, turn, [derive(self.seed, "luck", self.group, each) for each in members])
            error = ""
        except StarpodError as problem:
            sessions, error = [line.session] * len(members), f"{type(problem).__name__}: {problem}"
        branches = []
        for member, session in zip(members, sessions, strict=True):
            episode = replace(
                parent,
                member=member,
                dynamics_seed=session.dynamics_seed,
                turns=parent.turns[:turn],
                end="failed" if error else "",
                success=None,
                error=error,
                final_observation="",
                final_image=b"",
                tail=[],
                tail_fresh=False,
                parent=(parent.member, turn),
            )
            branches.append(self._line(episode, session))
            branches[-1].agent.recall(episode)
            branches[-1].over = bool(error)
        return branches

    async def play(self, line: Line, turns: int | None = None, past: Sequence[Turn] = ()) -> Line:
        """Plays a line on, as `rollout.play` does, and closes its session where it is over."""
        episode, before = line.episode, len(line.episode.turns)
        if line.over:
            return line
        await play(
            line.agent,
            line.session,
            rewards=self.rewards,
            watch=self.watch if turns is None else _nobody,
            deadline=self.deadline,
            episode=episode,
            past=past,
            turns=turns,
        )
        played = episode.turns[before:]
        self.spent.add(played, sampled=len(played) - len(past))
        line.over = bool(episode.end) or line.session.done or len(played) != turns
        if line.over:
            await self.close([line.session])
        return line

    async def close(self, sessions: Sequence[Session] | None = None) -> None:
        """Ends these sessions, or all that are open."""
        closing = list(self._open if sessions is None else sessions)
        self._open = [each for each in self._open if each not in closing]
        await self.fleet.close_sessions(closing)

    def keep_snapshots(self, line: Line) -> None:
        """From now on the line's states are kept, before each turn."""
        line.agent = _Keeping(line.agent, line)

    def _line(self, episode: Episode, session: Session) -> Line:
        line = Line(episode, session, self.agents.agent(session, self.task, self.group))
        self.lines[episode.member] = line
        return line

    async def _copies(self, line: Line, turn: int, seeds: Sequence[int]) -> list[Session]:
        """A session for each of these seeds of luck, in the state before a turn."""
        standing = not line.over and len(line.episode.turns) == turn
        base = line.session if standing else await self._stand(line, turn)
        try:
            sessions = await base.fork(len(seeds), reseed=True, dynamics_seeds=seeds)
        except Unsupported:
            own = [] if standing else [base]
            return own + list(await asyncio.gather(*(self._stand(line, turn) for _ in seeds[len(own) :])))
        self._open += sessions
        self.spent.forks += len(seeds)
        if not standing:
            await self.close([base])
        return sessions

    async def _stand(self, line: Line, turn: int) -> Session:
        """A session in the state before a turn, with the luck that the line had."""
        if (snapshot := line.snapshots.get(turn)) is not None:
            try:
                session = await self.fleet.restore(snapshot, want=self.agents.want)
            except StarpodError:
                pass  # replaying does without it
            else:
                self._open.append(session)
                return session
        episode = line.episode
        if episode.parent is None:
            (session,) = await self.fleet.open(
                self.task.environment,
                seed=episode.seed,
                dynamics_seed=episode.dynamics_seed,
                options=self.task.options or None,
                want=self.agents.want,
                limits=self.task.limits,
                version=f"=={episode.version}",
            )
        else:
            base = await self._stand(self.lines[episode.parent[0]], min(episode.shared, turn))
            if turn <= episode.shared:
                return base
            (session,) = await base.fork(1, reseed=True, dynamics_seeds=[episode.dynamics_seed])
            await self.close([base])
        self._open.append(session)
        again = episode.turns[episode.shared : turn]
        record = await play(_Repeating(again), session, deadline=self.deadline, turns=len(again))
        self.spent.add(record.turns, sampled=0)
        if record.failed:
            raise StarpodError(f"the turns before a branch could not be played again: {record.error}")
        return session


def adopt(episodes: Sequence[Episode], first: int, rewards: Rewards) -> None:
    """Numbers the episodes from `first`, and gives each turn to the first one that has it and did not fail: it is the
    parent of the others, which train what follows. Each one's own turns are paid as its own."""
    for index, episode in enumerate(episodes):
        episode.member, episode.parent = first + index, None
        for earlier in episodes[:index]:
            if earlier.failed:
                continue
            shared = 0
            for one, other in zip(earlier.turns, episode.turns, strict=False):
                if one is not other:
                    break
                shared += 1
            if shared > episode.shared:
                episode.parent = (earlier.member, shared)
        if not episode.failed:
            rewards.settle(episode)


def _nobody(episode: Episode) -> None:
    """Watches nothing."""


class _Repeating(Agent):
    """Sends the actions of turns again. Raises AgentError where the environment shows something else than it did."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        turn = self._turns[len(episode.turns)]
        if observation.text != turn.observation:
            raise AgentError(f"before turn {len(episode.turns) + 1} the environment shows something else than it did")
        return Move(turn.text, turn.actions or None)


class _Keeping(Agent):
    """Another agent, before each of whose moves a snapshot is taken."""

    def __init__(self, agent: Agent, line: Line) -> None:
        self._agent, self._line = agent, line

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        with suppress(Unsupported):
            self._line.snapshots[len(episode.turns)] = await self._line.session.snapshot()
        return await self._agent.act(observation, episode)

    def repeat(self, observation: Observation, episode: Episode, turn: Turn) -> Move | None:
        return self._agent.repeat(observation, episode, turn)

    def recall(self, episode: Episode) -> None:
        self._agent.recall(episode)

    def image_of(self, observation: Observation) -> bytes:
        return self._agent.image_of(observation)

    def unanswered(self, observation: Observation, episode: Episode) -> tuple[list[int], bool]:
        return self._agent.unanswered(observation, episode)

    def close(self) -> None:
        self._agent.close()
