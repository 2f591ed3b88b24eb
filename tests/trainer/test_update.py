"""One update: the same however the batch is cut, in the right direction, and from nothing but what may teach."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starpod.trainer.algorithms.advantages import compute_advantages
from starpod.trainer.algorithms.config import PRESETS, AlgorithmConfig
from starpod.trainer.algorithms.filters import filter_groups
from starpod.trainer.batch import Batch
from starpod.trainer.episode import Episode, Group, Turn
from starpod.trainer.models.config import ModelConfig, TinyConfig
from starpod.trainer.models.policy import Policy, build_policy
from starpod.trainer.parallel import Parallel
from starpod.trainer.update import Learner, LogprobGap, OptimizerConfig

VERSION = 3
IDS = 256
"""Every tokenizer has the bytes."""


@functools.cache
def _built(critic: str) -> Policy:
    shape = TinyConfig(hidden=16, layers=1, heads=2, key_value_heads=1, intermediate=24, vocabulary=335)
    return build_policy(
        ModelConfig(tiny=shape),
        texts=["Left || Right"],
        critic=critic,  # type: ignore[arg-type]
        seed=0,
    )


def learner(algorithm: AlgorithmConfig, *, lr: float = 1e-3, budget: int = 8192, opinion: bool = False) -> Learner:
    """opinion: whether the critic, if there is one, has any; a new one says 0."""
    policy = copy.deepcopy(_built("shared" if algorithm.needs_critic else "none"))
    with torch.no_grad():
        for parameter in policy.critic_parameters() if opinion else ():
            parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
    return Learner(
        policy,
        algorithm,
        OptimizerConfig(lr=lr, critic_lr=lr, micro_batch_tokens=budget),
        Parallel(),
        max_length=64,
        reference=copy.deepcopy(_built("none")) if algorithm.needs_reference else None,
    )


def say(policy: Policy, episode: Episode) -> Episode:
    """The episode with the log-probabilities that this policy gives its replies."""
    batch = Batch([episode])
    packed = batch.pack([0])
    with torch.no_grad():
        told = policy.score(packed.tokens_SL, packed.lengths_S, packed.sampled_SL).logprobs_N.tolist()
    for turn in episode.turns:
        turn.logprobs, told = told[: len(turn.reply)], told[len(turn.reply) :]
    return episode


def turn(prompt: list[int], reply: list[int], reward: float, *, fresh: bool, key: bytes = b"s") -> Turn:
    return Turn(
        "",
        prompt,
        fresh,
        reply,
        [0.0] * len(reply),
        [VERSION] * len(reply),
        "stop",
        "",
        reward=reward,
        state_key=key,
    )


def group_of(policy: Policy, number: int, rewards: tuple[float, ...], *, turns: int = 2) -> Group:
    """Members that share their prompts and reply differently, each rewarded at the end."""
    generator = torch.Generator().manual_seed(number)

    def ids(count: int) -> list[int]:
        drawn: list[int] = torch.randint(0, IDS, (count,), generator=generator).tolist()
        return drawn

    prompts = [ids(3 + place) for place in range(turns)]
    episodes = []
    for member, reward in enumerate(rewards):
        own = [
            turn(
                prompt,
                ids(1 + (number + member + place) % 4),
                reward if place == turns - 1 else 0.0,
                fresh=place == 0 or number % 2 == 1,
                key=str((number, place)).encode(),
            )
            for place, prompt in enumerate(prompts)
        ]
        episodes.append(say(policy, Episode(number, member, "lake", turns=own, end="terminal")))
    return Group(number, episodes)


def gradient(of: Learner, groups: list[Group]) -> tuple[Tensor, dict[str, float]]:
    """Of one optimiser step over all of the groups, and the metrics."""
    batch = Batch([episode for group in groups for episode in group.episodes])
    rollout, _ = of.prepare(batch, VERSION)
    of.optimizer.zero_grad()
    metrics = of.accumulate(batch, rollout, compute_advantages(of.algorithm, rollout), range(len(batch)), 1.0)
    parts = [p.grad.flatten() for p in of.policy.parameters() if p.grad is not None]
    return torch.cat(parts), metrics


def chance(policy: Policy, episode: Episode) -> float:
    """The log-probability of an episode's replies."""
    probe = copy.deepcopy(episode)
    return sum(p for own in say(policy, probe).turns for p in own.logprobs)


