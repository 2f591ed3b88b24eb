"""Scoring against the plain formulas, saving, critics, adapters."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig, PretrainedConfig

from starpod.trainer.models import hf
from starpod.trainer.models.config import ModelConfig, ModelError
from starpod.trainer.models.policy import CriticKind, Policy, Scores, build_policy, load_policy
from starpod.trainer.models.trunk import unwrapped
from tests.trainer.models.tiny_policy import TEXTS, tiny_policy
from tests.trainer.tiny_learner import gradient_of

POLICY = tiny_policy()


def a_batch(policy: Policy, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three sequences of 12, 9 and 5 tokens, some of them sampled."""
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.tensor([12, 9, 5])
    tokens_BL = torch.randint(0, policy.vocabulary, (3, 12), generator=generator)
    sampled_BL = torch.rand(3, 12, generator=generator) < 0.5
    sampled_BL &= torch.arange(12) < lengths_B[:, None]
    sampled_BL[:, 0] = False
    sampled_BL[0, 11] = True
    return tokens_BL, lengths_B, sampled_BL


def formulas(
    policy: Policy, tokens_BL: torch.Tensor, sampled_BL: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies the long way."""
    log_p = (unwrapped(policy.model)(tokens_BL).logits / temperature).log_softmax(-1)[:, :-1]
    chosen = log_p.gather(-1, tokens_BL[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return chosen[sampled_BL[:, 1:]], entropy[sampled_BL[:, 1:]]


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(("temperature", "logits_at_once"), [(1.0, 2**25), (0.7, 2**25), (0.7, 1000)])
def test_scores_and_their_gradients_are_those_of_the_formulas(
    temperature: float, logits_at_once: int, entropy: bool
) -> None:
    policy = tiny_policy(logits_at_once=logits_at_once)
    tokens_BL, lengths_B, sampled_BL = a_batch(policy)

    def gradient(logprobs_N: torch.Tensor, entropy_N: torch.Tensor | None) -> torch.Tensor:
        weights = torch.randn(2, len(logprobs_N), generator=torch.Generator().manual_seed(1))
        policy.zero_grad()
        total = weights[0] @ logprobs_N
        (total if entropy_N is None else total + weights[1] @ entropy_N).backward()
        return gradient_of(policy)

    scores = policy.score(tokens_BL, lengths_B, sampled_BL, temperature=temperature, entropy=entropy)
    logprobs_N, entropy_N = formulas(policy, tokens_BL, sampled_BL, temperature)
    assert (scores.entropy_N is not None) == entropy
    torch.testing.assert_close(scores.logprobs_N, logprobs_N, atol=1e-5, rtol=0)
    if entropy:
        torch.testing.assert_close(scores.entropy_N, entropy_N, atol=1e-5, rtol=0)
    expected = gradient(logprobs_N, entropy_N if entropy else None)
    torch.testing.assert_close(gradient(scores.logprobs_N, scores.entropy_N), expected, atol=1e-4, rtol=1e-4)


@given(st.integers(0, 100))
@settings(max_examples=10)
def test_neither_padding_nor_companions_change_a_score(seed: int) -> None:
    tokens_BL, lengths_B, sampled_BL = a_batch(POLICY, seed)
    with torch.no_grad():
        together = POLICY.score(tokens_BL, lengths_B, sampled_BL).logprobs_N
        garbage = torch.where(torch.arange(12) < lengths_B[:, None], tokens_BL, 7)
        assert torch.equal(POLICY.score(garbage, lengths_B, sampled_BL).logprobs_N, together)
        apart = [
            POLICY.score(tokens_BL[row, None, :length], lengths_B[row, None], sampled_BL[row, None, :length]).logprobs_N
            for row, length in enumerate(lengths_B.tolist())
            if sampled_BL[row].any()
        ]
    torch.testing.assert_close(torch.cat(apart), together, atol=1e-5, rtol=0)


def test_a_first_token_cannot_be_scored() -> None:
    tokens_BL, lengths_B, sampled_BL = a_batch(POLICY)
    sampled_BL[1, 0] = True
    with pytest.raises(ValueError, match="no context"):
        POLICY.score(tokens_BL, lengths_B, sampled_BL)


def test_the_seed_decides_and_the_global_state_does_not() -> None:
    torch.manual_seed(1)
    first = tiny_policy(seed=3)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after), "building a model consumed global randomness"
    again, other = tiny_policy(seed=3), tiny_policy(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


# --- critics ---------------------------------------------------------------------------------------------------------


def values_of(policy: Policy) -> Scores:
    return policy.score(*a_batch(policy), values=True)


def awaken(policy: Policy) -> None:
    """A head of zeros passes no gradient on."""
    assert policy.critic is not None
    torch.nn.init.ones_(policy.critic.head.weight)


@pytest.mark.parametrize(("critic", "detach"), [("shared", False), ("shared", True), ("separate", False)])
def test_a_shared_critic_alone_reaches_the_trunk_unless_it_is_detached(critic: CriticKind, detach: bool) -> None:
    policy = tiny_policy(critic, detach_critic=detach)
    awaken(policy)
    scores = values_of(policy)
    assert scores.values_N is not None and scores.values_N.shape == scores.logprobs_N.shape
    scores.values_N.sum().backward()
    trunk = sum(p.grad.abs().sum().item() for p in policy.model.parameters() if p.grad is not None)
    assert (trunk > 0) == (critic == "shared" and not detach)
    assert all(p.grad is not None for p in policy.critic_parameters())
    assert {id(p) for p in policy.critic_parameters()}.isdisjoint(id(p) for p in policy.model.parameters())


def test_a_value_is_that_of_the_context_before_the_token() -> None:
    policy = tiny_policy("shared")
    awaken(policy)
    tokens_BL, lengths_B, sampled_BL = a_batch(policy)
    before = policy.score(tokens_BL, lengths_B, sampled_BL, values=True).values_N
    tokens_BL[0, 11] = (tokens_BL[0, 11] + 1) % policy.vocabulary
    after = policy.score(tokens_BL, lengths_B, sampled_BL, values=True).values_N
    assert before is not None and after is not None and torch.equal(before, after)


def test_a_policy_without_a_critic_has_no_values() -> None:
    assert not list(POLICY.critic_parameters())
    with pytest.raises(ValueError, match="no critic"):
        values_of(POLICY)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointing_computes_twice_and_changes_no_gradient(dtype: str) -> None:
    gradients, counts = [], []
    for checkpointing in (False, True):
        policy = tiny_policy("separate", gradient_checkpointing=checkpointing, dtype=dtype, logits_at_once=1000)
        awaken(policy)
        calls: list[None] = []
        policy.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        scores = values_of(policy)
        assert scores.values_N is not None
        assert not policy.model.training, "sampling with a cache needs evaluation mode"
        (scores.logprobs_N.sum() + scores.values_N.sum()).backward()
        gradients.append(gradient_of(policy))
        counts.append(len(calls))
    assert torch.equal(*gradients) and gradients[0].dtype == torch.float32
    assert counts == [1, 2]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", [GPT2Config, LlamaConfig, OPTConfig])
def test_dropout_of_a_pretrained_model_is_off_in_every_pass(
    architecture: type[PretrainedConfig], checkpointing: bool, tmp_path: Path
) -> None:
    """Layers may be in training mode, to be recomputed, or apply dropout by themselves (OPT)."""
    tokenizer = POLICY.tokenizer
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"attention_dropout": 0.5, "dropout": 0.5, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    torch.manual_seed(0)
    config = architecture(vocab_size=len(tokenizer), **sizes, **dropout, ffn_dim=32, word_embed_proj_dim=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = ModelConfig(name=str(tmp_path), gradient_checkpointing=checkpointing)
    policy = build_policy(settings, texts=None, critic="separate", seed=0)
    awaken(policy)
    batch = a_batch(policy)
    with torch.no_grad():
        scored = policy.score(*batch, values=True)
    trained = policy.score(*batch, values=True)
    assert scored.values_N is not None and trained.values_N is not None
    assert torch.equal(trained.logprobs_N, scored.logprobs_N) and torch.equal(trained.values_N, scored.values_N)
    gradients = []
    for scores in (trained, policy.score(*batch, values=True)):
        policy.zero_grad()
        assert scores.values_N is not None
        (scores.logprobs_N.sum() + scores.values_N.sum()).backward()
        gradients.append(gradient_of(policy))
    assert torch.equal(*gradients)
    assert not any(module.training for module in policy.modules())


# --- keeping, and pretrained models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["none", "shared", "separate"])
def test_a_saved_policy_comes_back(critic: Any, tmp_path: Path) -> None:
    policy = tiny_policy(critic)
    if critic != "none":
        awaken(policy)
    policy.save(tmp_path)
    loaded = load_policy(tmp_path)
    assert loaded.critic_kind == critic
    assert loaded.state_dict().keys() == policy.state_dict().keys()
    batch = a_batch(policy)
    first = policy.score(*batch, values=critic != "none")
    second = loaded.score(*batch, values=critic != "none")
    assert torch.equal(first.logprobs_N, second.logprobs_N)
    if first.values_N is not None and second.values_N is not None:
        assert torch.equal(first.values_N, second.values_N)


def test_a_saved_policy_may_be_computed_otherwise(tmp_path: Path) -> None:
    policy = tiny_policy("shared")
    policy.save(tmp_path)
    given = ModelConfig(dtype="bfloat16", gradient_checkpointing=True, detach_critic=True, logits_at_once=1000)
    loaded = load_policy(tmp_path, given)
    assert loaded.config == given.model_copy(update={"name": str(tmp_path), "tiny": policy.config.tiny})
    assert loaded.state_dict().keys() == policy.state_dict().keys()


QUESTION = [{"role": "user", "content": "Up"}]


def test_a_template_beside_the_model_counts_unless_another_is_given(tmp_path: Path) -> None:
    POLICY.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}?")
    given = ModelConfig(name=str(tmp_path), chat_template=str(tmp_path / "mine.jinja"))
    (tmp_path / "mine.jinja").unlink()  # a run that is resumed has its text
    saved = ModelConfig.model_validate(given.to_dict())
    for config, text in ((ModelConfig(name=str(tmp_path)), "Up!"), (saved, "Up?")):
        assert hf.load_tokenizer(config).apply_chat_template(QUESTION, tokenize=False) == text


def test_a_model_without_a_template_or_with_one_that_fails(tmp_path: Path) -> None:
    bare = copy.deepcopy(POLICY.tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model\.chat_template"):
        hf.load_tokenizer(ModelConfig(name=str(tmp_path)))
    for text, words in (("{{ messages[0] }", "line 1: TemplateSyntaxError"), ("{{ raise_exception('no') }}", "no")):
        with pytest.raises(ModelError, match=rf"model\.chat_template fails.*{words}"):
            hf.load_tokenizer(ModelConfig(name=str(tmp_path), chat_template=text))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tiny": {"hidden": 30, "heads": 4}}, "must be an even whole number"),
        ({"tiny": {"heads": 4, "key_value_heads": 3}}, "does not divide"),
        ({"lora": {"rank": 8}}, "is trained from scratch"),
        ({"name": "x/y", "attention": "flash_attention_2"}, "set model.dtype to bfloat16"),
        ({"name": ""}, "empty"),
        ({"name": "x/y", "chat_template": "no.jinja"}, "no.jinja cannot be read"),
        ({"chat_template": "{{ messages }}"}, "tiny has its own"),
        ({"size": 3}, "size"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    assert ModelConfig.model_validate("some/model").name == "some/model"  # a name is enough
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(values)


def test_a_model_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"cannot load model .*Hugging Face name"):
        build_policy(ModelConfig(name=str(tmp_path / "nothing")), texts=None, critic="none", seed=0)


def test_flash_attention_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    monkeypatch.setattr(hf.importlib.util, "find_spec", lambda name: None)
    config = ModelConfig(name=str(tmp_path), attention="flash_attention_2", dtype="bfloat16")
    with pytest.raises(ModelError, match="flash-attn"):
        build_policy(config, texts=None, critic="none", seed=0)


def test_a_tiny_model_needs_texts() -> None:
    with pytest.raises(ModelError, match="texts"):
        build_policy(ModelConfig(), texts=None, critic="none", seed=0)
    assert build_policy(ModelConfig(), texts=TEXTS, critic="none", seed=0).vocabulary < 400
