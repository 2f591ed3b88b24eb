"""Pretrained models with eyes: the same ids and numbers as in their own forward pass, from sampling to gradients."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from starpod.trainer.data.images import MARK, image_ids, read_image
from starpod.trainer.engines.base import Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import Policy, build_shape, load_policy
from starpod.trainer.prompts.conversation import Conversation, Template
from tests.trainer.models.tiny_vlm import IMAGES, KINDS, SHOWN, tiny_vlm


@pytest.fixture(params=KINDS)
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    return tiny_vlm(request.param, tmp_path, "separate")


def talk(policy: Policy, turns: int = 3) -> tuple[list[int], list[bool]]:
    """Ids of a conversation with an image a turn, and which of them are replies."""
    conversation = Conversation(Template(policy.tokenizer, view=policy.view))
    ids: list[int] = []
    sampled: list[bool] = []
    for image in IMAGES[:turns]:
        prompt = conversation.ask(f"see {MARK} and go", image)
        reply = [5, 6, conversation.template.end]
        conversation.answer(reply, "stop", conversation.template.decode(reply))
        assert prompt.context[: len(ids)] == ids
        sampled += [False] * (len(prompt.context) - len(ids)) + [True] * len(reply)
        ids = [*prompt.context, *reply]
    return ids, sampled


def logprobs(policy: Policy, ids: list[int], sampled: list[bool]) -> torch.Tensor:
    return policy.score(torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([sampled]), SHOWN).logprobs_N


def test_an_image_is_written_as_the_model_knows_it(policy: Policy) -> None:
    ids, _ = talk(policy, 1)
    assert policy.view is not None
    assert [each for each in ids if each < 0] == image_ids(IMAGES[0], 16)
    place = next(place for place, each in enumerate(ids) if each < 0)
    before, after = policy.tokenizer.decode(ids[:place]), policy.tokenizer.decode(ids[place + 16 :])
    assert before.endswith("User: see <fake_token_around_image><global-img>")
    assert after.startswith("<fake_token_around_image> and go<end_of_turn>\nAssistant: ")
    template = Template(policy.tokenizer, view=policy.view)
    told = Conversation(template).ask(f"{MARK} <image>", IMAGES[0]).context
    assert sum(each < 0 for each in told) == 16, "what an environment writes is no image"
    assert template.mark not in told


def test_it_says_what_the_model_of_transformers_says(policy: Policy, tmp_path: Path) -> None:
    ids, sampled = talk(policy)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path)
    told = torch.tensor([[each if each >= 0 else plain.config.image_token_id for each in ids]])
    pixels = np.stack([np.array(read_image(image)) for image in IMAGES]) / 127.5 - 1
    with torch.no_grad():
        logits = plain(
            input_ids=told, pixel_values=torch.tensor(pixels, dtype=torch.float32).permute(0, 3, 1, 2)[None]
        ).logits
    expected = logits.log_softmax(-1)[0, :-1].gather(1, told[0, 1:, None])[:, 0][torch.tensor(sampled[1:])]
    torch.testing.assert_close(logprobs(policy, ids, sampled), expected, atol=1e-4, rtol=0)


async def test_the_sampler_and_the_trainer_see_the_same(policy: Policy) -> None:
    engine = TorchEngine(policy, slots=4, max_context=256, prefill_rows=7)  # images are read in several pieces
    prompt, _ = talk(policy, 2)
    try:
        reply = await engine.generate(Request(prompt, 6, frozenset(), seed=3, conversation="c", images=SHOWN))
        engine.forget("c")
        other = await engine.generate(Request(prompt, 6, frozenset(), seed=3, images=SHOWN))
    finally:
        await engine.close()
    assert other == reply
    ids = [*prompt, *reply.tokens]
    mask = [False] * len(prompt) + [True] * len(reply.tokens)
    torch.testing.assert_close(torch.tensor(reply.logprobs), logprobs(policy, ids, mask), atol=1e-4, rtol=0)


def test_rows_that_begin_with_an_image_are_folded(policy: Policy) -> None:
    ids, sampled = talk(policy)
    rows = [[*ids[:-3], reply, *ids[-2:]] for reply in (5, 7, 9)]
    assert policy.folds
    assert policy.tokens_read(rows) < sum(map(len, rows)) / 2
    batch = (torch.tensor(rows), torch.tensor([len(ids)] * 3), torch.tensor([sampled] * 3))
    together = policy.score(*batch, SHOWN).logprobs_N
    apart = torch.cat([logprobs(policy, row, sampled) for row in rows])
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=0)


def test_the_eyes_of_policy_and_critic_learn(policy: Policy) -> None:
    ids, sampled = talk(policy)
    policy.critic.head.weight.data.fill_(0.1)  # type: ignore[union-attr]
    batch = (torch.tensor([ids]), torch.tensor([len(ids)]), torch.tensor([sampled]))
    scores = policy.score(*batch, SHOWN, values=True)
    assert scores.values_N is not None
    (scores.logprobs_N.sum() + scores.values_N.sum()).backward()  # type: ignore[no-untyped-call]
    eyes = {
        name: each.grad for name, each in policy.named_parameters() if "vision_model" in name or "connector" in name
    }
    assert any(name.startswith("critic") for name in eyes)
    assert [name for name, grad in eyes.items() if grad is None or not grad.abs().sum() > 0] == []


def test_a_saved_folder_is_a_model_of_transformers_and_sees_the_same(policy: Policy, tmp_path: Path) -> None:
    ids, sampled = talk(policy)
    policy.save(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved")
    assert loaded.view == policy.view
    assert torch.equal(logprobs(loaded, ids, sampled), logprobs(policy, ids, sampled))
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(each, theirs[name]) for name, each in policy.model.state_dict().items())


def test_a_shape_counts_the_eyes(policy: Policy) -> None:
    shape = build_shape(ModelConfig(name=policy.config.name))
    assert sum(each.numel() for each in shape.parameters()) == sum(each.numel() for each in policy.model.parameters())
