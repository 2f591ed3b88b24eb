"""Policies with eyes, ours and pretrained ones: what they see reaches their log-probabilities, in sampling as in
training, and it is what the model of transformers sees."""

import asyncio
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from starpod.trainer.data.images import MARK, ImageConfig, image_ids, read_image
from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.engines.lean import LeanDecoder
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy, build_policy, build_shape, load_policy
from starpod.trainer.prompts.conversation import Conversation
from starpod.trainer.prompts.template import Template
from tests.trainer.models.tiny_policy import tiny_policy
from tests.trainer.models.tiny_vlm import IMAGES, KINDS, SHOWN, tiny_vlm

VIEW = ImageConfig(rows=2, columns=2, pixels=8)
"""The images of tiny_vlm are of this size."""


@functools.cache
def tiny() -> Policy:
    shape = {"hidden": 32, "heads": 2, "intermediate": 64, "vocabulary": 320, "image": VIEW.to_dict()}
    config = ModelConfig.model_validate({"tiny": shape, "critic": "separate"})
    words = [first + second for first in "abcdefgh" for second in "stuvwxyz"]  # more than it has room for
    return build_policy(config, texts=[f"{MARK} see and go", *words], critic="separate", seed=1)


@pytest.fixture(params=["tiny", *KINDS])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    return tiny() if request.param == "tiny" else tiny_vlm(request.param, tmp_path, "separate")


