"""Branches of episodes: continuations of a state that an episode visited, each with its own dynamics seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from starpod.client import EpisodePath, Fleet, Observation, Reseeding, Session, Snapshot, StarpodError
from starpod.client.errors import Unsupported
from starpod.trainer.agents.base import Agent, Agents, Move, Stop, Task
from starpod.trainer.configuration.seeds import members_luck
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.group import Spent
from starpod.trainer.rewards.reward import Rewards
from starpod.trainer.rollout.play import OWN_REWARD, play, together


@dataclass(slots=True)
class Line:
    """An episode with the session and the agent that can continue it."""

    episode: Episode
    session: Session
    agent: Agent
    over: bool = False
    """Whether the episode cannot be continued."""
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    """Snapshots of the states before each turn, by turn index. Filled only after `Brancher.keep_snapshots`."""


@dataclass(kw_only=True)
class Brancher:
    """Plays the episodes of one group and branches them.

    `episode.member` selects the random streams of a line's replies and of its environment. It must be unique in the
    group.
    """

    fleet: Fleet
    agents: Agents
    task: Task
    group: int
    seed: int
    rewards: Rewards = OWN_REWARD
    watch: Callable[[Episode], None] = lambda episode: None
    """Called with each episode that `play` finishes, except if `play` was limited to some turns."""
    deadline: float | None = None
    spent: Spent = field(default_factory=Spent)
    """Cost of all turns and forks, including replayed turns and discarded branches."""
    lines: dict[int, Line] = field(default_factory=dict)
    """All lines, by member number."""
    _open: list[Session] = field(default_factory=list)

    async def open(self, count: int) -> list[Line]:
        """Open `count` lines at the start state, with members 0, 1, ..."""
        sessions = await self.task.open(self.fleet, self.seed, count, self.agents.want)
        self._open += sessions
        return [self._line(Episode.begin(session, self.group, self.task.name), session) for session in sessions]

    async def grow(self, line: Line, turn: int, members: Sequence[int]) -> list[Line]:
        """Return branches, ready to be played from an earlier state of a line.

        The line's session is forked if it is still in that state. Otherwise a snapshot is restored, or the turns are
        replayed from the start if that is impossible. Each branch gets its own dynamics seed if the environment can be
        forked. If the state cannot be reached, the branches are failed episodes.

        Args:
            turn: Index of the turn before which the branches begin.
            members: Number of each branch in the group. There is one branch per number.
        """
        parent = line.episode
        try:
            sessions = await self._copies(line, turn, members_luck(self.seed, self.group, members))
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

    async def play(self, line: Line, turns: int | None = None, past_turns: Sequence[Turn] = ()) -> Line:
        """Continue a line, and close its session once the episode is over. Return the line.

        Args:
            line: Line to continue. Nothing happens if it is over.
            turns: Maximum number of turns to play now; None plays to the end.
            past_turns: Turns played earlier from the same state, whose replies are reused as in `rollout.play.play`.
        """
        episode, turn_count = line.episode, len(line.episode.turns)
        if line.over:
            return line
        await play(
            line.agent,
            line.session,
            rewards=self.rewards,
            watch=self.watch if turns is None else _ignore,
            deadline=self.deadline,
            episode=episode,
            past_turns=past_turns,
            turns=turns,
        )
        new_turns = episode.turns[turn_count:]
        self.spent.add(new_turns, sampled=len(new_turns) - len(past_turns))
        line.over = bool(episode.end) or line.session.done or len(new_turns) != turns
        if line.over:
            await self.close([line.session])
        return line

    async def close(self, sessions: Sequence[Session] | None = None) -> None:
        """Close these sessions, or all open ones."""
        targets = list(self._open if sessions is None else sessions)
        self._open = [session for session in self._open if session not in targets]
        await self.fleet.close_sessions(targets)

    def keep_snapshots(self, line: Line) -> None:
        """Take a snapshot before each turn of a line from now on."""
        line.agent = _Keeping(line.agent, line)

    def _line(self, episode: Episode, session: Session) -> Line:
        line = Line(episode, session, self.agents.agent(session, self.task, self.group))
        self.lines[episode.member] = line
        return line

    async def _copies(self, line: Line, turn: int, seeds: Sequence[int]) -> list[Session]:
        """Return one session per dynamics seed, in the state before a turn."""
        at_turn = not line.over and len(line.episode.turns) == turn
        base = line.session if at_turn else await self._session_before(line, turn)
        try:
            sessions = await base.fork(len(seeds), reseed=True, dynamics_seeds=seeds)
        except Unsupported:
            bases = [] if at_turn else [base]
            return bases + await together(self._session_before(line, turn) for _ in seeds[len(bases) :])
        self._open += sessions
        self.spent.forks += len(seeds)
        if not at_turn:
            await self.close([base])
        return sessions

    async def _session_before(self, line: Line, turn: int) -> Session:
        """Return a session in the state before a turn, with the line's dynamics seed."""
        passed: list[int] = []

        async def visit(_: Session, number: int) -> None:
            passed.append(number)

        try:
            async with asyncio.timeout(self.deadline):
                session = await self.fleet.reach(self._path(line), turn, want=self.agents.want, visit=visit)
        except TimeoutError:
            raise StarpodError(f"the turns before a branch could not be replayed in {self.deadline} seconds") from None
        finally:
            self.spent.add(line.episode.turns[passed[0] : passed[-1]] if passed else (), sampled=0)
        self._open.append(session)
        return session

    def _path(self, line: Line) -> EpisodePath:
        """Return the path of a line from the start state, through the lines that it branches from."""
        snapshots = dict(line.snapshots)
        reseedings: dict[int, Reseeding] = {}
        ancestor = line
        while (branch := ancestor.episode).parent is not None:
            ancestor = self.lines[branch.parent[0]]
            snapshots = {turn: each for turn, each in ancestor.snapshots.items() if turn < branch.shared} | snapshots
            if branch.dynamics_seed != ancestor.episode.dynamics_seed:  # else the environment cannot be forked
                reseeding = Reseeding(branch.dynamics_seed, ancestor.snapshots.get(branch.shared))
                reseedings.setdefault(branch.shared, reseeding)  # of two in one state, the later one applies
        seed = ancestor.episode.dynamics_seed
        return self.task.path(line.episode, dynamics_seed=seed, reseedings=reseedings, snapshots=snapshots)


