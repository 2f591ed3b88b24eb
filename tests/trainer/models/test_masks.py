"""Replies with a structure: sampler and trainer score them under the same masked distribution."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.structure import join
from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.models.masks import TokenMasks
from starpod.trainer.models.policy import Policy
from tests.trainer.models.tiny_policy import tiny_policy

SCHEMA = {"type": "object", "properties": {"move": {"enum": ["Up", "Down"]}, "n": {"type": "integer"}}}
CLOSED = {**SCHEMA, "required": ["move", "n"], "additionalProperties": False}
POLICY = tiny_policy()
END = POLICY.tokenizer.eos_token_id
STRUCTURE = join(
    {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": CLOSED, "max_whitespace_cnt": 1}}, [END]
)
PROMPT = [5, 9, 12, 30]


async def sample(policy: Policy, *, temperature: float = 1.0, **more: Any) -> list[Reply]:
    engine = TorchEngine(policy, slots=4, max_context=256)
    try:
        requests = [
            Request(PROMPT, 200, frozenset([END]), temperature, seed=seed, structure=STRUCTURE, **more)
            for seed in range(4)
        ]
        return [await engine.generate(request) for request in requests]
    finally:
        await engine.close()


def masked_logprobs(reply: list[int], temperature: float) -> Tensor:
    """The definition: softmax over the tokens that xgrammar allows, from the model's logits at each place."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(POLICY.tokenizer, vocab_size=POLICY.vocabulary)
    tag = json.loads(STRUCTURE)
    del tag["stop"]
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info).compile_structural_tag(tag))
    with torch.no_grad():
        logits = POLICY.model(torch.tensor([PROMPT + reply])).logits[0, len(PROMPT) - 1 : -1] / temperature
    result = []
    for row, token in zip(logits, reply, strict=True):
        bits = xgrammar.allocate_token_bitmask(1, POLICY.vocabulary)
        matcher.fill_next_token_bitmask(bits)
        xgrammar.apply_token_bitmask_inplace(row[None], bits)
        result.append(row.log_softmax(-1)[token])
        assert matcher.accept_token(token)
    return torch.stack(result)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampler_and_trainer_score_the_masked_distribution(temperature: float) -> None:
    for reply in await sample(POLICY, temperature=temperature):
        assert reply.finish == "stop"
        value = json.loads(POLICY.tokenizer.decode(reply.tokens[:-1]))
        assert value["move"] in ("Up", "Down") and type(value["n"]) is int
        expected = masked_logprobs(reply.tokens, temperature)
        assert torch.allclose(torch.tensor(reply.logprobs), expected, atol=1e-5)
        turn = Turn(
            fresh=True, prompt=PROMPT, reply=reply.tokens, logprobs=reply.logprobs, structure=STRUCTURE, finish="stop"
        )
        free = Turn(fresh=False, prompt=[7, 8], reply=[3, 4], logprobs=[0.0, 0.0])
        batch = Batch([Episode(0, 0, "a", turns=[turn, free])])
        block = batch.block([0])
        scores = POLICY.score(*block.inputs, temperature=temperature, entropy=True)
        assert torch.allclose(scores.logprobs_N[: len(reply.tokens)], expected, atol=1e-5)
        # The next reply, which has no structure, is scored as always.
        plain = POLICY.score(*block.inputs[:4], temperature=temperature)
        assert torch.equal(scores.logprobs_N[-2:], plain.logprobs_N[-2:])
        assert not torch.allclose(scores.logprobs_N[:-2], plain.logprobs_N[:-2], atol=1e-2)
        assert scores.entropy_N is not None and torch.isfinite(scores.entropy_N).all()


async def test_slices_of_the_logits_do_not_change_scores_and_gradients() -> None:
    (reply, *_) = await sample(POLICY)
    turn = Turn(fresh=True, prompt=PROMPT, reply=reply.tokens, logprobs=reply.logprobs, structure=STRUCTURE)
    inputs = Batch([Episode(0, 0, "a", turns=[turn])]).block([0]).inputs
    results = []
    for logits_at_once in (10**9, 3 * POLICY.vocabulary):
        policy = tiny_policy(logits_at_once=logits_at_once)
        scores = policy.score(*inputs, entropy=True)
        assert scores.entropy_N is not None
        (scores.logprobs_N.sum() + scores.entropy_N.sum()).backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in policy.trained_parameters()])  # type: ignore[union-attr]
        assert torch.isfinite(gradients).all()
        results.append((scores.logprobs_N, gradients))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-4)


def test_a_reply_that_its_structure_does_not_allow_is_refused() -> None:
    with pytest.raises(ValueError, match="install the same version of xgrammar"):
        TokenMasks(POLICY.tokenizer, POLICY.vocabulary).replay(STRUCTURE, [END])


async def test_structures_and_other_replies_share_a_batch() -> None:
    """A reply without a structure is the same beside replies with one."""
    engine = TorchEngine(POLICY, slots=4, max_context=256)
    free = Request(PROMPT, 12, frozenset([END]), seed=9)
    try:
        alone = await engine.generate(free)
        bound = Request(PROMPT, 200, frozenset([END]), seed=1, structure=STRUCTURE)
        import asyncio

        _, again = await asyncio.gather(engine.generate(bound), engine.generate(free))
        assert again == alone
        with pytest.raises(ValueError, match="xgrammar refuses"):
            await engine.generate(Request(PROMPT, 5, frozenset([END]), structure=join({"type": "structural_tag"}, [])))
    finally:
        await engine.close()