@pytest.fixture(params=KINDS)
def pretrained(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    return tiny_vlm(request.param, tmp_path, "separate")


def talk(policy: Policy, *shown: int) -> tuple[list[int], list[bool]]:
    """Ids of a conversation with these images, one a turn, and which of them are replies."""
    conversation = Conversation(Template(policy.tokenizer, view=policy.view))
    ids: list[int] = []
    sampled: list[bool] = []
    for image in shown:
        prompt = conversation.ask(f"see {MARK} and go", IMAGES[image])
        reply = [5, 6, conversation.template.end]
        conversation.answer(reply, "stop", conversation.template.decode(reply))
        assert prompt.context[: len(ids)] == ids
        sampled += [False] * (len(prompt.context) - len(ids)) + [True] * len(reply)
        ids = [*prompt.context, *reply]
    return ids, sampled


def logprobs(policy: Policy, ids: list[int], sampled: list[bool]) -> torch.Tensor:
    return policy.score(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([sampled]), SHOWN).logprobs_N


async def ask(engine: TorchEngine, prompt: list[int]) -> Reply:
    return await engine.generate(Request(prompt, 6, frozenset(), seed=3, conversation="c", images=SHOWN))


async def test_the_sampler_and_the_trainer_see_the_same(policy: Policy) -> None:
    engine = TorchEngine(policy, slots=4, max_context=256, prefill_rows=5)  # images are read in several pieces
    assert LeanDecoder.fits(engine._model) or policy is not tiny()
    ids: list[int] = []
    sampled: list[bool] = []
    told: list[float] = []
    try:
        for turn in range(3):
            prompt = [*ids, *talk(policy, turn)[0][:-3]]
            reply = await ask(engine, prompt)
            told += reply.logprobs
            sampled += [False] * (len(prompt) - len(ids)) + [True] * len(reply.tokens)
            ids = [*prompt, *reply.tokens]
        engine.forget("c")
        assert await ask(engine, prompt) == reply
    finally:
        await engine.close()
    torch.testing.assert_close(torch.tensor(told), logprobs(policy, ids, sampled), atol=1e-4, rtol=0)


async def test_a_reply_depends_on_no_other_image_that_is_read_with_it() -> None:
    engine = TorchEngine(tiny(), slots=4, max_context=128)
    prompt = talk(tiny(), 0, 1)[0][:-3]
    try:
        alone = await ask(engine, prompt)
        engine.forget("c")
        await engine.pause()
        other = Request(talk(tiny(), 2, 2, 0)[0], 6, frozenset(), images=SHOWN)
        tasks = [asyncio.ensure_future(each) for each in (engine.generate(other), ask(engine, prompt))]
        await asyncio.sleep(0)
        await engine.resume()
        assert (await tasks[1]) == alone
        await tasks[0]
    finally:
        await engine.close()


def test_what_is_seen_and_where_both_count() -> None:
    ids, sampled = talk(tiny(), 0)
    start = next(place for place, each in enumerate(ids) if each < 0)
    swapped = [*ids[:start], *ids[start : start + VIEW.tokens][::-1], *ids[start + VIEW.tokens :]]
    one, again, other, turned = (logprobs(tiny(), row, sampled)[0] for row in (ids, ids, talk(tiny(), 1)[0], swapped))
    assert one == again
    assert abs(one - other) > 1e-4 and abs(one - turned) > 1e-4


def test_rows_that_begin_with_an_image_are_folded(policy: Policy) -> None:
    ids, sampled = talk(policy, *[0, 1, 2] * 4)
    rows = [[*ids[:-3], reply, *ids[-2:]] for reply in (5, 7, 9)]
    assert policy.folds and policy.tokens_read(rows) < sum(map(len, rows)) / 2
    batch = (torch.tensor(rows), torch.tensor([len(ids)] * 3), torch.tensor([sampled] * 3))
    apart = torch.cat([logprobs(policy, row, sampled) for row in rows])
    torch.testing.assert_close(policy.score(*batch, SHOWN).logprobs_N, apart, atol=1e-4, rtol=0)


def test_the_eyes_of_policy_and_critic_learn(policy: Policy) -> None:
    policy.zero_grad(set_to_none=True)
    ids, sampled = talk(policy, 0, 1)
    policy.critic.head.weight.data.fill_(0.1)  # type: ignore[union-attr]
    batch = (torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([sampled]))
    scores = policy.score(*batch, SHOWN, values=True)
    assert scores.values_N is not None
    (scores.logprobs_N.sum() + scores.values_N.sum()).backward()  # type: ignore[no-untyped-call]
    parts = ("encoder", "vision_model", "connector")
    eyes = {name: each.grad for name, each in policy.named_parameters() if any(part in name for part in parts)}
    assert any(name.startswith("critic") for name in eyes) and any(name.startswith("model") for name in eyes)
    assert [name for name, grad in eyes.items() if grad is None or not grad.abs().sum() > 0] == []


async def test_things_that_cannot_be_seen_are_reported() -> None:
    ids, sampled = talk(tiny(), 0)
    with pytest.raises(ValueError, match="an image that was not given"):
        tiny().score(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([sampled]))
    engine = TorchEngine(tiny_policy(), slots=1, max_context=64)
    try:
        with pytest.raises(ValueError, match="no image input"):
            await ask(engine, [5, *image_ids(IMAGES[0], 4)])
        with pytest.raises(ValueError, match="not among the model's"):
            await engine.generate(Request([5, -1], 1, frozenset()))
    finally:
        await engine.close()


def test_a_folder_brings_the_same_eyes_back_and_a_shape_counts_them(policy: Policy, tmp_path: Path) -> None:
    ids, sampled = talk(policy, 0, 1)
    policy.save(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved")
    assert loaded.view == policy.view
    assert loaded.tokenizer.convert_tokens_to_ids(MARK) == policy.tokenizer.convert_tokens_to_ids(MARK)
    assert torch.equal(logprobs(loaded, ids, sampled), logprobs(policy, ids, sampled))
    shape = build_shape(policy.config)
    assert sum(each.numel() for each in shape.parameters()) == sum(each.numel() for each in policy.model.parameters())
    if policy is not tiny():
        theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").state_dict()
        assert all(torch.equal(each, theirs[name]) for name, each in policy.model.state_dict().items())


# --- pretrained models ------------------------------------------------------------------------------------------------


def test_an_image_is_written_as_the_model_knows_it(pretrained: Policy) -> None:
    ids, _ = talk(pretrained, 0)
    assert [each for each in ids if each < 0] == image_ids(IMAGES[0], 16)
    place = next(place for place, each in enumerate(ids) if each < 0)
    before, after = pretrained.tokenizer.decode(ids[:place]), pretrained.tokenizer.decode(ids[place + 16 :])
    assert before.endswith("User: see <fake_token_around_image><global-img>")
    assert after.startswith("<fake_token_around_image> and go<end_of_turn>\nAssistant: ")
    template = Template(pretrained.tokenizer, view=pretrained.view)
    told = Conversation(template).ask(f"{MARK} <image>", IMAGES[0]).context
    assert sum(each < 0 for each in told) == 16, "what an environment writes is no image"
    assert pretrained.view is not None and pretrained.tokenizer.convert_tokens_to_ids(pretrained.view.mark) not in told


def test_it_says_what_the_model_of_transformers_says(pretrained: Policy, tmp_path: Path) -> None:
    ids, sampled = talk(pretrained, 0, 1, 2)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path)
    told = torch.tensor([[each if each >= 0 else plain.config.image_token_id for each in ids]])
    pixels = np.stack([np.array(read_image(image)) for image in IMAGES]) / 127.5 - 1
    seen = torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2)[None]
    with torch.no_grad():
        logits = plain(input_ids=told, pixel_values=seen).logits
    expected = logits.log_softmax(-1)[0, :-1].gather(1, told[0, 1:, None])[:, 0][torch.tensor(sampled[1:])]
    torch.testing.assert_close(logprobs(pretrained, ids, sampled), expected, atol=1e-4, rtol=0)
