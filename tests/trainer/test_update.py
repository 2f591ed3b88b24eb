"""One update: the same however the batch is cut, in the right direction, and from nothing but what may teach."""

import copy
import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.optimizer import OptimizerConfig
from starpod.trainer.configuration.section import ConfigError, packaged_configs
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.models.policy import Policy
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.update import LogprobGap, PolicyTrainer, check_logprob_gaps
from tests.trainer.tiny_learner import (
    VERSION,
    built,
    gradient_of,
    group_of,
    learner_of,
    make_trainer,
    say,
    scored_table,
    turn,
    weights,
)


def gradient(of: PolicyTrainer, groups: list[Group], drift: float = 0.0) -> tuple[Tensor, dict[str, float]]:
    """Return the gradient of one optimiser step on all groups, and the metrics.

    drift: relative change of all weights since the update began.
    """
    batch, table = scored_table(of, [episode for group in groups for episode in group.episodes])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in of.policy.parameters():
            parameter += drift * parameter * torch.randn(parameter.shape, generator=generator)
    of.optimizer.zero_grad()
    metrics, _ = of.accumulate(batch, table, range(len(batch)))
    return gradient_of(of.policy), metrics


def chance(policy: Policy, episode: Episode) -> float:
    """The log-probability of an episode's replies."""
    probe = copy.deepcopy(episode)
    return sum(p for own in say(policy, probe).turns for p in own.logprobs)


CLIPS: list[dict[str, Any]] = [
    {},
    {"clip_decay": 0.9},
    {"kind": "gspo"},
    {"dual_clip": 2.0},
]


@settings(max_examples=16)
@given(
    st.integers(1, 120),
    st.sampled_from(["starpo-ppo", "starpo-grpo", "dr-grpo", "gigpo"]),
    st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]),
    st.sampled_from(CLIPS),
)
def test_no_cut_into_micro_batches_changes_gradient_or_metrics(
    budget: int, preset: str, average: str, clip: dict[str, Any]
) -> None:
    algorithm = AlgorithmConfig(preset=preset, loss={"average": average, **clip})  # type: ignore[arg-type]
    whole, cut = make_trainer(algorithm, opinion=True), make_trainer(algorithm, budget=budget, opinion=True)
    groups = [
        group_of(whole.policy, number, rewards, turns=3)
        for number, rewards in enumerate([(1.0, 0.0, 0.5), (0.0, 1.0, 0.2)])
    ]
    expected, metrics = gradient(whole, groups, drift=0.02)
    found, again = gradient(cut, groups, drift=0.02)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)
    assert again.keys() == metrics.keys()
    assert again == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in metrics.items()}
    assert metrics["policy/ratio_max"] > 1.001


