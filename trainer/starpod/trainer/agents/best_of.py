"""Agents that sample several replies per turn and play the one with the highest score.

They are used in evaluations with `evaluation.best_of`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields, replace

from starpod.client import Observation, Session
from starpod.trainer.agents.base import Agent, Task
from starpod.trainer.agents.engine import EngineAgent, EngineAgents
from starpod.trainer.configuration.seeds import derive
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.prompts.conversation import Prompt

Score = Callable[[Sequence[Episode]], Awaitable[list[list[float]]]]
"""Function that returns a number for each turn of each episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfAgents(EngineAgents):
    """Agents that sample `count` replies to each observation and play the reply with the highest score."""

    count: int
    score: Score

    @classmethod
    def from_agents(cls, agents: EngineAgents, *, count: int, score: Score) -> BestOfAgents:
        """Return best-of agents with the settings of `agents`."""
        return cls(**{each.name: getattr(agents, each.name) for each in fields(EngineAgents)}, count=count, score=score)

    def agent(self, session: Session, task: Task, group: int) -> Agent:
        return BestOf(self, session, task)


class BestOf(EngineAgent):
    """Agent that plays the best of several replies. The first reply is what plain sampling would give."""

    _agents: BestOfAgents

    async def _reply(self, request: Request, prompt: Prompt, observation: Observation, episode: Episode) -> Reply:
        seeds = [request.seed, *(derive(request.seed, "further", number) for number in range(1, self._agents.count))]
        # Sample one reply at a time, so that each one can use the conversation's cache.
        replies = [await self._agents.engine.generate(replace(request, seed=seed)) for seed in seeds]
        image = self.image_of(observation)
        candidates = [
            replace(
                episode,
                turns=[
                    *episode.turns,
                    Turn(
                        fresh=prompt.fresh,
                        prompt=prompt.appended,
                        reply=reply.tokens,
                        logprobs=reply.logprobs,
                        versions=reply.versions,
                        image=image,
                        structure=request.structure,
                    ),
                ],
            )
            for reply in replies
        ]
        scores = [turn_scores[-1] for turn_scores in await self._agents.score(candidates)]
        return replies[max(range(len(replies)), key=scores.__getitem__)]
