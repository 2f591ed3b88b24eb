"""Weights of tokens: the four averages, and gradients that no split into micro-batches can change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.losses import kl_divergence, policy_loss, token_weights, value_loss
from tests.trainer.algorithms.builders import random_doubles, random_layout

AVERAGES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
MASK = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("average", "short", "long"),
    [
        ("token-mean", 1 / 6, 1 / 6),
        ("seq-mean-token-mean", 1 / 4, 1 / 8),
        ("seq-mean-token-sum", 1 / 2, 1 / 2),
        ("seq-mean-token-sum-norm", 1 / 20, 1 / 20),
    ],
)
def test_the_four_averages(average: str, short: float, long: float) -> None:
    weights = token_weights(MASK, average, max_length=10)
    assert weights[0].tolist() == pytest.approx([short, 0, short, 0])
    assert weights[1].tolist() == pytest.approx([long] * 4)
    assert not weights[2].any()


def test_an_empty_batch_has_no_weights_and_an_unknown_average_is_refused() -> None:
    for average in AVERAGES:
        assert not token_weights(torch.zeros(2, 3, dtype=torch.bool), average, max_length=3).any()
    with pytest.raises(ValueError, match="sum-mean"):
        token_weights(MASK, "sum-mean", max_length=3)


@pytest.mark.parametrize("average", AVERAGES)
@given(seed=st.integers(0, 10_000), data=st.data())
@settings(max_examples=12, deadline=None)
def test_no_split_into_micro_batches_changes_the_gradient(average: str, seed: int, data: st.DataObject) -> None:
    rows, columns = 6, 5
    mask, turns = random_layout(seed, rows, columns)
    features, weight = random_doubles(seed, rows, columns, 3), random_doubles(seed + 1, 3)
    old, advantages = random_doubles(seed + 2, rows, columns), random_doubles(seed + 3, rows, columns)
    weights = token_weights(mask, average, max_length=columns).double()
    kind: dict[str, Any] = data.draw(
        st.sampled_from([{}, {"turn_clip": {"kind": "turn_ratio"}}, {"policy_loss": "gspo"}, {"dual_clip": 2.0}])
    )
    config = AlgorithmConfig(preset="dapo", **kind)
    order = data.draw(st.permutations(range(rows)))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1))))
    blocks = [order[first:last] for first, last in zip([0, *cuts], [*cuts, rows], strict=True)]

    def gradient(parts: list[list[int]]) -> Tensor:
        parameter = weight.clone().requires_grad_()
        for part in parts:
            outputs = (features[part] @ parameter).tanh()
            own = policy_loss(
                config, outputs, old[part], advantages[part], mask_BT=mask[part], turns_BT=turns[part]
            ).per_token_BT
            own = own + 0.1 * kl_divergence("k3", outputs, old[part])
            own = own + 0.5 * value_loss(outputs, old[part], advantages[part], 0.2)
            (weights[part] * own).sum().backward()  # type: ignore[no-untyped-call]
        assert parameter.grad is not None
        return parameter.grad

    torch.testing.assert_close(gradient([list(block) for block in blocks]), gradient([list(range(rows))]))
