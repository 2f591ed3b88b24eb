"""Continuations: policies play on from a state, in its session or in forks. Jobs do so for each turn of an episode."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from starpod.client import EpisodePath, PathTurn, Reseeding, StarpodError
from starpod.remote.game import Impossible
from starpod.trainer.agents.base import Agents, Task
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.evaluation.statistics import wilson_interval
from starpod.trainer.rollout.play import play
from starpod.ui.games import Games, LiveGame, path_of
from starpod.ui.policies import CHECKPOINT, SitePolicies

MOST_EPISODES = 512
"""Maximum number of continuations that are played for one request."""
COUNTS = (4, 8, 16, 32)
"""Numbers of continuations that a visitor can choose from."""
MOST_JOBS = 50
"""Maximum number of jobs (TurnValues) that are kept. The oldest are dropped first."""
MOST_TREES = 500
"""Maximum number of sets of continuations (Branches) that are kept. The oldest are dropped first."""

logger = logging.getLogger(__name__)

Watch = Callable[[Episode], None]


@dataclass(frozen=True, slots=True)
class PlayedBranch:
    """A continuation of an episode or game by a policy."""

    episode: Episode
    """Record from the start of the episode, including the turns before the continuation."""
    turn: int
    """Number of the episode's turns before the continuation."""
    path: EpisodePath

    @property
    def later(self) -> Sequence[Turn]:
        """Turns of the continuation itself."""
        return self.episode.turns[self.turn :]

    @property
    def actions(self) -> list[str]:
        """Actions of each turn of the continuation, joined by spaces."""
        return [" ".join(turn.actions) for turn in self.later]

    @property
    def value(self) -> float:
        """Sum of the continuation's rewards."""
        return sum(turn.own_reward for turn in self.later)

    @property
    def success(self) -> bool | None:
        return self.episode.success


@dataclass(frozen=True, slots=True)
class Branches:
    """Continuations from one state."""

    id: str
    policy: str
    """Description of the policy for readers, such as "random actions"."""
    turn: int
    """Number of the episode's turns before the state."""
    game: LiveGame
    """Game that was forked, or in which the episode was replayed."""
    lines: list[PlayedBranch]

    @property
    def solved(self) -> int:
        return sum(line.success is True for line in self.lines)

    @property
    def share(self) -> float:
        return self.solved / len(self.lines) if self.lines else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.solved, len(self.lines))


@dataclass(slots=True)
class TurnValues:
    """A job that finds which turn lost an episode, by playing continuations from the state before each turn."""

    id: str
    episode: Episode
    task: Task
    link: str
    run: str
    folder: Path
    policy: str
    words: str
    """Description of the policy for readers."""
    count: int
    trees: list[Branches] = field(default_factory=list)
    """Finished continuations from the state before each turn, one entry per turn."""
    finished: int = 0
    """Number of continuations that have ended."""
    problem: str = ""
    """Why the job ended early."""
    done: bool = False
    work: asyncio.Task[None] | None = None

    @property
    def total(self) -> int:
        return len(self.episode.turns) * self.count


