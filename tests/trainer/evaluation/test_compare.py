"""Paired comparison of evaluations: figures against published ones and by hand, and what is refused."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from starpod.trainer.evaluation.compare import NotComparable, compare_evaluations, compare_outcomes
from starpod.trainer.evaluation.figures import episode_results
from starpod.trainer.evaluation.statistics import mcnemar, mean_interval, paired_interval
from tests.trainer.diagnostics.synthetic import episode


def report(wins: Sequence[bool], *, samples: int = 1, first: int = 0, **changes: Any) -> dict[str, Any]:
    """Return an evaluation as `read_evaluation` does, for one environment."""
    starts = len(wins) // samples
    played = [
        episode(first + n // samples, solved=won, group=n // samples, member=n % samples) for n, won in enumerate(wins)
    ]
    figures = {"version": "1.0.0", "options": {}, "limits": {"max_turns": 8}, "results": episode_results(played)}
    return {"seeds": [first, first + starts], "environments": {"lake-v1": {**figures, **changes}}}


def test_mcnemars_exact_test() -> None:
    # Twice the smaller tail of as many fair coins.
    assert mcnemar(21, 9) == pytest.approx(0.04277, abs=5e-6)
    assert mcnemar(2, 12) == mcnemar(12, 2) == pytest.approx(0.01294, abs=5e-6)
    assert (mcnemar(0, 0), mcnemar(5, 5), mcnemar(0, 101)) == (1.0, 1.0, 2 / 2**101)


def test_the_interval_of_paired_shares_by_hand() -> None:
    # Cells 794, 150, 86, 570 of the approval ratings in Agresti's textbook: 944 against 880 of 1,600.
    low, high = paired_interval([-1.0] * 150 + [1.0] * 86 + [0.0] * 1364)
    middle = -64 / 1602
    half = 1.959964 * math.sqrt(150.5 + 86.5 - 64**2 / 1602) / 1602
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=1e-6)
    assert (low, high) == pytest.approx((-0.059, -0.021), abs=5e-4)  # Wald's interval, as the textbook has it
    # Where no pair differs nothing is proved.
    low, high = paired_interval([0.0] * 10)
    assert -0.2 < low < 0 < high == -low
    assert paired_interval([1.0] * 3)[1] == 1.0


def test_a_paired_interval_contains_the_difference_as_often_as_it_says() -> None:
    """Starts with three episodes each have mean differences that are no whole numbers."""
    rng = random.Random(1)
    for starts, first, second in ((10, 0.2, 0.9), (16, 0.02, 0.98), (40, 0.4, 0.5)):
        hits = 0
        for _ in range(1000):
            won = [[sum(rng.random() < share for _ in range(3)) for share in (first, second)] for _ in range(starts)]
            low, high = paired_interval([(after - before) / 3 for before, after in won])
            assert -1 <= low < high <= 1
            hits += low <= second - first <= high
        assert hits >= 940


def test_the_same_episodes_are_no_difference_and_a_shift_is_one() -> None:
    wins = [n % 3 == 0 for n in range(60)]
    same = compare_evaluations(report(wins), report(wins))["lake-v1"]
    assert (same["pairs"], same["success_difference"][0], same["p_value"]) == (60, 0.0, 1.0)
    better = [won or n % 3 == 1 for n, won in enumerate(wins)]
    told = compare_evaluations(report(wins), report(better))["lake-v1"]
    assert told["success"] == pytest.approx([1 / 3, 2 / 3])
    assert (told["only_first"], told["only_second"], told["p_value"]) == (0, 20, 2 / 2**20)
    assert told["success_difference"] == pytest.approx([1 / 3, *paired_interval([1.0] * 20 + [0.0] * 40)])
    # One is rewarded only for success.
    assert told["return_difference"] == pytest.approx([1 / 3, *mean_interval([float(n % 3 == 1) for n in range(60)])])


def test_several_episodes_from_a_start_count_as_one() -> None:
    first, second = [False, False, True, False] * 10, [True, True, True, False] * 10
    results = [report(wins, samples=2)["environments"]["lake-v1"]["results"] for wins in (first, second)]
    told = compare_outcomes(*results, samples=2)
    assert (told["pairs"], told["starts"], told["p_value"]) == (40, 20, None)
    # Ten differences of 1 and ten of 0; the two pairs that are added have one square in all.
    half = 1.959964 * math.sqrt(11 - 100 / 22) / 22
    assert told["success_difference"] == pytest.approx([0.5, 10 / 22 - half, 10 / 22 + half])
    assert told["return_difference"] == pytest.approx([0.5, *mean_interval([1.0, 0.0] * 10)])


def test_what_failed_in_either_is_left_out() -> None:
    one, other = report([True] * 4), report([False] * 4)
    for column in other["environments"]["lake-v1"]["results"].values():
        column.pop(1)
    told = compare_evaluations(one, other)["lake-v1"]
    assert (told["pairs"], told["success"], told["only_first"]) == (3, [1.0, 0.0], 3)
    for column in other["environments"]["lake-v1"]["results"].values():
        column.clear()
    nothing = compare_evaluations(one, other)["lake-v1"]
    assert (nothing["pairs"], nothing["success_difference"], nothing["return_difference"]) == (0, None, None)


WINS = [True, False]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (report(WINS, first=7), "the seeds differ: 0 to 1 and 7 to 8"),
        (report([*WINS, True]), "the seeds differ: 0 to 1 and 0 to 2"),
        (report(WINS, version="2.0.0"), 'the version of lake-v1 differ: "1.0.0" and "2.0.0"'),
        (report(WINS, options={"size": 5}), 'the options of lake-v1 differ: {} and {"size": 5}'),
        (report(WINS, limits={"max_turns": 4}), "the limits of lake-v1 differ"),
        ({**report(WINS), "environments": {}}, "the environments differ: lake-v1 and "),
    ],
)
def test_what_does_not_pair_is_refused(other: dict[str, Any], words: str) -> None:
    with pytest.raises(NotComparable) as refused:
        compare_evaluations(report(WINS), other)
    assert words in str(refused.value)
