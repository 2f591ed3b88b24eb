"""Blockwise advantage estimation: scores routed to the blocks of a reply, and compared within strata."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from starpod.trainer.algorithms.advantages import compute_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.credit import credit
from starpod.trainer.algorithms.terms import CreditTerm
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.batch import Batch, RolloutBatch
from starpod.trainer.data.episode import Episode
from starpod.trainer.prompts.grammar import BLOCKS
from tests.trainer.algorithms.builders import a_rollout, doubles
from tests.trainer.turns import a_turn

CORRECT = (1, 1, 0, 0, 0, 1)
BRIER = (-0.01, -0.36, -0.09, -0.64, -0.36, -0.09)
THINK, ANSWER = BLOCKS.index("think"), BLOCKS.index("answer")


def blocks_rollout(parts: Sequence[Mapping[str, float]], spans: Sequence[Sequence[int]]) -> RolloutBatch:
    """One group of episodes of one turn, with these parts of its reward, and a block for each token."""
    rewards = [[0.0] * (len(own) - 1) + [sum(part.values())] for part, own in zip(parts, spans, strict=True)]
    turns, paid = [[0] * len(own) for own in spans], [[part] for part in parts]
    rollout = a_rollout(rewards, groups=[0] * len(parts), turns=turns, parts=paid)
    return replace(rollout, blocks_BT=torch.tensor(spans))


def paper(*terms: CreditTerm) -> Tensor:
    """Advantages of six members: a solution that is right or wrong, then a confidence with its Brier reward."""
    parts = [{"right": float(c), "brier": r} for c, r in zip(CORRECT, BRIER, strict=True)]
    rollout = blocks_rollout(parts, [[THINK, ANSWER]] * 6)
    return credit(terms, rollout, rollout.rewards_BT)


BRIER_TERM = {"unit": "block", "block": "answer", "score": "reward", "parts": ("brier",)}
RIGHT = {"strata": ("right",)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # A later block is compared with those whose earlier blocks came to the same.
        (RIGHT, (0.143333, -0.206667, 0.273333, -0.276667, 0.003333, 0.063333)),
        ({}, (0.248333, -0.101667, 0.168333, -0.381667, -0.101667, 0.168333)),
        (RIGHT | {"baseline": "others"}, (0.215, -0.31, 0.41, -0.415, 0.005, 0.095)),
        (RIGHT | {"scale": "std"}, (0.781556, -1.126894, None, None, None, 0.345339)),
    ],
)
def test_the_papers_confidence(options: dict[str, object], expected: tuple[float | None, ...]) -> None:
    solution = CreditTerm(unit="block", block="think", score="reward", parts=("right",))
    advantages = paper(solution, CreditTerm.model_validate(BRIER_TERM | options))
    torch.testing.assert_close(advantages[:, 0], doubles([0.5, 0.5, -0.5, -0.5, -0.5, 0.5])[0], atol=1e-6, rtol=0)
    for found, wanted in zip(advantages[:, 1].tolist(), expected, strict=True):
        assert wanted is None or found == pytest.approx(wanted, abs=1e-6)


def test_without_blocks_both_signals_move_all_tokens() -> None:
    expected = doubles([0.748333, 0.398333, -0.331667, -0.881667, -0.601667, 0.668333])
    torch.testing.assert_close(paper(CreditTerm()), expected.T.expand(6, 2), atol=1e-6, rtol=0)


def test_a_stratum_of_one_has_nothing_to_compare_with() -> None:
    parts = [{"right": right, "brier": float(n)} for n, right in enumerate((1.0, 0.0, 0.0))]
    rollout = blocks_rollout(parts, [[THINK, ANSWER]] * 3)
    term = CreditTerm.model_validate(BRIER_TERM | RIGHT)
    assert credit([term], rollout, rollout.rewards_BT)[:, 1].tolist() == [0.0, -0.5, 0.5]


def test_a_reply_that_could_not_be_read_is_all_of_every_block() -> None:
    parts = [{"environment": 1.0}, {"environment": 0.0, "format": -0.1}]
    rollout = blocks_rollout(parts, [[THINK, ANSWER], [-1, -1]])
    terms = AlgorithmConfig(preset="dapo", advantage="blockwise").credit_terms
    advantages = credit(terms, rollout, rollout.rewards_BT)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.55], [-0.55, -0.55]], dtype=torch.float64))


@given(seed=st.integers(0, 10_000))
def test_a_term_on_each_block_is_the_term_on_the_turn(seed: int) -> None:
    """Cutting the reply into blocks with equal scores and peers changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(4, generator=generator).tolist()
    rollout = blocks_rollout([{"environment": r} for r in rewards], [[THINK, THINK, ANSWER]] * 4)
    options = {"score": "to_go", "key": ("turn",), "scale": "std"}
    cut = [CreditTerm.model_validate({"unit": "block", "block": name} | options) for name in ("think", "answer")]
    whole = CreditTerm.model_validate({"unit": "turn"} | options)
    torch.testing.assert_close(credit(cut, rollout, rollout.rewards_BT), credit([whole], rollout, rollout.rewards_BT))


def test_batches_know_the_block_of_each_token() -> None:
    turns = [
        a_turn([5, 6, 7], spans=[("think", 2), ("answer", 3)]),
        a_turn([8, 9], spans=[("", 2)], fresh=False),
    ]
    batch = Batch([Episode(0, 0, "lake", turns=turns), Episode(0, 1, "lake", turns=turns[:1])])
    pad = [-1, -1]
    assert batch.blocks_BT().tolist() == [[THINK, THINK, ANSWER, *pad], [THINK, THINK, ANSWER, *pad]]
    with pytest.raises(ValueError, match="lacks the blocks"):
        Batch([Episode(0, 0, "lake", turns=[a_turn([5])])]).blocks_BT()
    rollout = replace(blocks_rollout([{"environment": 1.0}] * 2, [[THINK], [THINK]]), blocks_BT=None)
    with pytest.raises(ValueError, match="needs the blocks"):
        compute_advantages(AlgorithmConfig(preset="dapo", advantage="blockwise"), rollout)


def test_blocks_that_replies_do_not_have_are_refused() -> None:
    paid = {"algorithm": {"preset": "dapo", "advantage": "blockwise"}, "rewards": {"reasoning": {"weight": 0.1}}}
    parse_config(paid)
    with pytest.raises(ConfigError, match=r"set prompt\.thinking to true"):
        parse_config(paid | {"prompt": {"thinking": False}})
    with pytest.raises(ConfigError, match="which nothing pays"):
        parse_config({"algorithm": paid["algorithm"]})
    term = {"unit": "block", "block": "subgoal", "score": "reward"}
    with pytest.raises(ConfigError, match=r"add subgoal to prompt\.blocks"):
        parse_config({"algorithm": {"preset": "dapo", "advantage": {"kind": "terms", "terms": [term]}}})