class Continuing:
    """The continuations of the site: finished ones, and jobs that run or wait."""

    def __init__(self, games: Games, policies: SitePolicies) -> None:
        self.games = games
        self.policies = policies
        self._trees: OrderedDict[str, Branches] = OrderedDict()
        self._jobs: OrderedDict[str, TurnValues] = OrderedDict()
        self._working = asyncio.Lock()

    async def close(self) -> None:
        tasks = [job.work for job in self._jobs.values() if job.work is not None]
        for work in tasks:
            work.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.policies.close()
        await self.games.close()

    # --- finished continuations and jobs ------------------------------------------------------------------------------

    def of(self, game: LiveGame) -> list[Branches]:
        """Return the continuations that were forked from a game, oldest first."""
        return [tree for tree in self._trees.values() if tree.game is game]

    def get(self, name: str, number: int) -> tuple[Branches, PlayedBranch]:
        """Return one continuation and the set that it belongs to. Raises Impossible if it is no longer kept."""
        tree = self._trees.get(name)
        if tree is None or number >= len(tree.lines):
            raise Impossible("This continuation is no longer kept: try again from the episode or the session.")
        return tree, tree.lines[number]

    def jobs(self) -> list[TurnValues]:
        """Return all jobs, newest first."""
        return list(reversed(self._jobs.values()))

    def of_episode(self, link: str) -> list[TurnValues]:
        """Return the jobs of the episode with this link, newest first."""
        return [job for job in self.jobs() if job.link == link]

    def job(self, name: str) -> TurnValues:
        """Return a job. Raises Impossible if it is no longer kept."""
        if name not in self._jobs:
            raise Impossible(f"This is no longer kept: the site was restarted, or {MOST_JOBS} others came later.")
        return self._jobs[name]

    async def open(self, name: str, number: int, turns: int) -> LiveGame:
        """Open a game in the state of a continuation after `turns` turns of its episode.

        Raises Impossible, StarpodError.
        """
        tree, branch = self.get(name, number)
        game = await self.games.replay(
            branch.episode, branch.path, turns, lambda turn: tree.policy if turn >= tree.turn else "the episode"
        )
        game.origin, game.run = tree.game.origin, tree.game.run
        return game

    # --- continuing a game --------------------------------------------------------------------------------------------

    async def go_on(self, game: LiveGame, policy: str) -> None:
        """Let a policy continue in the game's session itself. Raises Impossible, StarpodError."""
        _check_open(game)
        game.episode.group = _a_group()
        async with self.policies.playing(policy, game.spec, game.run) as make:
            agent = make(game.session, game.episode)
            turn_count = len(game.episode.turns)
            try:
                await game.go_on(agent, self._words(policy, game))
            finally:
                agent.close()
                self.games.note_step_time(game.session.address, game.episode.turns[turn_count:])

    async def branch(self, game: LiveGame, policy: str, count: int, watch: Watch = lambda episode: None) -> Branches:
        """Fork the game's state `count` times, reseed each copy, and let a policy continue in each.

        watch: called with each continuation that has ended. Raises Impossible, StarpodError.
        """
        _check_open(game)
        if not game.spec.capabilities.fork:
            raise Impossible(f"{game.spec.id} cannot be forked.")
        if policy == "expert" and not game.spec.capabilities.expert_action:
            raise Impossible(f"{game.spec.id} has no expert.")
        copies = await game.session.fork(count, reseed=True)
        try:
            async with self.policies.playing(policy, game.spec, game.run) as make:
                # Checkpoints seed their sampling with the group number.
                pasts = [replace(game.episode, turns=list(game.episode.turns), group=_a_group()) for _ in copies]
                agents = [make(copy, past) for copy, past in zip(copies, pasts, strict=True)]
                await asyncio.gather(
                    *(
                        play(agent, copy, episode=past, watch=watch)
                        for agent, copy, past in zip(agents, copies, pasts, strict=True)
                    )
                )
        finally:
            await (await self.games.fleet()).close_sessions(copies)
        turn = len(game.turns)
        lines = []
        for past, copy in zip(pasts, copies, strict=True):
            later_turns = [PathTurn(later.actions, later.observation) for later in past.turns[turn:]]
            events = [*game.events, Reseeding(copy.dynamics_seed), *later_turns]
            lines.append(PlayedBranch(past, turn, EpisodePath(game.start, events, past.final_observation or None)))
        return self._keep(self._words(policy, game), game, lines)

    def _words(self, policy: str, game: LiveGame) -> str:
        return self.policies.choices(run=game.run).get(policy, policy)

    def _keep(self, words: str, game: LiveGame, lines: list[PlayedBranch]) -> Branches:
        """Store finished continuations. Raises Impossible if one of them failed."""
        for line in lines:
            if line.episode.failed:
                raise Impossible(f"A continuation failed: {line.episode.error}")
            self.games.note_step_time(game.session.address, line.later)
        lines = [replace(line, episode=_without_tokens(line)) for line in lines]
        tree = Branches(secrets.token_urlsafe(9), words, lines[0].turn, game, lines)
        self._trees[tree.id] = tree
        while len(self._trees) > MOST_TREES:
            self._trees.popitem(last=False)
        return tree

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def start(self, job: TurnValues) -> TurnValues:
        """Queue a job. Jobs run one at a time. Raises Impossible if the job asks for too many continuations."""
        if job.total > MOST_EPISODES:
            raise Impossible(
                f"{len(job.episode.turns)} turns with {job.count} continuations each are more than {MOST_EPISODES} "
                "episodes: ask for fewer."
            )
        self._jobs[job.id] = job
        job.work = asyncio.get_running_loop().create_task(self._work(job))
        while len(self._jobs) > MOST_JOBS:
            _, oldest_job = self._jobs.popitem(last=False)
            self.stop(oldest_job)
        return job

    def stop(self, job: TurnValues) -> None:
        """End a job. It keeps the continuations that are finished."""
        if job.work is not None and not job.done:
            job.work.cancel()

    async def _work(self, job: TurnValues) -> None:
        try:
            async with self._working:
                await (self._sample_each_turn if job.policy.startswith(CHECKPOINT) else self._fork_each_turn)(job)
        except (Impossible, StarpodError) as error:
            job.problem = str(error)
        except asyncio.CancelledError:
            job.problem = "It was stopped."
            raise
        except Exception as error:  # nobody awaits the task, so the error is logged and shown here
            logger.exception("the values of turns of %s", job.link)
            job.problem = f"It failed: {type(error).__name__}: {error}"
        finally:
            job.done = True

    async def _fork_each_turn(self, job: TurnValues) -> None:
        game = await self._replayed(job)
        try:
            for turn in job.episode.turns:
                job.trees.append(await self.branch(game, job.policy, job.count, _counting(job)))
                if turn.actions:
                    await game.act(turn.actions, "the episode")
                if game.session.done:
                    break
        finally:
            await game.session.close()

    async def _replayed(self, job: TurnValues) -> LiveGame:
        """Open a game at the start of the job's episode."""
        game = await self.games.replay(job.episode, path_of(job.episode, job.task), 0)
        game.origin, game.run = job.link, job.folder
        return game

    async def _sample_each_turn(self, job: TurnValues) -> None:
        """Sample continuations by a checkpoint in new sessions, which have the episode's own seeds."""
        game = await self._replayed(job)
        await game.session.close()
        async with self.policies.agents(job.policy, job.folder) as agents:
            for turn in range(len(job.episode.turns)):
                job.trees.append(await self._sample(job, game, turn, agents))

    async def _sample(self, job: TurnValues, game: LiveGame, turns: int, agents: Agents) -> Branches:
        """Sample continuations from one turn on. The checkpoint sees the earlier replies as if it had sampled them."""
        episode, task = job.episode, replace(job.task, actions=tuple(game.spec.action_space.names))
        fleet = await self.games.fleet()
        sessions = await fleet.open(
            task.environment,
            seed=episode.seed,
            dynamics_seed=episode.dynamics_seed,
            count=job.count,
            options=task.options or None,
            want=agents.want,
            limits=task.limits,
            version=f"=={episode.version}" if episode.version else "",
        )
        past = episode.turns[:turns]
        # The checkpoint seeds its sampling with the group number.
        groups = [1 + turns * MOST_EPISODES + number for number in range(job.count)]
        try:
            episodes = await asyncio.gather(
                *(
                    play(
                        agents.agent(session, task, group), session, group=group, past_turns=past, watch=_counting(job)
                    )
                    for session, group in zip(sessions, groups, strict=True)
                )
            )
        finally:
            await fleet.close_sessions(sessions)
        if any([turn.reply for turn in branch.turns[:turns]] != [turn.reply for turn in past] for branch in episodes):
            raise Impossible(f"The checkpoint gets other prompts than the episode had before turn {turns + 1}.")
        whole = [replace(branch, turns=[*past, *branch.turns[turns:]]) for branch in episodes]
        lines = [PlayedBranch(branch, turns, path_of(branch, job.task)) for branch in whole]
        return self._keep(job.words, game, lines)


def _counting(job: TurnValues) -> Watch:
    def count(episode: Episode) -> None:
        job.finished += 1

    return count


def _check_open(game: LiveGame) -> None:
    if game.session.done:
        raise Impossible("The episode is over: there is nothing to continue.")


def _without_tokens(branch: PlayedBranch) -> Episode:
    """Return the episode without tokens and pictures, which is enough to show, replay and imitate it."""
    episode = branch.episode
    later_turns = [
        replace(turn, prompt=[], reply=[], logprobs=[], versions=[], spans=[], image=b"", info={})
        for turn in branch.later
    ]
    return replace(episode, turns=[*episode.turns[: branch.turn], *later_turns], tail=[], final_image=b"")


def _a_group() -> int:
    """Return a random group number, so that no two continuations use the same random numbers."""
    return secrets.randbelow(2**31)
