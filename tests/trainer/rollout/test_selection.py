"""Weights of chosen replies: golden numbers, and that they undo the choice."""

import math
from itertools import product

import pytest

from starpod.trainer.data.episode import Turn
from starpod.trainer.rollout.selection import chance, weigh, weight
from tests.trainer.turns import a_turn


def test_golden_chances_and_weights() -> None:
    """A best reply of probability 0.25, the other one at four tries, and three replies in rising score."""
    assert [chance(0.25, 0.75, tries) for tries in (2, 4, 8)] == pytest.approx([0.4375, 0.683594, 0.899887], abs=1e-6)
    weights = [weight(0.25, 0.75, tries) for tries in (2, 4, 8)]
    assert weights == pytest.approx([0.571429, 0.365714, 0.277813], abs=1e-6)
    assert weight(0.75, 0.0, 4) == pytest.approx(2.370370, abs=1e-6)
    three = ((0.5, 0.0), (0.3, 0.5), (0.2, 0.8))
    assert [chance(*each, 4) for each in three] == pytest.approx([0.0625, 0.3471, 0.5904], abs=1e-6)
    assert [weight(*each, 4) for each in three] == pytest.approx([8.0, 0.864304, 0.338753], abs=1e-6)


def test_weights_undo_the_choice_even_with_equal_scores() -> None:
    """All draws of three tries of four replies, of which two have the same score; of equal ones the first is chosen."""
    policy, scores = (0.1, 0.4, 0.3, 0.2), (0, 1, 1, 2)
    search = [0.0] * 4
    for tries in product(range(4), repeat=3):
        best = max(tries, key=lambda reply: scores[reply])
        search[best] += math.prod(policy[reply] for reply in tries)
    masses = [(0.1, 0.0), (0.7, 0.1), (0.7, 0.1), (0.2, 0.8)]
    assert [q * weight(*each, 3) for q, each in zip(search, masses, strict=True)] == pytest.approx(policy)


def tries(*replies: tuple[float, int, float]) -> list[tuple[float, Turn]]:
    """Score, token and probability of each."""
    return [(score, a_turn([token], logprobs=[math.log(likely)])) for score, token, likely in replies]


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        # All that the policy can say was tried: its own probabilities are known.
        (tries((1.0, 5, 0.25), (0.0, 6, 0.75), (0.0, 6, 0.75), (0.0, 6, 0.75)), 0.365714),
        (tries((1.0, 5, 0.75), (1.0, 5, 0.75), (0.0, 6, 0.25), (0.0, 6, 0.25)), weight(0.75, 0.25, 4)),
        # No long reply is sampled twice, so only their scores are known.
        (tries((1.0, 5, 1e-30), (0.0, 6, 1e-40), (0.0, 7, 1e-35), (0.0, 8, 1e-31)), 0.365714),
        (tries((1.0, 5, 1e-30), (1.0, 6, 1e-40), (0.0, 7, 1e-35), (0.0, 8, 1e-31)), weight(0.5, 0.5, 4)),
        # Half of it is known; the rest is shared out as one of the two tries.
        (tries((1.0, 5, 0.25), (0.0, 6, 0.25)), weight(0.5, 0.5, 2)),
        # Where all do equally well nothing was chosen.
        (tries((1.0, 5, 0.25), (1.0, 6, 0.25), (1.0, 7, 0.5)), 1.0),
        (tries((1.0, 5, 0.25)), 1.0),
    ],
)
def test_the_best_try_gets_the_weight_of_its_score(tried: list[tuple[float, Turn]], expected: float) -> None:
    weigh(tried)
    top = max(score for score, _ in tried)
    found = [reply.weight for _, reply in tried]
    assert found == pytest.approx([expected if score == top else 1.0 for score, _ in tried], abs=1e-6)
    assert expected == 1.0 or 1 / len(tried) < found[0] < 1
