"""Episodes as tensors: nothing sampled is lost, moved or doubled, however the batch is cut."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.sample import samples_of
from tests.trainer.models.tiny_policy import tiny_policy
from tests.trainer.turns import a_turn

ids = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@st.composite
def turns(draw: st.DrawFn, *, first: bool) -> Turn:
    reply = draw(ids)
    return a_turn(
        reply,
        prompt=draw(ids),
        fresh=first or draw(st.booleans()),
        logprobs=[-float(token) for token in reply],
        reward=draw(st.sampled_from([0.0, 0.5, -0.1, 1.0])),
    )


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    rest = draw(st.lists(turns(first=False), max_size=4))
    return Episode(group=0, member=0, environment="lake", turns=[draw(turns(first=True)), *rest])


batches = st.lists(episodes(), min_size=1, max_size=5)


@given(batches, st.integers(1, 60))
def test_any_cut_into_micro_batches_gives_every_token_once_in_order_and_its_reward(
    batch_of: list[Episode], budget: int
) -> None:
    batch = Batch(batch_of)
    rewards_BT, turns_BT, logprobs_BT = batch.rewards_BT(), batch.turns_BT(), batch.sampler_logprobs_BT()
    for index, episode in enumerate(batch_of):
        sampled = [token for turn in episode.turns for token in turn.reply]
        assert batch.mask_BT[index].sum() == len(sampled)
        assert logprobs_BT[index, : len(sampled)].tolist() == [-float(token) for token in sampled]
        assert sampled == [t for s in samples_of(episode) for t, m in zip(s.tokens, s.sampled, strict=True) if m]
        # Rewards stand on the last sampled token of their turn.
        turns, rewards = [], []
        for number, turn in enumerate(episode.turns):
            turns += [number] * len(turn.reply)
            rewards += [0.0] * (len(turn.reply) - 1) + [turn.reward]
        assert turns_BT[index, : len(sampled)].tolist() == turns
        assert rewards_BT[index, : len(sampled)].tolist() == pytest.approx(rewards)
    assert turns_BT[~batch.mask_BT].eq(-1).all() and not rewards_BT[~batch.mask_BT].any()
    rebuilt, seen = (torch.zeros(batch.mask_BT.shape, dtype=torch.int64) for _ in range(2))
    for indices in batch.micro_batches(range(len(batch)), budget):
        block = batch.block(indices)
        assert block.tokens_SL.numel() <= budget or len(indices) == 1
        # What a model would give: here, the sampled ids themselves.
        rebuilt[block.rows] += block.in_rows(block.tokens_SL[block.sampled_SL])
        seen[block.rows] += block.inside_RT
    assert torch.equal(seen.bool(), batch.mask_BT) and seen.max() == 1
    assert torch.equal(rebuilt.float(), -logprobs_BT)


def test_members_of_a_group_stand_together() -> None:
    """Adjacent members share the computation of their common prompt."""
    lengths = [70, 71, 75, 74, 72, 73, 200, 9]
    batch = Batch([Episode(n % 2, n, "lake", turns=[a_turn([1] * length)]) for n, length in enumerate(lengths)])
    prompt = len(batch.samples[0][0].tokens) - 70
    assert batch.micro_batches(range(8), 10_000) == [[*range(8)]]
    blocks = batch.micro_batches(range(8), 3 * (75 + prompt))
    assert blocks == [[6], [0, 2, 4], [1, 3, 5], [7]]


def test_a_budget_counts_what_the_policy_reads() -> None:
    """A group fits if its common prompt is counted once, and is not split because of padding."""
    policy, prompt = tiny_policy(), [*range(100)]
    episodes = [Episode(n // 8, n, "lake", turns=[a_turn([n, 1], prompt=[n // 8, *prompt])]) for n in range(16)]
    batch = Batch(episodes)
    group = 101 + 8 * 2
    assert policy.tokens_read([sample.tokens for row in batch.samples[:8] for sample in row]) == group
    assert batch.micro_batches(range(16), group, policy.tokens_read) == [[*range(8)], [*range(8, 16)]]
    assert len(batch.micro_batches(range(16), group)) == 16


def test_a_large_budget_asks_the_policy_a_few_times() -> None:
    """Counting what the policy reads of a block takes longer for a larger block."""
    batch = Batch([Episode(0, n, "lake", turns=[a_turn([n, 1], prompt=[*range(100)])]) for n in range(512)])
    asked: list[int] = []

    def tokens_read(samples: Sequence[list[int]]) -> int:
        asked.append(len(samples))
        return 100 + 2 * len(samples)

    blocks = batch.micro_batches(range(512), 500, tokens_read)
    assert [len(block) for block in blocks] == [200, 200, 112]
    assert len(asked) < 3 * 2 * 8


def test_gradients_flow_back_to_their_tokens() -> None:
    batch = Batch([Episode(0, 0, "lake", turns=[a_turn([1, 2])]), Episode(0, 1, "lake", turns=[a_turn([3])])])
    flat = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    weights = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    (batch.block([0, 1]).in_rows(flat) * weights).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [10.0, 20.0, 30.0]


def test_an_episode_without_a_sampled_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no sampled token"):
        Batch([Episode(0, 0, "lake")])
