"""Engine and learner agree about models of many architectures, and train them."""

import asyncio
from dataclasses import replace

import pytest
import torch

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.engines.base import Engine, EngineError
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.models.trunk import splits_cleanly
from tests.trainer.engines.architectures import APART, SHAPES, WINDOW, make
from tests.trainer.engines.conformance import ROUNDING, ask, changed, hand_over, logprobs_under
from tests.trainer.tiny_learner import learner_of, make_trainer
from tests.trainer.turns import a_turn

TURNS = ([*range(3, 23)], [7, 5])
"""Prompts of an episode's turns. The first is longer than a window."""


async def play(engine: Engine, model: torch.nn.Module, number: int, member: int, version: int) -> Episode:
    """An episode of two turns, compared with a plain forward pass over the episode."""
    context: list[int] = []
    turns = []
    # All prompts share their first tokens, those of a group more, and those of two members all.
    for place, prompt in enumerate(([*TURNS[0], number, member % 2], TURNS[1])):
        context += prompt
        request = replace(ask(context, tokens=6, seed=member), conversation=f"{number} {member}")
        reply = await engine.generate(request)
        assert reply.logprobs == pytest.approx(logprobs_under(model, context, reply.tokens, 1.0), abs=ROUNDING)
        turns.append(
            a_turn(
                reply.tokens,
                float(reply.tokens[-1] % 2),
                prompt=prompt,
                fresh=place == 0,
                logprobs=reply.logprobs,
                versions=reply.versions,
            )
        )
        context += reply.tokens
    assert len(context) > 3 * WINDOW and set(turns[0].versions) == {version}
    return Episode(number, member, "lake", turns=turns, end="terminal")


@pytest.mark.parametrize("name", SHAPES)
async def test_two_iterations_of_training(name: str) -> None:
    policy = make(name)
    assert splits_cleanly(policy.model)
    learner = learner_of(make_trainer(AlgorithmConfig(advantage="grpo"), policy=policy))
    # Fewer slots than episodes: some wait, and some lose their cache between turns.
    engine = build_engine(EngineConfig(slots=5), policy, max_context=64)
    assert engine.stats().apart == (name in APART)
    for version in range(2):
        before = [parameter.detach().clone() for parameter in policy.parameters()]
        places = [(number, member) for number in (1, 2) for member in range(4)]
        episodes = await asyncio.gather(*(play(engine, policy.model, *place, version) for place in places))
        metrics = learner.learn([Group(1, episodes[:4]), Group(2, episodes[4:])], version=version)
        assert metrics["policy/logprob_gap_max"] < ROUNDING
        changes = [(new - old).abs().max().item() for new, old in zip(policy.parameters(), before, strict=True)]
        assert all(0 < change < 0.1 for change in changes), changes
        await hand_over(engine, version + 1, policy.model)
    assert engine.stats().reused > 0
    await engine.close()


async def test_a_window_far_from_the_beginning() -> None:
    """Kernels read keys in blocks of 512: here whole blocks are masked."""
    policy = make("mistral")
    engine = build_engine(EngineConfig(slots=2), policy, max_context=1200)
    prompts = [[number, *range(3, 230)] * 5 for number in (1, 2)]
    replies = await asyncio.gather(*(engine.generate(ask(prompt, tokens=4)) for prompt in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.logprobs == pytest.approx(logprobs_under(policy.model, prompt, reply.tokens, 1.0), abs=ROUNDING)
    await engine.close()


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_vllm_samples_from_the_weights_it_is_given() -> None:
    config = EngineConfig.model_validate({"name": "vllm", "slots": 4, "dtype": "float32", "gpu_memory_fraction": 0.1})
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match="mixture of experts"):
            build_engine(config, make("qwen3_moe", head=32), max_context=64)
    policy = make("gemma3_text", head=32)
    engine = build_engine(config, policy, max_context=64)
    prompt = [*range(3, 23)]
    for version, model in enumerate((policy.model, changed(policy, scale=0.05))):
        await hand_over(engine, version, model)
        reply = await engine.generate(ask(prompt, tokens=12))
        assert reply.logprobs == pytest.approx(logprobs_under(model, prompt, reply.tokens, 1.0), abs=ROUNDING)
    await engine.close()
