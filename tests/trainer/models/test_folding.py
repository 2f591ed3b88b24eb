"""Rows that are read together get the states that they get apart."""

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from starpod.trainer.models import attention, folding
from starpod.trainer.models.folding import lay_out, lay_out_plainly
from starpod.trainer.models.policy import CriticKind, Policy
from starpod.trainer.models.trunk import layer_kinds, trunk_of, unwrapped
from tests.trainer.engines.architectures import make
from tests.trainer.models.tiny_policy import tiny_policy
from tests.trainer.tiny_learner import gradient_of

POLICY = tiny_policy()


def group_rows(seed: int, groups: int, members: int, prompt: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded rows in random order, their lengths, and where they are sampled: members share a prompt."""
    rng = random.Random(seed)
    system = [rng.randrange(1, 300) for _ in range(prompt // 3)]
    rows = []
    for _ in range(groups):
        start = [*system, *(rng.randrange(1, 300) for _ in range(prompt - len(system)))]
        rows += [[*start, *(rng.randrange(1, 4) for _ in range(rng.randint(1, 6)))] for _ in range(members)]
    rng.shuffle(rows)
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    places = torch.arange(tokens.shape[1])
    return tokens, lengths, (places >= prompt) & (places < lengths[:, None])


WITH_WINDOWS = [make("mistral"), make("gemma3_text")]


@given(
    st.sampled_from([POLICY, *WITH_WINDOWS]),
    st.integers(0, 1000),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(6, 40),
)
def test_states_are_those_of_the_plain_forward(
    policy: Policy, seed: int, groups: int, members: int, prompt: int
) -> None:
    assert policy.folds
    tokens, lengths, _ = group_rows(seed, groups, members, prompt)
    layout = lay_out(tokens, lengths, width=1_000_000, shortest=1)
    read = torch.arange(tokens.shape[1]) < lengths[:, None]
    trunk = trunk_of(policy.model)
    with torch.no_grad():
        folded = layout.read(trunk)[layout.places_BT][read]
        apart = lay_out_plainly(tokens).read(trunk)[lay_out_plainly(tokens).places_BT][read]
    torch.testing.assert_close(folded, apart, atol=2e-5, rtol=1e-4)
    assert torch.equal(layout.tokens_GL.flatten()[layout.places_BT][read], tokens[read])


@pytest.mark.parametrize("policy", [POLICY, *WITH_WINDOWS])
def test_blocks_of_queries_read_only_the_keys_that_they_see(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, lengths, _ = group_rows(1, 4, 3, 240)
    layout = lay_out(tokens, lengths, width=1_000_000)
    assert layout.tokens_GL.shape[1] >= 512
    keys_read: list[int] = []

    def count_keys(module: nn.Module, query: Tensor, key: Tensor, *tensors: Tensor, **kwargs: Any) -> Any:
        keys_read.append(query.shape[2] * key.shape[2])
        return sdpa_attention_forward(module, query, key, *tensors, **kwargs)

    states = []
    for name in (attention.SDPA, attention.BLOCKS):
        model = copy.deepcopy(policy.model)
        unwrapped(model).config.get_text_config()._attn_implementation = name
        monkeypatch.setattr(attention, "sdpa_attention_forward", count_keys)
        states.append(layout.read(trunk_of(model)))
        states[-1].square().mean().backward()
        states.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    torch.testing.assert_close(states[2], states[0], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(states[3], states[1], atol=2e-5, rtol=1e-4)
    layers = len(layer_kinds(unwrapped(policy.model).config))
    assert 0 < sum(keys_read) < 0.6 * layers * layout.tokens_GL.shape[1] ** 2


def test_whatever_rows_begin_with_is_read_once() -> None:
    """Instructions by all groups, a prompt by its group, and what replies have in common."""
    tokens, lengths, _ = group_rows(1, 3, 8, 240)
    layout = lay_out(tokens, lengths, width=1_000_000)
    rows = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    beginnings = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert layout.tokens_GL.shape == (1, len(beginnings))
    alike = lay_out(torch.arange(1, 101).repeat(40, 1), torch.full((40,), 100), width=64)
    assert alike.tokens_GL.shape == (1, 100)


@pytest.mark.parametrize(("groups", "members", "prompt"), [(8, 1, 40), (3, 8, 30)])
def test_what_does_not_pay_is_left_as_it_is(groups: int, members: int, prompt: int) -> None:
    """Other prompts, and short ones: the same bits as ever."""
    tokens, lengths, _ = group_rows(1, groups, members, prompt)
    layout = lay_out(tokens, lengths, width=64)
    assert layout.tokens_GL is tokens and layout.mask_G1LL is None and layout.positions_GL is None


def test_long_branches_are_not_read_together() -> None:
    """Attention over all of them would cost more than the beginning does."""
    rng = random.Random(0)
    tokens = torch.tensor([[1] * 100 + [rng.randrange(300) for _ in range(900)] for _ in range(8)])
    assert lay_out(tokens, torch.full((8,), 1000), width=64).mask_G1LL is None


def test_many_rows_of_one_beginning_are_read_in_parts_of_about_the_length_that_costs_least() -> None:
    """Attention is quadratic in the length of a fold: reading the beginning again is soon the smaller work."""
    rng = random.Random(0)
    shared, own, rows, width = 120, 8, 150, POLICY.width
    beginning = [rng.randrange(1, 300) for _ in range(shared)]
    tokens = torch.tensor([[*beginning, *(rng.randrange(1, 300) for _ in range(own))] for _ in range(rows)])
    layout = lay_out(tokens, torch.full((rows,), shared + own), width=width)

    def work(parts: int, length: float) -> float:
        """Return the work of a layer whose attention takes three times as long as its products."""
        return parts * length * (6 * width + 3 * length)

    best = min(work(parts, shared + own * rows / parts) for parts in range(1, rows))
    assert work(*layout.tokens_GL.shape) < 1.1 * best < work(1, shared + own * rows) / 2
    with torch.no_grad():
        states = [each.read(trunk_of(POLICY.model))[each.places_BT] for each in (layout, lay_out_plainly(tokens))]
    torch.testing.assert_close(*states, atol=2e-5, rtol=1e-4)


def test_long_folds_are_cut_between_groups() -> None:
    """There the least has to be read again."""
    tokens, lengths, _ = group_rows(3, 4, 8, 240)
    layout = lay_out(tokens, lengths, width=500)
    assert layout.tokens_GL.shape[0] == 2
    groups = [row[:240].tolist() for row in layout.tokens_GL]
    assert all(sum(row[:240].tolist() == group for row in tokens) == 8 for group in groups)
    assert layout.tokens_GL.shape[1] < 80 + 2 * 160 + 16 * 6


@pytest.mark.parametrize(
    ("critic", "checkpointing"), [("none", False), ("shared", False), ("separate", False), ("separate", True)]
)
def test_scores_and_gradients_are_those_of_rows_apart(
    critic: CriticKind, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tiny_policy(critic, gradient_checkpointing=checkpointing)
    if built.critic is not None:
        torch.nn.init.normal_(built.critic.head.weight)
    tokens, lengths, sampled = group_rows(2, 3, 6, 80)
    read: list[int] = []
    original = folding.hidden_states

    def count(trunk: torch.nn.Module, tokens_BL: torch.Tensor, *more: torch.Tensor | None) -> torch.Tensor:
        read.append(tokens_BL.numel())
        return original(trunk, tokens_BL, *more)

    monkeypatch.setattr(folding, "hidden_states", count)

    def results(each: Policy) -> list[torch.Tensor]:
        each.zero_grad()
        scores = each.score(tokens, lengths, sampled, temperature=0.7, entropy=True, values=critic != "none")
        assert scores.entropy_N is not None
        told = [scores.logprobs_N, scores.entropy_N, *([] if scores.values_N is None else [scores.values_N])]
        weights = torch.linspace(-1, 1, len(scores.logprobs_N))
        sum((weights * one).sum() for one in told).backward()  # type: ignore[union-attr]
        return [*(one.detach() for one in told), gradient_of(each)]

    folded = results(built)
    apart_policy = copy.deepcopy(built)
    apart_policy.folds = False
    before = len(read)
    apart = results(apart_policy)
    assert sum(read[:before]) < sum(read[before:]) / 4
    for one, other in zip(folded, apart, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-3)


def test_a_model_that_takes_no_masks_is_read_row_by_row() -> None:
    assert not tiny_policy(attention="eager").folds
    assert not make("qwen3_next").folds
