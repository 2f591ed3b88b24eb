"""Computing in bfloat16: the weights keep what a step adds, and the engine samples from what is scored."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from starpod.trainer.engines.base import Reply, Request
from starpod.trainer.engines.torch_engine import TorchEngine
from starpod.trainer.engines.weights import weights_of, write_weights
from starpod.trainer.models.config import ModelConfig
from starpod.trainer.models.policy import CriticKind, Policy
from starpod.trainer.models.precision import compute_dtype, computing, output_layer, round_weights
from starpod.trainer.models.trunk import head_of
from tests.trainer.models.test_policy import a_batch
from tests.trainer.models.tiny_policy import tiny_policy


def step(policy: Policy, *, lr: float) -> None:
    """One step of Adam on the likelihood of a batch."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    policy.score(*a_batch(policy)).logprobs_N.sum().backward()
    optimizer.step()


def test_a_small_step_moves_weights_that_bfloat16_would_leave_alone() -> None:
    policy = tiny_policy(dtype="bfloat16")
    assert compute_dtype(policy.model) == torch.bfloat16
    before = [parameter.detach().clone() for parameter in policy.parameters()]
    step(policy, lr=1e-6)
    moved = [(new - old).abs() for new, old in zip(policy.parameters(), before, strict=True)]
    with_gradient = [p.grad != 0 for p in policy.parameters() if p.grad is not None]
    share = sum(int((m[g] > 1e-7).sum()) for m, g in zip(moved, with_gradient, strict=True)) / sum(
        int(g.sum()) for g in with_gradient
    )
    assert share > 0.95
    # The same step on weights that are kept in bfloat16.
    kept = sum(int(((old.bfloat16() + 1e-6) != old.bfloat16()).sum()) for old in before)
    assert kept / sum(old.numel() for old in before) < 0.1


@pytest.mark.parametrize("critic", ["none", "shared", "separate"])
def test_scores_are_near_those_of_float32_and_not_the_same(critic: CriticKind) -> None:
    exact, rough = tiny_policy(critic), tiny_policy(critic, dtype="bfloat16")
    values = critic != "none"
    if values:
        for policy in (exact, rough):
            torch.nn.init.ones_(policy.critic.head.weight)  # type: ignore[union-attr]
    one, other = (policy.score(*a_batch(policy), entropy=True, values=values) for policy in (exact, rough))
    assert other.logprobs_N.dtype == torch.float32
    difference = (one.logprobs_N - other.logprobs_N).abs().max()
    assert 1e-6 < difference < 0.1
    if values:
        assert one.values_N is not None
        assert other.values_N is not None
        assert other.values_N.dtype == torch.float32
        assert 1e-6 < (one.values_N - other.values_N).abs().max() < 0.5


def test_a_float32_output_layer_rounds_no_logit() -> None:
    rough, policy = (tiny_policy(dtype="bfloat16", float32_logits=given) for given in (False, True))
    head = head_of(policy.model).weight
    states = torch.randn(50, head.shape[1], dtype=torch.bfloat16)
    exact = states.float() @ head.float().T
    with torch.no_grad():
        assert torch.equal(output_layer(policy.model)(states), exact)
        with computing(rough.model):
            rounded = output_layer(rough.model)(states)
        assert rounded.dtype == torch.bfloat16 and not torch.equal(rounded.float(), exact)
        one, other = (each.score(*a_batch(each)).logprobs_N for each in (rough, policy))
    assert 0 < float((one - other).abs().max()) < 0.1
    policy.score(*a_batch(policy)).logprobs_N.sum().backward()
    assert head.grad is not None and head.grad.dtype == torch.float32
    before = head.detach().clone()
    round_weights(policy.model)
    assert torch.equal(head_of(policy.model).weight, before)
    assert next(policy.model.parameters()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"float32_logits is for model\.dtype bfloat16"):
        ModelConfig(float32_logits=True)


@pytest.mark.parametrize("float32_logits", [False, True])
async def test_the_engine_samples_from_what_is_scored(float32_logits: bool) -> None:
    policy = tiny_policy(dtype="bfloat16", float32_logits=float32_logits, tiny={"tied": float32_logits})
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(2)
    engine = TorchEngine(policy, slots=4, max_context=64)

    async def ask() -> Reply:
        return await engine.generate(Request([7, 300, 12, 40], max_tokens=24, stop=frozenset(), seed=3))

    def gap(reply: Reply) -> float:
        """Mean difference between what the engine says of the reply and what scoring says now, in nats a token."""
        tokens = torch.tensor([[7, 300, 12, 40, *reply.tokens]])
        sampled = torch.arange(tokens.shape[1])[None] >= 4
        with torch.no_grad():
            scored = policy.score(tokens, torch.tensor([tokens.shape[1]]), sampled).logprobs_N
        return float((scored - torch.tensor(reply.logprobs)).abs().mean())

    old = await ask()
    assert gap(old) < 0.05
    step(policy, lr=0.05)
    stale = gap(old)
    assert stale > 0.5
    await engine.pause()
    await engine.load(1, policy)
    await engine.resume()
    # bfloat16 rounds more with the larger weights, and on each machine otherwise.
    assert gap(await ask()) < stale / 5
    assert all(parameter.dtype == torch.float32 for parameter in policy.model.parameters())
    await engine.close()


def test_weights_are_handed_out_and_written_rounded_where_they_are_used(tmp_path: Path) -> None:
    policy = tiny_policy(dtype="bfloat16")
    assert {weight.dtype for _, weight in weights_of(policy.model)} == {torch.bfloat16}
    write_weights(policy.model, tmp_path / "handed")
    (tmp_path / "handed" / "model-00000.safetensors").rename(tmp_path / "handed" / "model.safetensors")
    policy.save(tmp_path / "trained", rounded=False)
    policy.save(tmp_path / "used", rounded=True)
    for name, dtype in (("handed", torch.bfloat16), ("trained", torch.float32), ("used", torch.bfloat16)):
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == dtype
    assert policy.model.get_parameter("lm_head.weight").dtype == torch.float32
    rounded = copy.deepcopy(policy)
    round_weights(rounded.model)
    assert rounded.model.get_parameter("lm_head.weight").dtype == torch.bfloat16
    one, other = (each.score(*a_batch(each)).logprobs_N for each in (policy, rounded))
    assert (one - other).abs().max() < 0.1
