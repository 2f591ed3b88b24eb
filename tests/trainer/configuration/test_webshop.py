"""The configurations for webshop-v1: goals that never meet, demonstrations that wander and arrive, tokens that fit."""

from collections.abc import Sequence

import pytest

from starpod.client import Fleet, Want
from starpod.trainer.configuration.loading import load_config
from starpod.trainer.evaluation.figures import evaluate_reference
from starpod.trainer.models.tiny import train_tokenizer
from starpod.trainer.prompts.template import Template
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import make_task
from starpod.trainer.warm_start.demonstrations import Demonstration, collect_demonstrations
from starpod.trainer.warm_start.teacher import DemonstrationWriter
from tests.support import ServerProcess

CONFIG = load_config("webshop")
WARMSTART = CONFIG.seeds.warmstart.start


async def demonstrations(server: ServerProcess, seeds: Sequence[int], noise: float) -> list[Demonstration]:
    settings = CONFIG.warm_start.model_copy(update={"noise": noise})
    async with Fleet(server.address) as fleet:
        return await collect_demonstrations(fleet, settings, make_task(CONFIG.environment, ()), seeds)


async def instructions(server: ServerProcess, environment: EnvironmentConfig, seeds: Sequence[int]) -> set[str]:
    """Return the instructions of the episodes with these seeds."""
    async with Fleet(server.address) as fleet:
        sessions = [
            (await fleet.open(environment.id, seed=seed, options=environment.options, want=Want()))[0] for seed in seeds
        ]
        asked = {session.observation.text.splitlines()[0] for session in sessions}
        await fleet.close_sessions(sessions)
    return asked


async def test_evaluations_ask_for_other_things_than_training(server: ServerProcess) -> None:
    count = CONFIG.evaluation.episodes
    held_out = await instructions(server, CONFIG.tasks[0].held_out, CONFIG.seeds.held_out("final", count))
    choosing = await instructions(server, CONFIG.tasks[0].held_out, CONFIG.seeds.held_out("selection", count))
    trained = await instructions(
        server, CONFIG.environment, range(CONFIG.seeds.train.start, CONFIG.seeds.train.start + 1300)
    )
    shown = await instructions(server, CONFIG.environment, range(WARMSTART, WARMSTART + 1300))
    print(f"{len(held_out)} held-out goals, {len(trained)} to train on")
    assert len(held_out) > 200 and len(trained) > 200 and shown == trained
    # A text may be that of two products alike in all that it says; few are.
    assert len((held_out | choosing) & trained) <= 0.05 * len(held_out | choosing)
    assert len(held_out & choosing) <= 0.05 * len(held_out)


async def test_demonstrations_wander_among_what_a_page_offers_and_the_expert_arrives(server: ServerProcess) -> None:
    straight = await demonstrations(server, range(WARMSTART, WARMSTART + 24), noise=0.0)
    wandering = await demonstrations(server, range(WARMSTART, WARMSTART + 24), noise=0.5)
    assert [each.episode.total_reward for each in straight] == [1.0] * 24
    planned = {turn.actions[0] for each in straight for turn in each.episode.turns}
    turns = [turn for each in wandering for turn in each.episode.turns]
    assert {"click[description]", "click[back to search]"} <= {turn.actions[0] for turn in turns} - planned
    for turn in turns:  # each is a search, or a button in brackets on its page
        (action,) = turn.actions
        assert action.startswith("search[") or action.removeprefix("click") in turn.observation.lower()


async def test_replies_and_contexts_fit_into_what_sampling_allows(server: ServerProcess) -> None:
    played = await demonstrations(server, range(WARMSTART, WARMSTART + 100), noise=0.5)
    writer = DemonstrationWriter(CONFIG.warm_start, CONFIG.prompt, ())
    texts = await writer.texts(played)
    tokenizer = train_tokenizer(texts, size=CONFIG.model.tiny.vocabulary)
    template = Template(tokenizer, prefill=CONFIG.prompt.opening)
    episodes = [await writer.episode(each, template, 0) for each in played]
    turns = [turn for episode in episodes for turn in episode.turns]
    reply, prompt = max(len(turn.reply) for turn in turns), max(len(turn.prompt) for turn in turns)
    print(f"longest reply {reply}, longest prompt {prompt}, vocabulary {len(tokenizer)}")
    assert all(turn.fresh for turn in turns)
    assert reply <= CONFIG.sampling.max_reply_tokens
    assert reply + prompt <= CONFIG.sampling.max_episode_tokens
    assert len(tokenizer) < 600


async def test_the_ladder_of_the_shop(server: ServerProcess) -> None:
    seeds = range(48)
    async with Fleet(server.address) as fleet:
        task = make_task(CONFIG.tasks[0].held_out, ())
        rungs = {name: await evaluate_reference(fleet, name, task, seeds) for name in ("rule", "expert")}
    assert rungs["expert"]["success"] == rungs["expert"]["return_mean"] == 1.0
    assert rungs["rule"]["turns_mean"] == 3.0 and 0.4 < rungs["rule"]["return_mean"] < 0.8


@pytest.mark.parametrize("name", ["webshop_ragen", "webshop_gigpo"])
def test_real_models_are_trained_and_measured_on_splits_of_their_own(name: str) -> None:
    config = load_config(name)
    assert (config.collect.groups, config.collect.group_size, config.optimizer.lr) == (16, 8, 1e-6)
    assert config.environment.options["preset"] in ("ragen", "verl_agent")
    assert config.tasks[0].held_out.options["split"] in ("dev", "test") and "split" not in config.environment.options
    assert load_config(name, ["model=tiny", "engine=torch"]).model.name == "tiny"
