"""The real vLLM with a model that has eyes: it reads the ids and images that the trainer scores, and nothing else."""

import copy
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import torch

from starpod.trainer.data.images import MARK, by_key
from starpod.trainer.engines.base import EngineError, Reply, Request
from starpod.trainer.engines.config import EngineConfig
from starpod.trainer.engines.factory import build_engine
from starpod.trainer.models.policy import Policy
from starpod.trainer.models.vision import showing
from starpod.trainer.prompts.conversation import Conversation
from starpod.trainer.prompts.template import Template
from tests.trainer.engines.conformance import EngineConformance, changed, logprobs_under
from tests.trainer.models.tiny_vlm import IMAGES, SHOWN, tiny_vlm

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

BLOCK = 128
"""Tokens whose keys and values are reused together on a CPU."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return tiny_vlm("smolvlm", tmp_path_factory.mktemp("model"), heads=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(policy: Policy) -> AsyncIterator[Any]:
    config = EngineConfig.model_validate({"name": "vllm", "slots": 16, "dtype": "float32"})
    engine = build_engine(config, policy, max_context=384)
    yield engine
    await engine.close()


def talk(policy: Policy, images: list[bytes]) -> list[int]:
    """A conversation that shows an image a turn and was answered with words of which one is the mark of an image."""
    conversation = Conversation(Template(policy.tokenizer, view=policy.view))
    reply = [5, policy.tokenizer.convert_tokens_to_ids("<image>"), 6, conversation.template.end]
    for image in images[:-1]:
        conversation.ask(f"see {MARK} and go", image)
        conversation.answer(reply, "stop", conversation.template.decode(reply))
    return conversation.ask(f"see {MARK} and go " + "." * BLOCK, images[-1]).context


async def ask(engine: Any, prompt: list[int]) -> Reply:
    reply: Reply = await engine.generate(Request(prompt, 12, frozenset(), seed=3, images=SHOWN))
    return reply


def assert_scored(reply: Reply, model: torch.nn.Module, prompt: list[int]) -> None:
    with showing(SHOWN):
        wanted = logprobs_under(model, prompt, reply.tokens, 1.0)
    assert reply.logprobs == pytest.approx(wanted, abs=EngineConformance.tolerance)


async def test_the_sampler_and_the_trainer_see_the_same(engine: Any, policy: Policy) -> None:
    for images in (IMAGES[:1], IMAGES, [IMAGES[1], IMAGES[1]]):
        prompt = talk(policy, images)
        assert_scored(await ask(engine, prompt), policy.model, prompt)


async def test_another_image_is_another_cache(engine: Any, policy: Policy) -> None:
    first, other = (talk(policy, [image]) for image in IMAGES[1:])
    assert sum(each >= 0 for each in first) == sum(each >= 0 for each in other)
    for prompt, reused in ((first, 0), (other, 0), (first, (len(first) - 1) // BLOCK * BLOCK)):
        before = engine.stats().reused
        assert_scored(await ask(engine, prompt), policy.model, prompt)
        assert engine.stats().reused - before == reused


async def test_an_image_that_was_not_given_is_an_error_and_no_end(engine: Any, policy: Policy) -> None:
    prompt = talk(policy, IMAGES[:2])
    request, before = Request(prompt, 4, frozenset(), images=by_key(IMAGES[1:])), engine.stats().restarts
    with pytest.raises(EngineError, match="images that were not given with it"):
        await engine.generate(request)
    with pytest.raises(EngineError, match="not 16 tokens long"):
        await engine.generate(replace(request, prompt=prompt[: prompt.index(min(prompt))]))
    assert engine.stats().restarts == before
    assert_scored(await ask(engine, prompt), policy.model, prompt)


async def test_new_weights_of_each_part_are_used_after_a_load(engine: Any, policy: Policy) -> None:
    prompt = talk(policy, IMAGES[:2])
    other = dict(changed(policy).named_parameters())
    models = []
    for part in ("vision_model", "connector", "text_model", "lm_head"):
        models.append(copy.deepcopy(policy.model))
        moved = [(each, other[name]) for name, each in models[-1].named_parameters() if part in name]
        assert moved
        with torch.no_grad():
            for each, values in moved:
                each.copy_(values)
    for version, model in enumerate([*models, policy.model], 1):
        before = await ask(engine, prompt)
        await engine.pause()
        await engine.load(version, model)
        await engine.resume()
        after = await ask(engine, prompt)
        assert_scored(after, model, prompt)
        assert after.logprobs != pytest.approx(before.logprobs, abs=EngineConformance.tolerance)
