"""Jobs that find which turn lost an episode, by continuations from the state before each turn."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path

from starpod.client import StarpodError
from starpod.remote.game import Impossible
from starpod.trainer.agents.base import Agents, Task
from starpod.trainer.data.episode import Episode
from starpod.trainer.rollout.play import play
from starpod.ui.continuing import Branches, Continuing, PlayedBranch, Watch
from starpod.ui.games import LiveGame, path_of
from starpod.ui.policies import CHECKPOINT

MOST_EPISODES = 512
"""Maximum number of continuations that are played for one request."""
MOST_JOBS = 50
"""Maximum number of jobs (TurnValues) that are kept. The oldest are dropped first."""

logger = logging.getLogger(__name__)


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


class TurnJobs:
    """The jobs of the site. They run one at a time, and the newest are kept after they have ended."""

    def __init__(self, continuing: Continuing) -> None:
        self._continuing = continuing
        self._jobs: OrderedDict[str, TurnValues] = OrderedDict()
        self._working = asyncio.Lock()

    async def close(self) -> None:
        tasks = [job.work for job in self._jobs.values() if job.work is not None]
        for work in tasks:
            work.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def all(self) -> list[TurnValues]:
        """Return all jobs, newest first."""
        return list(reversed(self._jobs.values()))

    def of_episode(self, link: str) -> list[TurnValues]:
        """Return the jobs of the episode with this link, newest first."""
        return [job for job in self.all() if job.link == link]

    def get(self, name: str) -> TurnValues:
        """Return a job. Raises Impossible if it is no longer kept."""
        if name not in self._jobs:
            raise Impossible(f"This job is no longer kept: the site was restarted, or {MOST_JOBS} others came later.")
        return self._jobs[name]

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
                job.trees.append(await self._continuing.branch(game, job.policy, job.count, _counting(job)))
                if turn.actions:
                    await game.act(turn.actions, "the episode")
                if game.session.done:
                    break
        finally:
            await game.session.close()

    async def _replayed(self, job: TurnValues) -> LiveGame:
        """Open a game at the start of the job's episode."""
        game = await self._continuing.games.replay(job.episode, path_of(job.episode, job.task), 0)
        game.origin, game.run = job.link, job.folder
        return game

    async def _sample_each_turn(self, job: TurnValues) -> None:
        """Sample continuations by a checkpoint in new sessions, which have the episode's own seeds."""
        game = await self._replayed(job)
        await game.session.close()
        async with self._continuing.policies.agents(job.policy, job.folder) as agents:
            for turn in range(len(job.episode.turns)):
                job.trees.append(await self._sample(job, game, turn, agents))

    async def _sample(self, job: TurnValues, game: LiveGame, turns: int, agents: Agents) -> Branches:
        """Sample continuations from one turn on. The checkpoint sees the earlier replies as if it had sampled them."""
        episode, task = job.episode, replace(job.task, actions=tuple(game.spec.action_space.names))
        fleet = await self._continuing.games.fleet()
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
            raise Impossible(
                f"The checkpoint would get different prompts than the episode had before turn {turns + 1}."
            )
        whole = [replace(branch, turns=[*past, *branch.turns[turns:]]) for branch in episodes]
        lines = [PlayedBranch(branch, turns, path_of(branch, job.task)) for branch in whole]
        return self._continuing.keep(job.words, game, lines)


def _counting(job: TurnValues) -> Watch:
    def count(episode: Episode) -> None:
        job.finished += 1

    return count
