"""Gradient norms by reward deviation."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import variance

import pytest
import torch
from torch import Tensor

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.diagnostics.gradients import (
    NoiseScale,
    agent_report,
    gradient_report,
    pooled_factors,
    reward_buckets,
    signal_and_noise,
)
from tests.trainer.algorithms.builders import a_rollout, doubles
from tests.trainer.diagnostics.synthetic import turn


def group(number: int, *rewards: float) -> Group:
    episodes = [Episode(number, m, "toy-v1", turns=[turn(reply=[1, 2], reward=r)]) for m, r in enumerate(rewards)]
    return Group(number, episodes)


GROUPS = [group(0, 1, 1), group(1, 0, 4), group(2, 0, 1), group(3, 0, 0), group(4, 0, 2), group(5, 0, 3)]


def test_groups_without_deviation_are_apart_and_the_rest_in_equal_parts() -> None:
    buckets = reward_buckets(GROUPS, 2)
    assert {name: [g.id for g in groups] for name, groups in buckets.items()} == {
        "zero": [0, 3],
        "1": [2, 4],
        "2": [5, 1],
    }
    assert list(reward_buckets(GROUPS, 99)) == ["zero", "1", "2", "3", "4"]
    assert reward_buckets([], 6) == {}


def test_norms_by_bucket_and_component_and_nothing_left_behind() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.grad = torch.full_like(model.weight, 7.0)  # what an update left there is not counted
    before = model.weight.detach().clone()

    def backward(groups: Sequence[Group], component: str) -> None:
        if component != "kl":  # a term that is off has no gradient
            scale = sum(g.reward_std for g in groups) if component == "task" else 1.0
            (scale * model(torch.tensor([3.0, 0.0, 4.0]))).sum().backward()

    metrics = gradient_report(model, GROUPS, backward, buckets=2)
    deviation = sum(g.reward_std for g in (GROUPS[1], GROUPS[5]))
    assert metrics["gradients/zero/task"] == 0
    assert metrics["gradients/2/task"] == pytest.approx(5 * deviation)
    assert metrics["gradients/2/task_per_token"] == pytest.approx(5 * deviation / 8)
    assert metrics["gradients/zero/entropy"] == pytest.approx(5)
    assert metrics["gradients/1/kl"] == 0
    assert metrics["gradients/1/groups"] == 2
    assert metrics["gradients/1/reward_std_high"] <= metrics["gradients/2/reward_std_low"]
    assert model.weight.grad is None
    assert torch.equal(model.weight, before)


def test_an_error_leaves_no_gradient_either() -> None:
    model = torch.nn.Linear(1, 1)

    def backward(groups: Sequence[Group], component: str) -> None:
        model(torch.ones(1)).sum().backward()
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        gradient_report(model, GROUPS, backward)
    assert all(parameter.grad is None for parameter in model.parameters())


def signal_of(shares: Tensor, collected: int) -> tuple[float, float]:
    """Signal and noise where group n adds the gradient shares[n]."""
    model = torch.nn.Linear(shares.shape[1], 1, bias=False, dtype=torch.float64)
    groups = [Group(number, []) for number in range(len(shares))]

    def backward(part: Sequence[Group]) -> None:
        model(shares[[g.id for g in part]].sum(0)).backward()

    return signal_and_noise(model, groups, backward, collected=collected)


def test_signal_and_noise_are_the_mean_over_all_splits_of_a_collection_into_halves() -> None:
    shares = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    halves = [(2 * shares[[0, other]].sum(0), 2 * (shares.sum(0) - shares[[0, other]].sum(0))) for other in (1, 2, 3)]
    signal, noise = signal_of(shares, 4)
    assert signal == pytest.approx(sum(float(one @ other) for one, other in halves) / 3)
    assert noise == pytest.approx(sum(float((one - other).square().sum()) / 4 for one, other in halves) / 3)


@pytest.mark.parametrize("collected", [5, 40])
def test_a_known_critical_batch_is_found_although_the_filter_drops_groups(collected: int) -> None:
    """A group is kept with probability 0.6, and then has the gradient 1 in ten directions plus noise of variance 9."""
    generator, scale = torch.Generator().manual_seed(0), NoiseScale()
    scale.DECAY = 1.0  # type: ignore[misc]
    for _ in range(3000 // collected):
        kept = torch.rand(collected, generator=generator) < 0.6
        shares = (1 + 3 * torch.randn(int(kept.sum()), 10, generator=generator, dtype=torch.float64)) / collected
        metrics = scale.update(*signal_of(shares, collected), 8 * collected)
    noise_of_group = (0.6 * 10 - 0.6**2) / 0.6**2  # E g^2 = 1 + 9 in each direction, and E g = 0.6
    assert metrics["update/critical_batch_episodes"] == pytest.approx(8 * noise_of_group, rel=0.15)
    assert metrics["update/signal_to_noise"] == pytest.approx(collected / noise_of_group, rel=0.15)
    restored = NoiseScale()
    restored.load_state_dict(scale.state_dict())
    assert restored.update(0, 0, 0)["update/signal_to_noise"] == pytest.approx(metrics["update/signal_to_noise"])
    assert NoiseScale().update(-1.0, 2.0, 8) == {"update/signal_to_noise": -0.5}  # noise hides the signal


def test_what_one_scale_does_to_squared_gradients_is_measured_beside_what_is_predicted() -> None:
    """Gradients of episodes that have nothing in common: their squared norms add up, whatever the signs."""
    rewards = [(1, 0.4), (0, 0.1), (1, 0.4), (0, 0.1)]
    rollout = a_rollout(rewards, groups=[0] * 4, agent_id=[["S", "V"]] * 4)

    def norm(agent: str, advantages_BT: Tensor) -> float:
        other = "SV".index(agent) - 1
        assert not advantages_BT[:, other].any()
        return float(advantages_BT.square().sum().sqrt())

    found = agent_report(rollout, rollout.rewards_BT, norm)
    assert found["gradients/agents/S/task"] == pytest.approx(2**0.5)
    assert found["gradients/agents/S/pooled_factor"] == pytest.approx(2.010460, abs=1e-6)
    assert found["gradients/agents/S/measured_factor"] == pytest.approx(
        (1.500168**2 + 0.900101**2) / (2 * 0.866024**2), abs=1e-5
    )
    assert found["gradients/agents/V/measured_factor"] == pytest.approx(
        (0.060007**2 + 0.660074**2) / (2 * 0.866020**2), abs=1e-5
    )
    # An agent that always earns the same has no gradient of its own to compare with; one agent nobody to share with.
    rollout = replace(rollout, rewards_BT=doubles(*[(first, 0.4) for first, _ in rewards]))
    assert "gradients/agents/V/measured_factor" not in agent_report(rollout, rollout.rewards_BT, norm)
    alone = a_rollout(rewards, groups=[0] * 4, agent_id=[["S", "S"]] * 4)
    assert agent_report(alone, rollout.rewards_BT, norm) == {}


def test_golden_factors_of_agents_that_share_a_scale() -> None:
    """With rewards 1, 0, 1, 0 and 0.4, 0.1, 0.4, 0.1, the first gradient grows, and the second almost vanishes."""
    team = [(0, name, score) for name, own in (("S", (1, 0, 1, 0)), ("V", (0.4, 0.1, 0.4, 0.1))) for score in own]
    assert pooled_factors(team) == {"S": pytest.approx(2.010460, abs=1e-6), "V": pytest.approx(0.262860, abs=1e-6)}
    # Groups are apart, those without a deviation say nothing, and neither does an agent that spoke in one episode.
    others = [(1, "S", 1.0), (1, "S", 1.0), (2, "S", 1.0), (2, "V", 0.0)]
    assert pooled_factors([*team, *others]) == pooled_factors(team)
    # Where an agent always earns the same it has no gradient of its own, but one of the others' scale.
    settled = [(1, name, score) for name, own in (("S", (1, 0, 1, 0)), ("V", (0.4,) * 4)) for score in own]
    alone = (0.4 - 0.45) ** 2 / variance([1, 0, 1, 0, 0.4, 0.4, 0.4, 0.4])
    assert pooled_factors([*team, *settled])["V"] == pytest.approx(0.262860 + alone, abs=1e-6)
    assert "V" not in pooled_factors(settled)
    # Alone, an agent's statistics are the pooled ones.
    assert pooled_factors([(0, "S", 1.0), (0, "S", 0.25), (0, "S", 0.0)]) == {"S": pytest.approx(1.0)}