def adopt(episodes: Sequence[Episode], first: int, rewards: Rewards) -> None:
    """Set members, parents and rewards of episodes that share turns, so that each turn is trained once.

    An episode's parent is the earlier episode that did not fail and shares the most turns with it. The episode owns
    only its remaining turns, and only those get its rewards.

    Args:
        episodes: Episodes of one group. Shared turns must be the same objects.
        first: Number of the first of them in the group. The others follow it.
    """
    for index, episode in enumerate(episodes):
        episode.member, episode.parent = first + index, None
        for predecessor in episodes[:index]:
            if predecessor.failed:
                continue
            shared = 0
            for earlier_turn, turn in zip(predecessor.turns, episode.turns, strict=False):
                if earlier_turn is not turn:
                    break
                shared += 1
            if shared > episode.shared:
                episode.parent = (predecessor.member, shared)
        if not episode.failed:
            rewards.settle(episode)


def _ignore(episode: Episode) -> None:
    """Ignore the episode."""


class _Keeping(Agent):
    """Wrapper of an agent that takes a snapshot before each move."""

    def __init__(self, agent: Agent, line: Line) -> None:
        self._agent, self._line = agent, line

    async def act(self, observation: Observation, episode: Episode) -> Move | Stop:
        with suppress(StarpodError):  # without a snapshot, the turns are played again
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
