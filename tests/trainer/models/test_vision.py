"""A tiny policy with eyes: what it sees reaches its log-probabilities, in sampling as in training."""

import asyncio
import io
import random
from pathlib import Path

import pytest
import torch
from PIL import Image

from starpod.trainer.data.images import MARK, ImageConfig, by_key, image_ids
from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.engines.lean import LeanDecoder
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy, build_policy, build_shape, load_policy
from tests.trainer.models.tiny_policy import tiny_policy

VIEW = ImageConfig(rows=2, columns=2, pixels=4)
CONFIG = ModelConfig.model_validate(
    {"tiny": {"hidden": 32, "heads": 2, "intermediate": 64, "image": VIEW.to_dict()}, "critic": "separate"}
)
POLICY = build_policy(CONFIG, texts=[f"{MARK} Up Down <answer>"], critic="separate", seed=1)


def noise(seed: int) -> bytes:
    """An image as the policy sees it."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (8, 8), random.Random(seed).randbytes(192)).save(buffer, format="PNG")
    return VIEW.scaled(buffer.getvalue())


IMAGES = [noise(seed) for seed in range(3)]
SHOWN = by_key(IMAGES)


def context(*shown: int) -> list[int]:
    """Turns of an image, two words and a reply of one token."""
    return [each for image in shown for each in (5, *image_ids(IMAGES[image], VIEW.tokens), 7, 9, 290)]


def logprobs(tokens: list[list[int]], policy: Policy = POLICY) -> torch.Tensor:
    lengths = torch.tensor([len(row) for row in tokens])
    padded = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in tokens])
    sampled = padded == 290
    return policy.score(padded, lengths, sampled, SHOWN).logprobs_N


async def sampled(engine: TorchEngine, prompt: list[int], seed: int = 0) -> Reply:
    request = Request(prompt, 6, frozenset(), seed=seed, conversation="c", images=SHOWN)
    return await engine.generate(request)


async def test_the_sampler_and_the_trainer_see_the_same() -> None:
    engine = TorchEngine(POLICY, slots=4, max_context=128, prefill_rows=5)  # images are read in several pieces
    assert LeanDecoder.fits(engine._model)
    try:
        prompt: list[int] = []
        starts, told = [], []
        for turn in range(3):
            prompt = [*prompt, 5, *image_ids(IMAGES[turn], VIEW.tokens), 7]
            reply = await sampled(engine, prompt, turn)
            starts.append(len(prompt))
            told += reply.logprobs
            prompt = [*prompt, *reply.tokens]
    finally:
        await engine.close()
    mask = torch.zeros(1, len(prompt), dtype=torch.bool)
    for start in starts:
        mask[0, start : start + 6] = True
    scores = POLICY.score(torch.tensor([prompt]), torch.tensor([len(prompt)]), mask, SHOWN)
    torch.testing.assert_close(torch.tensor(told), scores.logprobs_N, atol=1e-4, rtol=0)


async def test_a_reply_depends_on_no_other_image_that_is_read_with_it() -> None:
    engine = TorchEngine(POLICY, slots=4, max_context=128)
    try:
        alone = await sampled(engine, context(0, 1)[:-1])
        engine.forget("c")
        await engine.pause()
        other = Request(context(2, 2, 0), 6, frozenset(), images=SHOWN)
        tasks = [asyncio.ensure_future(each) for each in (engine.generate(other), sampled(engine, context(0, 1)[:-1]))]
        await asyncio.sleep(0)
        await engine.resume()
        assert (await tasks[1]) == alone
        await tasks[0]
    finally:
        await engine.close()


def test_what_is_seen_and_where_both_count() -> None:
    one, again, other, swapped = logprobs(
        [context(0), context(0), context(1), [5, *context(0)[2:0:-1], *context(0)[3:]]]
    )
    assert one == again
    assert abs(one - other) > 1e-4
    assert abs(one - swapped) > 1e-4


def test_beginnings_with_an_image_are_folded_like_others() -> None:
    """And what several rows share is read as each by itself would be."""
    begin = context(0) * 8
    rows = [[*begin, *context(image)] for image in (1, 2, 1)]
    assert POLICY.folds
    assert POLICY.tokens_read(rows) < sum(map(len, rows)) / 2
    together = logprobs(rows)
    apart = torch.cat([logprobs([row]) for row in rows])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=0)


def test_the_encoders_of_policy_and_critic_learn() -> None:
    POLICY.zero_grad(set_to_none=True)
    row = context(0, 1)
    mask = torch.tensor([row]) == 290
    scores = POLICY.score(torch.tensor([row]), torch.tensor([len(row)]), mask, SHOWN, values=True)
    assert scores.values_N is not None
    POLICY.critic.head.weight.data.fill_(0.1)  # type: ignore[union-attr]
    values = POLICY.score(torch.tensor([row]), torch.tensor([len(row)]), mask, SHOWN, values=True).values_N
    assert values is not None
    (scores.logprobs_N.sum() + values.sum()).backward()  # type: ignore[no-untyped-call]
    learnt = [name for name, each in POLICY.named_parameters() if "encoder" in name and each.grad is not None]
    assert len(learnt) == 8
    assert all(each.grad.abs().sum() > 0 for name, each in POLICY.named_parameters() if name in learnt)  # type: ignore[union-attr]


def test_an_image_that_is_not_given_is_told_of() -> None:
    row = context(0)
    with pytest.raises(ValueError, match="an image that was not given"):
        POLICY.score(torch.tensor([row]), torch.tensor([len(row)]), torch.tensor([row]) == 290)


async def test_a_model_without_eyes_takes_no_image() -> None:
    engine = TorchEngine(tiny_policy(), slots=1, max_context=64)
    try:
        with pytest.raises(ValueError, match="no eyes"):
            await sampled(engine, [5, *image_ids(IMAGES[0], 4)])
        with pytest.raises(ValueError, match="not among the model's"):
            await engine.generate(Request([5, -1], 1, frozenset()))
    finally:
        await engine.close()


def test_a_folder_brings_the_same_eyes_back(tmp_path: Path) -> None:
    POLICY.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.view == VIEW
    assert loaded.tokenizer.convert_tokens_to_ids(MARK) == POLICY.tokenizer.convert_tokens_to_ids(MARK)
    assert torch.equal(logprobs([context(0, 1)], loaded), logprobs([context(0, 1)]))


def test_a_shape_counts_the_encoder() -> None:
    count = sum(each.numel() for each in build_shape(CONFIG).parameters())
    blind = CONFIG.model_copy(update={"tiny": CONFIG.tiny.model_copy(update={"image": ImageConfig()})})
    encoder = 48 * 64 + 64 + 64 * 32 + 32 + 4 * 32
    assert count - sum(each.numel() for each in build_shape(blind).parameters()) == encoder
