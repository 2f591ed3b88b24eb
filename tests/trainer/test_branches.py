"""Branches in the update: what is shared gets no gradient, and their loss is a mean of its own."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from starpod.trainer.algorithms.advantages import advantages_by_kind, compute_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import credit
from starpod.trainer.algorithms.terms import CreditTerm
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group, branches_of
from starpod.trainer.data.sample import samples_of
from starpod.trainer.rollout.config import PivotsConfig
from starpod.trainer.update import PolicyTrainer
from tests.trainer.tiny_learner import VERSION, built, learner_of, make_trainer, say, turn

DR_GRPO = {"preset": "dr-grpo", "loss": {"average": "token-mean"}, "correction": {"mode": "off"}}


def an_episode(member: int, replies: Sequence[list[int]], rewards: Sequence[float], *, group: int = 0) -> Episode:
    turns = [
        turn([40 + index, 41], reply, reward, fresh=index == 0)
        for index, (reply, reward) in enumerate(zip(replies, rewards, strict=True))
    ]
    for each in turns:
        each.parts = {"environment": each.reward}
    return Episode(group, member, "lake", turns=turns, end="terminal")


def branched(parent: Episode, at: int, member: int, replies: Sequence[list[int]], rewards: Sequence[float]) -> Episode:
    own = an_episode(member, replies, rewards, group=parent.group)
    for index, each in enumerate(own.turns):
        each.fresh = at + index == 0
    own.turns, own.parent = [*parent.turns[:at], *own.turns], (parent.member, at)
    return say_own(own)


def say_own(episode: Episode) -> Episode:
    """Add the policy's log-probabilities to its own turns. Those of other turns are never used."""
    told = copy.deepcopy(episode)
    told.parent = None
    say(built("none"), told)
    for mine, heard in zip(episode.own_turns, told.turns[episode.shared :], strict=True):
        mine.logprobs = heard.logprobs
    return episode


def gradient(trainer: PolicyTrainer) -> list[Tensor]:
    return [each.grad.clone() for each in trainer.policy.parameters() if each.grad is not None]


def learn(groups: Sequence[Group], weight: float = 1.0) -> tuple[dict[str, float], list[Tensor]]:
    trainer = make_trainer(AlgorithmConfig.model_validate(DR_GRPO))
    trainer.branches = PivotsConfig(weight=weight)
    trainer.config = trainer.config.model_copy(update={"max_grad_norm": 1e9})
    metrics = learner_of(trainer).learn(groups, version=VERSION)
    return metrics, gradient(trainer)


def main_group(size: float = 0.3) -> Group:
    """Six tokens whose advantages add up to 4 size."""
    long, short = an_episode(0, [[1, 2], [3, 4, 5]], [0, 2 * size]), an_episode(1, [[6]], [0])
    return Group(0, [say(built("none"), long), say(built("none"), short)])


def with_branches(group: Group, size: float = 0.5) -> Group:
    """Ten tokens, whose advantages add up to 6 size, beside the group."""
    parent = group.episodes[0]
    pairs = [(2, [[7] * 8], 2 * size), (3, [[8, 9]], 0.0)]
    branches = [branched(parent, 1, member, replies, [reward]) for member, replies, reward in pairs]
    return Group(0, group.episodes, branches=branches)


def test_golden_streams() -> None:
    """Main 6 tokens that sum to -1.2, branches 10 that sum to -3: -0.35 at weight 0.5, not the pooled -0.2625."""
    metrics, found = learn([with_branches(main_group())], weight=0.5)
    assert metrics["update/loss"] == pytest.approx(-0.2, abs=1e-6)
    assert metrics["update/branch_loss"] == pytest.approx(0.5 * -0.3, abs=1e-6)
    metrics, main = learn([main_group()])
    assert "update/branch_loss" not in metrics
    _, branches = learn([Group(0, [], branches=with_branches(main_group()).branches)], weight=0.5)
    for both, one, other in zip(found, main, branches, strict=True):
        torch.testing.assert_close(both, one + other, rtol=1e-4, atol=1e-7)
    assert any(bool(other.abs().max() > 1e-4) for other in branches)