def passes_of(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Record the number of tokens of each later pass of the policy, and whether the pass keeps a graph."""
    passes: list[tuple[int, bool]] = []
    score = policy.score

    def counted(tokens_SL: Tensor, *rest: Any, **options: Any) -> Any:
        passes.append((tokens_SL.numel(), torch.is_grad_enabled()))
        return score(tokens_SL, *rest, **options)

    monkeypatch.setattr(policy, "score", counted)
    return passes


def test_an_episode_whose_context_moves_is_scored_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a window each turn is a sample of its own: no pass holds all of an episode's."""
    of = make_trainer(AlgorithmConfig(preset="starpo-s"), budget=24)
    group = group_of(of.policy, 1, (1.0, 0.0), turns=6)
    widest = max(len(turn.prompt) + len(turn.reply) for episode in group.episodes for turn in episode.turns)
    passes = passes_of(of.policy, monkeypatch)
    learner_of(of).learn([group], version=VERSION)
    assert widest <= 24 < sum(len(turn.prompt) + len(turn.reply) for turn in group.episodes[0].turns)
    assert max(tokens for tokens, _ in passes) <= 24


@pytest.mark.parametrize(
    ("correction", "options"),
    [
        ("tis", {}),
        ("icepop", {}),
        ("off", {}),
        ("bypass", {}),
        ("bypass", {"epochs": 2, "mini_batch_size": 3}),
        ("bypass", {"loss": "gspo", "mini_batch_size": 3}),
    ],
)
def test_no_scores_are_needed_before_a_single_step_or_where_the_samplers_stand_for_them(
    monkeypatch: pytest.MonkeyPatch, correction: str, options: dict[str, Any]
) -> None:
    """The first step's own forward pass is compared with the sampler, for fresh tokens only."""
    algorithm = AlgorithmConfig.model_validate(
        {"preset": "starpo-s", "advantage": "grpo", "correction": {"mode": correction}, **options}
    )
    results = []
    for scores_first in (True, False):
        of = make_trainer(algorithm, budget=40)
        groups = [group_of(of.policy, number, (1.0, 0.0, 0.3), turns=3) for number in range(2)]
        for wrong, each in zip((0.3, -0.3, 2.0), groups[0].episodes, strict=True):
            stale = each.turns[1]
            stale.versions = [VERSION - 1] * len(stale.versions)
            stale.logprobs[-1] += wrong
        for each in (episode for group in groups for episode in group.episodes):
            each.turns[0].logprobs[0] += 0.001
        with monkeypatch.context() as patched:
            passes = passes_of(of.policy, patched)
            if scores_first:
                patched.setattr(AlgorithmConfig, "scores_first", lambda *_: True)
            metrics = learner_of(of).learn(groups, version=VERSION)
        # A loss of whole episodes completes episodes that are packed into several blocks, in each step.
        assert (not passes[0][1]) == scores_first or "loss" in options
        results.append((metrics, of.policy.state_dict(), len(passes)))
    (before, weights, many), (after, again, fewer) = results
    assert fewer < many
    if options:  # the gap is that of the first step's rows
        gaps = [{name: each.pop(name) for name in [*each] if "logprob_gap" in name} for each in (before, after)]
        assert gaps[0].keys() == gaps[1].keys()
        assert [each["policy/logprob_gap_max"] for each in gaps] == [pytest.approx(0.001, rel=0.01)] * 2
    assert after == {name: pytest.approx(value, rel=1e-4, abs=1e-6) for name, value in before.items()}
    for name, weight in weights.items():
        torch.testing.assert_close(again[name], weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "starpo-ppo"},
        {"preset": "starpo-s", "advantage": "grpo", "epochs": 2},
        {"preset": "starpo-s", "advantage": "grpo", "mini_batch_size": 4},
        {"preset": "starpo-s", "advantage": "grpo", "loss": "gspo"},
        {"preset": "starpo-s", "advantage": "grpo", "correction": {"level": "sequence"}},
        {"preset": "starpo-s", "advantage": "grpo", "kl": {"where": "reward", "coefficient": 0.1}},
    ],
)
def test_what_needs_scores_before_its_first_step(changes: dict[str, Any]) -> None:
    assert AlgorithmConfig.model_validate(changes).scores_first(8)
    assert not AlgorithmConfig.model_validate({"preset": "starpo-s", "advantage": "grpo"}).scores_first(8)


def test_what_rounding_does_by_chance_stops_no_run_and_what_is_wrong_does() -> None:
    config = OptimizerConfig()
    # Most of 200,000 tokens in bfloat16 are near, and one is not.
    rounding = torch.linspace(0, 0.04, 200_000)
    rounding[7] = 3.0
    metrics = check_logprob_gaps(config, rounding)
    assert metrics["policy/logprob_gap_max"] == 3.0
    assert metrics["policy/logprob_gap_mean"] == pytest.approx(0.02, abs=1e-4)
    assert metrics["policy/logprob_gap_q99"] == pytest.approx(0.0396, abs=1e-5)
    everywhere = "0.12 nats on average, more than optimizer.max_logprob_gap_mean (0.1)"
    with pytest.raises(LogprobGap, match=re.escape(everywhere)):
        check_logprob_gaps(config, torch.full((1000,), 0.12))
    some = torch.zeros(1000)
    some[:11] = 0.7
    with pytest.raises(
        LogprobGap, match=re.escape("0.7 nats at the 0.99 quantile, more than optimizer.max_logprob_gap_q")
    ):
        check_logprob_gaps(config, some)
    check_logprob_gaps(OptimizerConfig(max_logprob_gap_q99=0.8), some)
    some[10] = 0
    check_logprob_gaps(config, some)


@pytest.mark.parametrize("wrong", [2.0, -2.0, math.nan])
def test_falsified_logprobs_of_the_present_version_stop_the_run(wrong: float) -> None:
    of = make_trainer(AlgorithmConfig(preset="starpo-grpo"))
    group = group_of(of.policy, 0, (1.0, 0.0))
    before = weights(of.policy)
    group.episodes[1].turns[0].logprobs[-1] += wrong
    with pytest.raises(LogprobGap):
        learner_of(of).learn([group], version=VERSION)
    assert all(map(torch.equal, weights(of.policy), before))
    metrics = learner_of(of).learn([group], version=VERSION + 1)  # those of another version may differ
    assert "policy/logprob_gap_max" not in metrics
    assert "critic/grad_norm" not in metrics, "only a critic has one"