# --- the cut ----------------------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 120),
    st.sampled_from(["starpo-ppo", "starpo-grpo", "dr-grpo", "gigpo"]),
    st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]),
)
def test_no_cut_into_micro_batches_changes_gradient_or_metrics(budget: int, preset: str, average: str) -> None:
    algorithm = AlgorithmConfig(preset=preset, loss_average=average)  # type: ignore[arg-type]
    whole, cut = learner(algorithm, opinion=True), learner(algorithm, budget=budget, opinion=True)
    groups = [
        group_of(whole.policy, number, rewards) for number, rewards in enumerate([(1.0, 0.0, 0.5), (0.0, 1.0, 0.2)])
    ]
    expected, metrics = gradient(whole, groups)
    found, again = gradient(cut, groups)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    assert again.keys() == metrics.keys()
    assert again == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in metrics.items()}


# --- the samplers' log-probabilities ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0.5, -0.5, math.nan])
def test_falsified_logprobs_of_the_present_version_stop_the_run(wrong: float) -> None:
    of = learner(AlgorithmConfig(preset="starpo-grpo"))
    group = group_of(of.policy, 0, (1.0, 0.0))
    before = copy.deepcopy(of.policy.state_dict())
    group.episodes[1].turns[0].logprobs[-1] += wrong
    with pytest.raises(LogprobGap):
        of.learn([group], version=VERSION)
    assert all(torch.equal(tensor, before[name]) for name, tensor in of.policy.state_dict().items())


def test_logprobs_of_another_version_may_differ() -> None:
    of = learner(AlgorithmConfig(preset="starpo-grpo"))
    group = group_of(of.policy, 0, (1.0, 0.0))
    group.episodes[1].turns[0].logprobs[-1] += 0.5
    assert "policy/logprob_gap_max" not in of.learn([group], version=VERSION + 1)


# --- the direction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_makes_the_better_reply_likelier(preset: str) -> None:
    of = learner(AlgorithmConfig(preset=preset, minibatches=1), lr=3e-4)
    groups = [group_of(of.policy, number, (1.0, 0.0)) for number in range(3)]
    before = [[chance(of.policy, episode) for episode in group.episodes] for group in groups]
    metrics = of.learn(groups, version=VERSION)
    assert metrics["policy/logprob_gap_max"] < 1e-5
    assert all(math.isfinite(value) for value in metrics.values())
    for group, (better, worse) in zip(groups, before, strict=True):
        gained = chance(of.policy, group.episodes[0]) - better
        lost = chance(of.policy, group.episodes[1]) - worse
        assert gained > lost
    assert sum(chance(of.policy, group.episodes[0]) - better for group, (better, _) in zip(groups, before)) > 0


# --- what has no influence --------------------------------------------------------------------------------------------


def weights(of: Learner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in of.policy.parameters()]


def test_failed_episodes_have_no_influence() -> None:
    one, other = (learner(AlgorithmConfig(preset="starpo-s")) for _ in range(2))
    group = group_of(one.policy, 0, (1.0, 0.0, 0.0))
    lost = dataclasses.replace(copy.deepcopy(group.episodes[0]), member=3, end="failed")
    lost.turns[-1].reward = 100.0
    assert one.learn([group], version=VERSION) == other.learn(
        [Group(0, copy.deepcopy(group.episodes), [lost])], version=VERSION
    )
    assert all(map(torch.equal, weights(one), weights(other)))


def test_groups_that_the_filter_drops_have_no_influence() -> None:
    algorithm = AlgorithmConfig.model_validate({"preset": "starpo-s", "filter": {"value": 0.5}})
    one, other = (learner(algorithm) for _ in range(2))
    telling, alike = group_of(one.policy, 0, (1.0, 0.0)), group_of(one.policy, 1, (1.0, 1.0))
    kept = filter_groups(algorithm.filter, [alike, telling])
    assert kept.indices == [1]
    assert one.learn([telling], version=VERSION) == other.learn(
        [[alike, telling][index] for index in kept.indices], version=VERSION
    )
    assert all(map(torch.equal, weights(one), weights(other)))


def test_more_minibatches_than_episodes_train_each_once() -> None:
    of = learner(AlgorithmConfig(preset="starpo-grpo", minibatches=8))
    of.learn([group_of(of.policy, 0, (1.0, 0.0, 0.5))], version=VERSION)
    assert of.steps == 3