def test_weights_of_turns_multiply_their_loss_and_no_ratio() -> None:
    """Exactly: a half is a power of two. Turns of weight 1 have the gradient that they had."""
    plain, halved, first = (with_branches(main_group()) for _ in range(3))
    for episode in (*halved.episodes, *halved.branches):
        for each in episode.turns:
            each.weight = 0.5
    (before, whole), (after, half) = learn([plain]), learn([halved])
    assert all(torch.equal(0.5 * one, other) for one, other in zip(whole, half, strict=True))
    assert after["policy/ratio_max"] == before["policy/ratio_max"]
    assert after["update/loss"] == pytest.approx(0.5 * before["update/loss"])
    first.episodes[0].turns[0].weight = 0.0
    metrics, _ = learn([first])
    # Of six tokens two, with an advantage of 0.3 each, are left out.
    assert metrics["update/loss"] == pytest.approx(before["update/loss"] + 2 * 0.3 / 6, abs=1e-6)
    assert metrics["update/branch_loss"] == before["update/branch_loss"]


def test_the_gradient_of_what_is_shared_is_exactly_zero() -> None:
    """The shared replies are trained as little as if the environment had said them."""
    parent = main_group().episodes[0]
    pairs = [(2, [[7, 8, 9]], 1.0), (3, [[8, 9]], 0.0)]
    branches = [branched(parent, 1, member, replies, [reward]) for member, replies, reward in pairs]
    first = parent.turns[0]
    for branch in branches:
        (sample,) = samples_of(branch)
        assert sum(sample.sampled) == branch.sampled_tokens == len(branch.turns[1].reply)
    told = [copy.deepcopy(branch) for branch in branches]
    for branch in told:
        own = branch.own_turns[0]
        own.prompt, own.fresh = [*first.prompt, *first.reply, *own.prompt], True
        branch.turns, branch.parent = [own], None
    (_, with_parent), (_, without) = learn([Group(0, branches)]), learn([Group(0, told)])
    assert all(torch.equal(one, other) for one, other in zip(with_parent, without, strict=True))
    # And changing what the engine said about them changes nothing.
    first.logprobs = [logprob - 1 for logprob in first.logprobs]
    first.versions = [VERSION] * len(first.reply)
    _, again = learn([Group(0, branches)])
    assert all(torch.equal(one, other) for one, other in zip(with_parent, again, strict=True))


def test_what_was_earned_before_a_branch_is_part_of_its_return() -> None:
    parent = an_episode(0, [[1, 2], [3]], [0.75, 0.0])
    branch = branched(parent, 1, 1, [[4, 5]], [0.5])
    trainer = make_trainer(AlgorithmConfig.model_validate(DR_GRPO))
    rollout = trainer.tabulate(Batch([say(built("none"), parent), branch]))
    assert rollout.inherited_B().tolist() == [0.0, 0.75]
    assert rollout.turns_BT.tolist() == [[0, 0, 1], [1, 1, -1]]
    (first, *_), (second, *_) = credit((CreditTerm(),), rollout, rollout.rewards_BT).tolist()
    assert (first, second) == (-0.25, 0.25)
    own = credit((CreditTerm(unit="turn", score="reward", baseline="none"),), rollout, rollout.rewards_BT)
    assert own.tolist() == [[0.75, 0.75, 0.0], [0.5, 0.5, 0.0]]


def test_the_kl_penalty_of_shared_turns_is_part_of_a_branchs_return() -> None:
    root = an_episode(0, [[1] * 5, [2] * 5], [0.0, 1.0])
    branch = branched(root, 1, 1, [[3] * 5], [1.0])
    again = branched(branch, 1, 2, [[4] * 5], [1.0])
    kl = {"where": "reward", "estimator": "k1", "coefficient": 0.001}
    trainer = make_trainer(AlgorithmConfig.model_validate({**DR_GRPO, "kl": kl}))
    rollout = trainer.tabulate(Batch([say(built("none"), root), branch, again]))
    rollout = replace(rollout, ref_logprobs_BT=rollout.old_logprobs_BT - 0.1)
    assert rollout.ancestors_B(torch.ones_like(rollout.rewards_BT)).tolist() == [0.0, 5.0, 5.0]
    # Ten tokens of 0.1 nats each, in every episode.
    assert compute_advantages(trainer.algorithm, rollout).advantages_BT.abs().max() < 1e-6


