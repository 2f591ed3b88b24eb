"""Agents that sample from an engine, when they go on with what others played."""

from dataclasses import replace
from typing import Literal

import pytest

from starpod.client import Fleet, Want
from starpod.trainer.data.batch import samples_of
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.prompts.conversation import Template
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.rollout.play import play
from tests.support import ServerProcess
from tests.trainer.rollout.test_collect import ACTIONS, LAKE, SAMPLING, collector, reply, server, template
from tests.trainer.scripted_engine import ScriptedEngine

__all__ = ["server", "template"]
ROOMY = SAMPLING.model_copy(update={"max_episode_tokens": 4000})


@pytest.mark.parametrize("style", ["compact", "full"])
async def test_a_branch_goes_on_with_what_the_turns_before_were_told(
    server: ServerProcess, template: Template, style: Literal["compact", "full"]
) -> None:
    """What the model sees for its last reply, and that reply, is what is trained: on a fork too, where the session has
    turns behind it."""
    engine = ScriptedEngine(template, lambda request, context: reply("Down"))
    async with Fleet(server.address) as fleet:
        agents = collector(fleet, engine, prompt=PromptConfig(style=style), sampling=ROOMY).agents
        task = LAKE.task(ACTIONS)
        (session,) = await task.open(fleet, 1, 1, Want())
        episode = await play(agents.agent(session, task, 0), session, turns=2)
        (fork,) = await session.fork()
        agent = agents.agent(fork, task, 0)
        agent.recall(episode)
        await play(agent, fork, episode=episode, turns=1)
        (sample,) = samples_of(episode)
        assert sample.tokens == engine.requests[-1].prompt + episode.turns[-1].reply


async def test_turns_that_nobody_sampled_are_told_as_if_they_had_been(
    server: ServerProcess, template: Template
) -> None:
    engine = ScriptedEngine(template, lambda request, context: reply("Down"))
    async with Fleet(server.address) as fleet:
        agents = collector(fleet, engine).agents
        task = LAKE.task(ACTIONS)
        (session,) = await task.open(fleet, 1, 1, Want())
        transition = await session.step(["Right"])
        played = Turn(fresh=True, observation="P 0 0 G 2 2", text="Right", actions=["Right"])
        played.parts = {"environment": 0.0}
        played.take(transition)
        episode = replace(Episode.begin(session, 0), turns=[played])
        agent = agents.agent(session, task, 0)
        agent.recall(episode)
        await play(agent, session, episode=episode, turns=1)
    context = template.tokenizer.decode(engine.requests[-1].prompt)
    assert "<answer>Right</answer>" in context and episode.turns[1].actions == ["Down"]
