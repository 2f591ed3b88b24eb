"""Agents that sample from an engine, when they go on with what others played."""

import json
from dataclasses import replace
from typing import Literal

import pytest

from starpod.client import Fleet, Want
from starpod.trainer.agents.engine import EngineAgents
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.sample import samples_of
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.prompts.prompt import PromptConfig
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.play import play
from tests.trainer.lake import SAMPLING, TASK, TEMPLATE, collector, reply
from tests.trainer.models.tiny_policy import tiny_policy
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


SCHEMA = {
    "type": "object",
    "properties": {"move": {"enum": ["Down", "Right"]}},
    "required": ["move"],
    "additionalProperties": False,
}


async def test_an_answer_has_the_schema_and_is_recorded_with_its_structure(fleet: Fleet) -> None:
    policy = tiny_policy()
    prompt = PromptConfig(style="compact", thinking=False)
    template = Template(policy.tokenizer, prefill=prompt.opening)
    engine = TorchEngine(policy, slots=1, max_context=4000)
    sampling = ROOMY.model_copy(update={"json_schema": SCHEMA, "max_reply_tokens": 800})
    agents = EngineAgents(engine=engine, template=template, prompt=prompt, sampling=sampling)
    (session,) = await TASK.open(fleet, 1, 1, Want())
    try:
        (turn,) = (await play(agents.agent(session, TASK, 0), session, turns=1)).turns
    finally:
        await engine.close()
    assert json.loads(turn.actions[0])["move"] in ("Down", "Right")
    scores = policy.score(*Batch([Episode(0, 0, "a", turns=[turn])]).block([0]).inputs)
    assert scores.logprobs_N.tolist() == pytest.approx(turn.logprobs, abs=1e-4)


async def test_a_stop_text_ends_a_reply(fleet: Fleet) -> None:
    engine = ScriptedEngine(TEMPLATE, f"{reply('Down')} and so on")
    sampling = ROOMY.model_copy(update={"stop": ("</answer>", "never")})
    agents = collector(fleet, engine, sampling=sampling).agents
    (session,) = await TASK.open(fleet, 1, 1, Want())
    agent = agents.agent(session, TASK, 0)
    episode = await play(agent, session, turns=2)
    first, second = episode.turns
    assert TEMPLATE.decode(first.reply) == first.text == reply("Down")
    assert (first.actions, first.finish, len(first.logprobs)) == (["Down"], "stop", len(first.reply))
    assert second.prompt[0] == TEMPLATE.end and not second.fresh
    assert engine.requests[1].prompt[: len(first.prompt) + len(first.reply)] == first.prompt + first.reply