def test_a_critics_large_gradient_takes_nothing_from_the_policys() -> None:
    """The two gradients are clipped separately, and by default the critic's loss does not change the trunk."""
    quiet, loud = (
        make_trainer(AlgorithmConfig(preset="starpo-s", advantage={"value_coefficient": coefficient}), opinion=True)
        for coefficient in (0.5, 500.0)
    )
    groups = [group_of(quiet.policy, number, (1.0, 0.0)) for number in range(2)]
    expected, found = (learner_of(of).learn(groups, version=VERSION) for of in (quiet, loud))
    assert found["update/grad_norm"] == expected["update/grad_norm"]
    assert found["critic/grad_norm"] == pytest.approx(1000 * expected["critic/grad_norm"], rel=1e-3)
    assert found["critic/grad_norm"] > 10 > found["update/grad_norm"] > 0.01
    assert all(map(torch.equal, quiet.policy.model.state_dict().values(), loud.policy.model.state_dict().values()))


def test_a_gradient_of_the_critic_that_is_not_finite_stops_the_whole_step() -> None:
    of = make_trainer(AlgorithmConfig(preset="starpo-s"), opinion=True)
    before = weights(of.policy)
    next(of.policy.critic_parameters()).register_hook(lambda gradient: gradient * math.inf)
    metrics = learner_of(of).learn([group_of(of.policy, 0, (1.0, 0.0))], version=VERSION)
    assert metrics["update/nonfinite"] == 1
    assert all(map(torch.equal, weights(of.policy), before))


def with_critic(critic: str, **given: float) -> PolicyTrainer:
    optimizer = OptimizerConfig.model_validate({"lr": 1e-6, **given})
    return PolicyTrainer(copy.deepcopy(built(critic)), AlgorithmConfig(preset="starpo-s"), optimizer, Parallel())


@pytest.mark.parametrize(
    ("critic", "given", "rate"), [("shared", {}, 1e-3), ("separate", {}, 1e-5), ("shared", {"critic_lr": 0.01}, 0.01)]
)
def test_a_value_head_learns_faster_than_a_model(critic: str, given: dict[str, float], rate: float) -> None:
    assert [group["lr"] for group in with_critic(critic, **given).optimizer.param_groups] == [1e-6, rate]


def test_a_shared_critic_learns_at_its_own_rate() -> None:
    """The rate of a pretrained policy would teach it nothing in forty steps."""
    of = with_critic("shared")
    groups = [group_of(of.policy, number, (0.5 * (number % 2), 0.5 * (number % 2))) for number in range(2)]
    known = [learner_of(of).learn(groups, version=-1)["critic/explained_variance"] for _ in range(40)]
    assert abs(known[0]) < 0.05 and known[-1] > 0.3


@pytest.mark.parametrize("preset", packaged_configs("algorithm"))
def test_each_preset_makes_the_better_reply_likelier(preset: str) -> None:
    of = make_trainer(AlgorithmConfig(preset=preset), lr=3e-4)
    groups = [group_of(of.policy, number, (1.0, 0.0)) for number in range(3)]

    def chances() -> Tensor:
        return torch.tensor([[chance(of.policy, episode) for episode in group.episodes] for group in groups])

    before = chances()
    metrics = learner_of(of).learn(groups, version=VERSION)
    assert metrics["policy/logprob_gap_max"] < 1e-5
    assert all(math.isfinite(value) for value in metrics.values())
    better, worse = (chances() - before).T
    assert bool((better > worse).all()) and better.sum() > 0


def test_failed_episodes_have_no_influence() -> None:
    one, other = (make_trainer(AlgorithmConfig(preset="starpo-s")) for _ in range(2))
    group = group_of(one.policy, 0, (1.0, 0.0, 0.0))
    lost = dataclasses.replace(copy.deepcopy(group.episodes[0]), member=3, end="failed")
    lost.turns[-1].parts = {"environment": 100.0}
    assert learner_of(one).learn([group], version=VERSION) == learner_of(other).learn(
        [Group(0, copy.deepcopy(group.episodes), [lost])], version=VERSION
    )
    assert all(map(torch.equal, weights(one.policy), weights(other.policy)))
    group.episodes.append(Episode(0, 4, "lake", end="context"))
    assert math.isfinite(learner_of(one).learn([group], version=-1)["update/loss"]), (
        "an episode without a token is left out"
    )


