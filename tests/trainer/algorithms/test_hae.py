"""Hierarchical advantages: published numbers worked out by hand, and the estimators that it holds as special cases."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from starpod.trainer.algorithms.advantages import compute_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.gae import gae
from starpod.trainer.algorithms.hae import HIGH, LOW, TERM, Hierarchical, hae, hierarchical_gae, stages, whiten_units
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.batch import Batch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.prompts.grammar import BLOCKS
from tests.trainer.algorithms.builders import assert_close, doubles, random_doubles, random_layout
from tests.trainer.tiny_learner import VERSION, built, learner_of, make_trainer, say, scored_table
from tests.trainer.turns import a_turn

REWARDS = doubles([0.0, 0.2, 0.0, 1.0])
LOWS = (0.3, 0.4, 0.5, 0.6)
TERMS = (0.3, 0.35, 0.6, 0.65)
TWO = torch.tensor([[True, False, True, False]])


def values(highs: tuple[float, ...]) -> Tensor:
    return torch.stack([doubles(TERMS), doubles(highs), doubles(LOWS)], dim=2)


def golden(starts: Tensor = TWO, highs: tuple[float, ...] = (0.35, 9.0, 0.7, 9.0), **options: float) -> Hierarchical:
    return hierarchical_gae(REWARDS, values(highs), starts, torch.ones(1, 4, dtype=torch.bool), **options)


@pytest.mark.parametrize(
    ("options", "low", "high", "term"),
    [
        ({}, (0.6, 0.5, 0.5, 0.4), (0.835, 0, 0.3, 0), (0.6, 0.55, 0.4, 0.35)),
        ({"segment_lam": 1.0}, (0.6, 0.5, 0.5, 0.4), (0.85, 0, 0.3, 0), (0.6, 0.55, 0.4, 0.35)),
        (
            {"turn_gamma": 0.95, "turn_lam": 0.95},
            (0.499662, 0.465, 0.431, 0.4),
            (0.686094, 0, 0.25, 0),
            (0.521750, 0.515, 0.35, 0.35),
        ),
    ],
)
def test_two_segments_of_two_turns(
    options: dict[str, float], low: tuple[float, ...], high: tuple[float, ...], term: tuple[float, ...]
) -> None:
    found = golden(**options)
    assert_close(found.low_BK, *low)
    assert_close(found.high_BK, *high)
    assert_close(found.term_BK, *term)


def test_each_stream_is_whitened_over_its_units() -> None:
    found = golden()
    everywhere = torch.ones_like(TWO)
    assert_close(whiten_units(found.low_BK, everywhere, 2), 1.414213, 0, 0, -1.414213)
    assert_close(whiten_units(found.high_BK, TWO, 2), 1, 0, -1, 0)
    assert_close(whiten_units(found.term_BK, everywhere, 2), 1.212678, 0.727607, -0.727607, -1.212678)
    # The deviation of two segments says nothing: they are left as they are.
    assert_close(whiten_units(found.high_BK, TWO), 0.835, 0, 0.3, 0)


def test_one_segment_and_a_switch_at_every_turn() -> None:
    one = golden(torch.tensor([[True, False, False, False]]))
    assert_close(one.low_BK, 0.9, 0.8, 0.5, 0.4)
    assert_close(one.high_BK, 0.85, 0, 0, 0)
    every = golden(torch.ones_like(TWO), (0.35, 0.45, 0.7, 0.8), segment_lam=1.0)
    assert_close(every.low_BK, 0.15, 0.5, 0.3, 0.4)
    assert_close(every.high_BK, 0.85, 0.75, 0.3, 0.2)


@given(
    seed=st.integers(0, 10_000),
    gamma=st.sampled_from([1.0, 0.9]),
    lam=st.sampled_from([1.0, 0.95, 0.0]),
    bootstrapped=st.booleans(),
)
def test_segments_of_a_turn_and_of_an_episode_are_gae_over_turns(
    seed: int, gamma: float, lam: float, bootstrapped: bool
) -> None:
    mask, _ = random_layout(seed, 3, 7)
    rewards, values_BK3 = random_doubles(seed, 3, 7), random_doubles(seed + 1, 3, 7, 3)
    bootstrap = random_doubles(seed + 2, 3) if bootstrapped else None
    options: dict[str, Any] = {"bootstrap_B": bootstrap, "turn_gamma": gamma, "turn_lam": lam, "segment_lam": lam}
    flat: dict[str, Any] = {"bootstrap_B": bootstrap, "gamma": gamma, "lam": lam}

    # Each turn a segment: the upper level is GAE over turns.
    every = hierarchical_gae(rewards, values_BK3, mask, mask, **options)
    torch.testing.assert_close(every.high_BK, gae(rewards, values_BK3[..., HIGH], mask, **flat))
    # One segment: the lower level is GAE over turns, which is what bi-level GAE does first.
    first = mask & (mask.cumsum(1) == 1)
    one = hierarchical_gae(rewards, values_BK3, first, mask, **options)
    torch.testing.assert_close(one.low_BK, gae(rewards, values_BK3[..., LOW], mask, **flat))
    # And whether to switch is judged by all that follows.
    returns = gae(rewards, torch.zeros_like(rewards), mask, **flat | {"lam": 1.0})
    torch.testing.assert_close(one.term_BK, torch.where(mask, returns - values_BK3[..., TERM], 0.0))


@given(seed=st.integers(0, 10_000))
def test_with_one_value_and_lambda_one_low_and_term_agree(seed: int) -> None:
    """Undiscounted, a turn's low advantage telescopes to the rewards of its segment."""
    mask, _ = random_layout(seed, 2, 6)
    starts = mask & (torch.rand(2, 6, generator=torch.Generator().manual_seed(seed)) < 0.4)
    same = random_doubles(seed, 2, 6).unsqueeze(2).expand(2, 6, 3)
    found = hierarchical_gae(random_doubles(seed + 1, 2, 6), same, starts, mask)
    torch.testing.assert_close(found.low_BK, found.term_BK)


