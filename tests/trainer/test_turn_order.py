"""Updates turn by turn: SeeUPO's advantages and carry, and a step for each turn on exactly its tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import group_statistics
from starpod.trainer.data.batch import Advantages, Batch, RolloutBatch
from starpod.trainer.data.group import Group
from starpod.trainer.data.sample import samples_of
from starpod.trainer.data.updates import token_records
from starpod.trainer.turn_order import next_carry, normalise_turn, turn_as_episode, turn_steps
from starpod.trainer.update import PolicyTrainer
from tests.trainer.tiny_learner import VERSION, built, group_of, learner_of, make_trainer, scored_table


def centred(*groups: list[float]) -> torch.Tensor:
    values = torch.tensor([value for group in groups for value in group], dtype=torch.float64)
    return group_statistics(values, torch.tensor([g for g, group in enumerate(groups) for _ in group])).deviation_n


def test_advantages_are_normalised_over_all_rows_and_not_by_the_group() -> None:
    found = normalise_turn(centred([1, 0], [1, 1]))
    assert found.tolist() == pytest.approx([1.224745, -1.224745, 0, 0], abs=1e-6)
    alike = [[1.0] * 8] * 3
    found = normalise_turn(centred([1.0] + [0.0] * 7, *alike))
    assert found[:2].tolist() == pytest.approx([3, -0.744024], abs=1e-6)
    assert normalise_turn(centred([1, 1], [0, 0])).tolist() == [0, 0, 0, 0]


def test_the_carry_follows_what_each_turn_moved() -> None:
    carry = next_carry(torch.ones(4), torch.tensor([0.1, -0.3, 0.0, 0.05]))
    assert carry.tolist() == pytest.approx([1.105171, 0.8, 1, 1.051271], abs=1e-6)
    advantages = normalise_turn(centred([1, 0], [1, 1])) * carry
    assert advantages.tolist() == pytest.approx([1.353553, -0.979796, 0, 0], abs=1e-6)
    twice = next_carry(next_carry(torch.ones(1), torch.tensor([0.1])), torch.tensor([0.15]))
    assert twice.item() == pytest.approx(1.2)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=12), st.lists(st.floats(-5, 5), min_size=1, max_size=12))
def test_nothing_leaves_its_bounds(values: list[float], moves: list[float]) -> None:
    found = normalise_turn(torch.tensor(values, dtype=torch.float64))
    assert bool((found.abs() <= 3).all())
    carry = torch.ones(1)
    for move in moves:
        carry = next_carry(carry, torch.tensor([move]))
        assert 0.8 - 1e-6 <= carry.item() <= 1.2 + 1e-6


def turnwise(order: str = "reverse_turns") -> PolicyTrainer:
    config = AlgorithmConfig(preset="seeupo", order=order, kl={"where": "off"})  # type: ignore[arg-type]
    return make_trainer(config, lr=1e-2)


def groups_of(turns: int = 3) -> list[Group]:
    return [group_of(built("none"), n, rewards, turns=turns) for n, rewards in enumerate([(1.0, 0.0), (1.0, 0.2)])]


def test_a_turn_alone_has_its_whole_past_as_its_prompt() -> None:
    for group in groups_of():
        for episode in group.episodes:
            whole = [(sample.tokens, sample.sampled) for sample in samples_of(episode)]
            for number, turn in enumerate(episode.turns):
                alone = turn_as_episode(episode, number)
                (sample,) = samples_of(alone)
                assert sum(sample.sampled) == len(turn.reply) and sample.sampled[-len(turn.reply) :] == [True] * len(
                    turn.reply
                )
                assert any(tokens[: len(sample.tokens)] == sample.tokens for tokens, _ in whole)
                assert alone.total_reward == episode.total_reward
                assert (alone.group, alone.member) == (episode.group, episode.member)


def test_with_one_turn_it_is_gspo_on_normalised_advantages() -> None:
    groups = groups_of(turns=1)
    trainer, other = turnwise(), turnwise()
    learner_of(trainer).learn(groups, version=VERSION)
    batch, table = scored_table(other, [episode for group in groups for episode in group.episodes])
    advantages_B = normalise_turn(centred(*(group.returns for group in groups)))
    advantages_BT = torch.where(batch.mask_BT, advantages_B.unsqueeze(1), 0.0).float()
    other.optimizer.zero_grad()
    table.advantages = Advantages(advantages_BT, None, batch.mask_BT)
    other.accumulate(batch, table, range(len(batch)))
    other._step()
    for one, two in zip(trainer.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("order", ["reverse_turns", "forward_turns"])
def test_each_turn_has_a_step_in_its_order_with_the_carry_of_those_before(order: str) -> None:
    trainer, groups = turnwise(order), groups_of()
    del groups[0].episodes[0].turns[1:]  # a short episode is in no later turn's statistics
    seen: list[dict[tuple[int, int], float]] = []
    carry: dict[tuple[int, int], float] = {}
    take_step = trainer.take_step

    def followed(batch: Batch, table: RolloutBatch, rows: Sequence[int], **options: Any) -> dict[str, float]:
        assert list(rows) == list(range(len(batch))) and table.advantages is not None
        places = [(episode.group, episode.member) for episode in batch.episodes]
        carry_B = torch.tensor([carry.get(place, 1.0) for place in places])
        first_B = table.advantages.advantages_BT[:, 0]
        seen.append(dict(zip(places, first_B.tolist(), strict=True)))
        # Without the carry, the advantages of a step have the mean 0.
        assert first_B.abs().max() > 0.5 and (first_B / carry_B).mean().item() == pytest.approx(0, abs=1e-6)
        metrics = take_step(batch, table, rows, **options)
        moved_B = (trainer.logprobs(batch) - table.old_logprobs_BT).sum(1) / batch.mask_BT.sum(1)
        carry_means.append(carry_B.mean().item())
        carry.update(zip(places, next_carry(carry_B, moved_B).tolist(), strict=True))
        assert carry[1, 0] > 1 > carry[1, 1]
        return metrics

    carry_means: list[float] = []
    trainer.take_step = followed  # type: ignore[method-assign]
    whole = Batch([episode for group in groups for episode in group.episodes])
    table = trainer.tabulate(whole)
    steps = list(turn_steps(trainer, whole, table, version=VERSION, scale=1.0))
    for (_, metrics), carry_mean in zip(steps, carry_means, strict=True):
        assert metrics["update/turns"] == 3
        assert metrics["update/carry_mean"] == pytest.approx(carry_mean)
    assert [len(each) for each in seen] == ([3, 3, 4] if order == "reverse_turns" else [4, 3, 3])
    # What is recorded of each token is of the step that its turn had.
    for episode, tokens in token_records(table):
        own = [step[episode.group, episode.member] for step in seen if (episode.group, episode.member) in step]
        own = own[::-1] if order == "reverse_turns" else own
        expected = [value for value, turn in zip(own, episode.turns, strict=True) for _ in turn.reply]
        assert tokens.advantages.tolist() == pytest.approx(expected, abs=2e-3)


def test_a_turn_of_one_episode_is_passed_over() -> None:
    groups = groups_of()
    for group in groups:
        for episode in group.episodes[group.id :]:
            del episode.turns[1:]
    del groups[0].episodes[1].turns[1:]
    assert learner_of(turnwise()).learn(groups, version=VERSION)["update/turns"] == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"advantage": "gae"}, "set it to dr_grpo"),
        ({"advantage": "gigpo"}, "set it to dr_grpo"),
        ({"advantage": "reinforce_plus_plus_baseline"}, "normalises its advantages itself"),
        ({"epochs": 2}, "set algorithm.epochs to 1"),
        ({"kl": {"where": "reward"}}, "set algorithm.kl.where to loss or off"),
        ({"loss": {"kind": "ppo", "clip_decay": 0.9}}, "without bounds by turn"),
    ],
)
def test_what_does_not_go_with_turns_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmConfig.model_validate({"preset": "seeupo", **values})