@pytest.mark.parametrize("preset", ["starpo-s", "starpo-grpo"])
def test_replies_that_were_cut_can_be_left_out_of_the_policys_loss(preset: str) -> None:
    """Such replies have weight 0, and the mean is over the others, as if the step had only those."""
    kept, masked = (
        make_trainer(AlgorithmConfig(preset=preset, mask_truncated=flag), opinion=True) for flag in (False, True)
    )
    group = group_of(kept.policy, 0, (1.0, 0.0, 0.5))
    for cut in group.episodes[1].turns:
        cut.finish = "length"

    def policy_gradient(of: PolicyTrainer, rows: list[int]) -> Tensor:
        batch, table = scored_table(of, group.episodes)
        of.policy.zero_grad()
        of.accumulate(batch, table, rows, components=("task", "entropy", "kl"))
        return gradient_of(of.policy)

    found = policy_gradient(masked, [0, 1, 2])
    torch.testing.assert_close(found, policy_gradient(kept, [0, 2]), rtol=1e-4, atol=1e-7)
    assert not torch.allclose(found, policy_gradient(kept, [0, 1, 2]), rtol=0.01)


@pytest.mark.parametrize(("episodes", "steps"), [(1, 1), (3, 1), (5, 1), (6, 2), (7, 2), (9, 2), (10, 3), (12, 3)])
def test_steps_follow_from_the_episodes_that_are_left(episodes: int, steps: int) -> None:
    """The steps are equal, as close as possible to the configured size, and at least one."""
    of = make_trainer(AlgorithmConfig(preset="starpo-grpo", mini_batch_size=4))
    rewards = tuple(float(number % 2) for number in range(episodes))
    taken = []
    of.optimizer.register_step_post_hook(lambda *_: taken.append(1))
    learner_of(of).learn([group_of(of.policy, 0, rewards)], version=VERSION)
    assert len(taken) == steps


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_rates_follow_torchs_own_schedulers(name: str) -> None:
    """A warm-up of three iterations, then the rest of ten."""
    config = OptimizerConfig.model_validate({"schedule": name, "warmup_iterations": 3})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedules = torch.optim.lr_scheduler
    after: dict[str, Any] = {
        "constant": lambda: schedules.ConstantLR(optimizer, factor=1.0),
        "linear": lambda: schedules.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=7),
        "cosine": lambda: schedules.CosineAnnealingLR(optimizer, T_max=7),
    }
    warmup = schedules.LinearLR(optimizer, start_factor=0.25, end_factor=1.0, total_iters=3)
    whole = schedules.SequentialLR(optimizer, [warmup, after[name]()], milestones=[3])
    for iteration in range(1, 11):
        assert config.rate_factor(iteration, 10) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        whole.step()
    assert config.rate_factor(1, 10) == 0.25
    if name != "constant":
        # The end may lie elsewhere than that of the run.
        longer = config.model_copy(update={"schedule_iterations": 10})
        assert longer.rate_factor(7, 6) == config.rate_factor(7, 10)
        assert config.rate_factor(11, 10) == pytest.approx(0.0)


def test_rates_that_would_end_before_the_run_or_never_are_refused() -> None:
    with pytest.raises(ConfigError, match="schedule constant they never do"):
        parse_config({"optimizer": {"schedule_iterations": 5}})
    with pytest.raises(ConfigError, match=r"schedule_iterations 5 is less than stop\.iterations 6"):
        parse_config({"optimizer": {"schedule": "linear", "schedule_iterations": 5}, "stop": {"iterations": 6}})