# --- on tokens --------------------------------------------------------------------------------------------------------

SPANS = [("think", 1), ("switch", 2), ("subgoal", 4), ("answer", 6)]


def planned(reward: float, switch: str, **more: Any) -> Any:
    blocks = {"switch": switch, "subgoal": "box"}
    return a_turn([5, 6, 7, 8, 9, 10], reward=reward, spans=SPANS, blocks=blocks, **more)


def on_tokens(whiten: bool = False) -> tuple[list[float], list[float], list[bool]]:
    """Three turns: KEEP (the first begins a segment all the same), KEEP, and one that could not be read."""
    turns = [planned(0.0, "KEEP"), planned(0.5, "KEEP", fresh=False)]
    turns.append(a_turn([3, 4], reward=1.0, spans=[("", 2)], fresh=False))
    batch = Batch([Episode(0, 0, "lake", turns=turns)])
    trainer = make_trainer(AlgorithmConfig(preset="hiper", kl={"where": "off"}, whiten=whiten))
    rollout = trainer.tabulate(batch)
    columns = torch.arange(14.0).unsqueeze(0) / 10
    advantages = compute_advantages(trainer.algorithm, replace(rollout, values_BT=columns))
    assert advantages.returns_BT is not None
    return (
        advantages.advantages_BT[0].tolist(),
        advantages.returns_BT[0].tolist(),
        advantages.value_mask_BT[0].tolist(),
    )


def test_blocks_get_the_advantage_of_their_stage() -> None:
    advantages, targets, learnt = on_tokens()
    # Values are read at the first tokens: V_term 0 and .6, V_high .2, V_low .4, 1.0 and 1.2 (of the last, unread turn).
    low = [1.5 - 0.4, 1.5 - 1.0, 1.0 - 1.2]
    term, high = [1.5 - 0.0, 1.5 - 0.6], 1.5 - 0.2
    expected = [low[0], term[0], high, high, low[0], low[0], low[1], term[1], 0, 0, low[1], low[1], low[2], low[2]]
    assert advantages == pytest.approx(expected, abs=1e-6)
    places = [index for index, there in enumerate(learnt) if there]
    assert places == [0, 2, 4, 6, 10, 12]
    assert [targets[place] for place in places] == pytest.approx([1.5, 1.5, 1.5, 1.5, 1.5, 1.0], abs=1e-6)


def test_a_switch_without_a_subgoal_begins_no_segment() -> None:
    turns = torch.tensor([[0, 0, 1, 1, 2, 2, 3, 3]])
    blocks = torch.tensor([[BLOCKS.index(name) for name in ("subgoal", "answer", *("switch", "answer") * 3)]])
    rewards = doubles([0, 0, 0, 0, 0, 0, 0, 1.0])
    found = doubles([0.7, 0.7, 0.5, 0.75, 0.5, 0.8, 0.5, 0.9])
    everywhere = torch.ones_like(turns, dtype=torch.bool)
    switches = (turns == 0) | (turns == 1)
    advantages, targets, _ = hae(
        rewards, found, everywhere, turns, blocks_BT=blocks, switches_BT=switches, whiten=False
    )
    assert_close(advantages[:, 1::2], 0.30, 0.25, 0.20, 0.10)
    assert_close(targets, 1, 1, 1, 1, 1, 1, 1, 1)


def test_a_token_is_valued_by_the_head_of_its_stage() -> None:
    blocks = torch.tensor([[BLOCKS.index(name) for name in ("think", "switch", "subgoal", "answer")] + [-1]])
    assert stages(blocks).tolist() == [[TERM, TERM, HIGH, LOW, LOW]]
    trainer = make_trainer(AlgorithmConfig(preset="hiper", kl={"where": "off"}))
    with torch.no_grad():
        head: Any = trainer.policy.critic
        head.head.bias.copy_(torch.tensor([0.1, 0.2, 0.3]))
    _, table = scored_table(trainer, [Episode(0, 0, "lake", turns=[planned(1.0, "SWITCH")], end="terminal")])
    assert table.values_BT is not None
    assert_close(table.values_BT, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3)


def test_an_update_teaches_all_three_heads() -> None:
    trainer = make_trainer(AlgorithmConfig(preset="hiper", kl={"where": "off"}))
    rng = random.Random(0)
    groups = []
    for number in range(4):
        turns = [
            planned(0.0, "SWITCH", versions=[VERSION] * 6),
            planned(rng.random(), rng.choice(["KEEP", "SWITCH"]), versions=[VERSION] * 6, fresh=False),
        ]
        episode = say(built("none"), Episode(number, 0, "lake", turns=turns, end="terminal"))
        groups.append(Group(number, [episode]))
    metrics = learner_of(trainer).learn(groups, version=VERSION)
    critic: Any = trainer.policy.critic
    assert critic.head.bias.ne(0).all() and critic.head.weight.ne(0).any(0).all()
    assert metrics["update/nonfinite"] == 0 and metrics["critic/grad_norm"] > 0


def test_replies_must_switch_before_they_name_a_subgoal() -> None:
    parse_config({"algorithm": "hiper", "prompt": {"blocks": ["switch", "subgoal"]}})
    with pytest.raises(ConfigError, match=r"begin with \[switch, subgoal\]"):
        parse_config({"algorithm": "hiper", "prompt": {"blocks": ["subgoal", "switch"]}})
    with pytest.raises(ConfigError, match=r"add subgoal to prompt\.blocks"):
        parse_config({"algorithm": "hiper"})
