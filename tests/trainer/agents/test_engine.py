"""Agents that sample from an engine, when they go on with what others played."""

from dataclasses import replace
from typing import Literal

import pytest

from starpod.client import Fleet, Want
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.sample import samples_of
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.rollout.play import play
from tests.trainer.lake import SAMPLING, TASK, TEMPLATE, collector, reply
from tests.trainer.scripted_engine import ScriptedEngine

ROOMY = SAMPLING.model_copy(update={"max_episode_tokens": 4000})


@pytest.mark.parametrize("style", ["compact", "full"])
async def test_a_branch_continues_with_the_context_of_earlier_turns(
    fleet: Fleet, style: Literal["compact", "full"]
) -> None:
    """The context of the model's last reply, and that reply, are trained. A fork's session has previous turns, too."""
    engine = ScriptedEngine(TEMPLATE, lambda *_: reply("Down") if len(engine.requests) > 1 else reply())
    agents = collector(fleet, engine, prompt=PromptConfig(style=style), sampling=ROOMY).agents
    (session,) = await TASK.open(fleet, 1, 1, Want())
    episode = await play(agents.agent(session, TASK, 0), session, turns=2)
    assert session.step_index == 1, "a turn without an action is not sent"
    (fork,) = await session.fork()
    agent = agents.agent(fork, TASK, 0)
    agent.recall(episode)
    await play(agent, fork, episode=episode, turns=1)
    (sample,) = samples_of(episode)
    assert sample.tokens == engine.requests[-1].prompt + episode.turns[-1].reply


async def test_unsampled_turns_are_shown_like_sampled_ones(fleet: Fleet) -> None:
    engine = ScriptedEngine(TEMPLATE, reply("Down"))
    (session,) = await TASK.open(fleet, 1, 1, Want())
    played = Turn(fresh=True, observation="P 0 0 G 2 2", text="Right", actions=["Right"])
    played.parts = {"environment": 0.0}
    played.take(await session.step(["Right"]))
    episode = replace(Episode.begin(session, 0), turns=[played])
    agent = collector(fleet, engine).agents.agent(session, TASK, 0)
    agent.recall(episode)
    await play(agent, session, episode=episode, turns=1)
    context = TEMPLATE.decode(engine.requests[-1].prompt)
    assert "<answer>Right</answer>" in context and episode.turns[1].actions == ["Down"]