def test_a_rate_of_nothing_moves_nothing_and_both_rates_are_scaled() -> None:
    of = make_trainer(AlgorithmConfig(preset="starpo-s", filter="none"), opinion=True)
    before = weights(of.policy)
    group = group_of(of.policy, 0, (1.0, 0.0))
    assert learner_of(of).learn([group], version=VERSION, rate=0.0)["update/learning_rate"] == 0.0
    assert all(map(torch.equal, weights(of.policy), before))
    learner_of(of).learn([group], version=VERSION, rate=0.5)
    assert [parameters["lr"] for parameters in of.optimizer.param_groups] == [0.0005, 0.0005]
    assert not all(map(torch.equal, weights(of.policy), before))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_truncated_episode_is_worth_what_the_critic_says_of_the_next_context(fresh: bool) -> None:
    of = make_trainer(AlgorithmConfig(preset="starpo-s", advantage={"bootstrap_truncated": True}), opinion=True)
    (episode,) = group_of(of.policy, 1, (0.5,)).episodes
    tail = [7, 8, 9]
    episode.end, episode.tail, episode.tail_fresh = "max_turns", tail, fresh
    # If the episode continued, the next reply would have this context.
    longer = copy.deepcopy(episode)
    longer.turns.append(turn(tail, [5], 0.0, fresh=fresh))
    value = scored_table(of, [longer])[1].values_BT
    assert value is not None
    found = scored_table(of, [episode])[1].bootstrap_B
    assert found.item() == pytest.approx(value[0, longer.sampled_tokens - 1].item(), abs=1e-6)
    assert found.item() != 0
    episode.end = "terminal"
    assert scored_table(of, [episode])[1].bootstrap_B.item() == 0


def test_truncated_episodes_are_valued_equally_alone_and_together() -> None:
    of = make_trainer(AlgorithmConfig(preset="starpo-s", advantage={"bootstrap_truncated": True}), opinion=True)
    episodes = group_of(of.policy, 1, (0.5, 0.0, 1.0, 0.2)).episodes
    for episode, tail in zip(episodes, ([7, 8, 9], [4] * 20, [], [5]), strict=True):
        episode.end, episode.tail = "max_turns", tail
    together = scored_table(of, episodes)[1].bootstrap_B
    alone = [scored_table(of, [episode])[1].bootstrap_B.item() for episode in episodes]
    assert together.tolist() == pytest.approx(alone, abs=1e-6)
    assert len(set(alone)) == 4
    assert alone[2] == 0


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize("average", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_signal_and_noise_are_of_the_updates_gradient_and_change_nothing(loss: str, average: str) -> None:
    algorithm = {"preset": "starpo-s", "mini_batch_size": 99, "loss": {"kind": loss, "average": average}}
    of = make_trainer(AlgorithmConfig.model_validate(algorithm), opinion=True)
    groups = [group_of(of.policy, number, (1.0, 0.0, 0.5)[: 2 + number % 2]) for number in range(3)]
    before = weights(of.policy), torch.get_rng_state(), of.generator.get_state()
    signal, noise = learner_of(of).signal_and_noise(groups, collected=5, version=VERSION, scale=0.6)
    for old, new in zip(before, (weights(of.policy), torch.get_rng_state(), of.generator.get_state()), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)
    assert not of.optimizer.state and all(parameter.grad is None for parameter in of.policy.parameters())
    # E|g|^2 is the sum of both, so that of this one update, too. The shares of the groups add up to its gradient.
    norm = learner_of(of).learn(groups, version=VERSION, scale=0.6)["update/grad_norm"]
    assert signal + noise == pytest.approx(norm**2, rel=1e-4)
    batch, table = scored_table(of, [episode for group in groups for episode in group.episodes])
    of.optimizer.zero_grad()
    for rows in ([0, 1], [2, 3, 4], [5, 6]):
        of.accumulate(batch, table, range(len(batch)), part=rows)
    parts = gradient_of(of.policy)
    of.optimizer.zero_grad()
    of.accumulate(batch, table, range(len(batch)))
    torch.testing.assert_close(parts, gradient_of(of.policy), rtol=1e-4, atol=1e-6)


def test_gradients_by_bucket_are_of_the_whole_batchs_advantages() -> None:
    of = make_trainer(AlgorithmConfig(preset="starpo-s"), opinion=True)
    alike, telling = group_of(of.policy, 0, (0.0, 0.0)), group_of(of.policy, 1, (1.0, 0.0))
    alone = learner_of(of).gradients([alike], version=VERSION, buckets=2)
    beside = learner_of(of).gradients([alike, telling], version=VERSION, buckets=2)
    # Whitened by itself a group where all earn alike seems to have as much to teach as any other.
    assert beside["gradients/zero/task"] != pytest.approx(alone["gradients/zero/task"], rel=0.05)
    assert beside["gradients/zero/groups"] == beside["gradients/1/groups"] == 1