def test_golden_siblings() -> None:
    """Returns of 1, 0, 0, 0, 0, 0, 0, 1 after one state; those after another one are not in their mean."""
    parent = main_group().episodes[0]
    returns = [1.0, 0, 0, 0, 0, 0, 0, 1.0]
    siblings = [branched(parent, 1, 2 + index, [[7]], [reward]) for index, reward in enumerate(returns)]
    others = [branched(parent, 2, 20 + index, [[8]], [reward]) for index, reward in enumerate((5.0, 7.0))]
    alike = [branched(parent, 0, 30 + index, [[9]], [2.0]) for index in range(2)]
    kept = branches_of([Group(0, [parent], branches=[*siblings, *others, *alike])])
    assert [id(each) for each in kept] == [id(each) for each in (*siblings, *others)]
    trainer = make_trainer(AlgorithmConfig.model_validate(DR_GRPO))
    main = main_group().episodes
    table = trainer.tabulate(Batch([*main, *kept]), branches=len(kept))

    def advantages(scale: Literal["none", "std"]) -> list[float]:
        found: list[float] = advantages_by_kind(trainer.algorithm, table, scale).advantages_BT[len(main) :, 0].tolist()
        return found

    assert advantages("none") == [0.75, *[-0.25] * 6, 0.75, -1.0, 1.0]
    scaled = [1.620182, *[-0.540061] * 6, 1.620182, -0.707106, 0.707106]
    assert advantages("std") == pytest.approx(scaled, abs=1e-6)


def test_golden_gains() -> None:
    """Values 0.25, 0.5, 0.75 and a reward of 1 at the end: each turn gains 0.25, and together they gain 0.75."""
    episode = an_episode(0, [[1], [2, 3], [4]], [0, 0, 1.0])
    for each, value in zip(episode.turns, (0.25, 0.5, 0.75), strict=True):
        each.value = value
    trainer = make_trainer(AlgorithmConfig.model_validate({**DR_GRPO, "advantage": "vineppo"}))
    rollout = trainer.tabulate(Batch([say(built("none"), episode)]))
    terms = trainer.algorithm.credit_terms
    assert credit(terms, rollout, rollout.rewards_BT).tolist() == [[0.25] * 4]
    episode.turns[1].value = None
    with pytest.raises(ValueError, match="needs the value of every state"):
        credit(terms, trainer.tabulate(Batch([episode])), rollout.rewards_BT)


def test_trees_are_compared_within_and_with_each_other() -> None:
    roots = [an_episode(member, [[1], [2]], [0, reward]) for member, reward in ((0, 1.0), (1, 0.0))]
    low, high = branched(roots[0], 1, 2, [[3]], [0.0]), branched(roots[1], 1, 3, [[4]], [0.0])
    again = branched(low, 1, 4, [[5]], [0.0])
    again.parent = (2, 1)
    trainer = make_trainer(AlgorithmConfig.model_validate({**DR_GRPO, "advantage": "tree_grpo"}))
    rollout = trainer.tabulate(Batch([*(say(built("none"), root) for root in roots), low, high, again]))
    found = credit(trainer.algorithm.credit_terms, rollout, rollout.rewards_BT)[:, 0]
    between = torch.tensor([0.8, -0.2, -0.2, -0.2, -0.2]) / 0.447214
    within = torch.tensor([2 / 3, 0, -1 / 3, 0, -1 / 3]) / 0.577350
    torch.testing.assert_close(found, (between + within).double(), rtol=1e-4, atol=1e-5)
