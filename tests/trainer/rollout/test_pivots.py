"""Choice of the states that are branched: golden numbers, and what is learnt from the branches."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.diagnostics.metrics import search_metrics
from starpod.trainer.rollout.pivots import FEWEST, Recoverability, fit, sigmoid
from tests.trainer.turns import a_turn

DEPTHS = (0.25, 0.5, 0.75, 1.0)


def test_golden_regressions() -> None:
    assert fit((0.2, 0.4, 0.6, 0.8), (True, True, False, False)) == pytest.approx((-0.380970, 0.190485), abs=1e-6)
    depths = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 0.3, 0.7)
    labels = [bool(label) for label in (1, 1, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0)]
    assert fit(depths, labels) == pytest.approx((-0.856864, 0.464089), abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=40))
def test_a_fit_is_a_minimum(seen: list[tuple[float, bool]]) -> None:
    seen += [(0.3, True), (0.6, False)]
    weight, bias = fit(*zip(*seen, strict=True))
    errors = [sigmoid(weight * depth + bias) - label for depth, label in seen]
    assert math.fsum(errors) == pytest.approx(0, abs=1e-6)
    slope = math.fsum(error * depth for error, (depth, _) in zip(errors, seen, strict=True))
    assert slope + weight == pytest.approx(0, abs=1e-6)


def test_golden_pivots() -> None:
    pivots = Recoverability()
    assert pivots.chances(DEPTHS, 2.0) == pytest.approx([0.033333, 0.133333, 0.3, 0.533333], abs=1e-6)
    pivots.weight, pivots.bias, pivots.fitted = -4.0, 2.0, True
    assert pivots.chances(DEPTHS, 2.0) == pytest.approx([0.103567, 0.283335, 0.342903, 0.270195], abs=1e-6)


def played(number: int, turns: int, branched: int, won: list[bool | None], paid: float = 0.0) -> Group:
    """Return a failed episode of `turns` turns, with branches from its state before turn `branched`."""
    path = [a_turn() for _ in range(turns)]
    parent = Episode(number, 0, "lake", turns=path, success=False, end="terminal")
    branches = [
        Episode(number, 1 + index, "lake", turns=[*path[:branched], a_turn(reward=paid)], success=each)
        for index, each in enumerate(won)
    ]
    for branch in branches:
        branch.parent = (0, branched)
    return Group(number, [parent], branches=branches)


def test_deep_states_that_never_recover_lose_their_chance() -> None:
    pivots = Recoverability()
    pivots.observe([played(number, 10, 9, [False, False]) for number in range(FEWEST)])
    assert not pivots.fitted  # all alike
    pivots.observe([played(number, 10, 2, [False, True]) for number in range(FEWEST)])
    assert pivots.fitted
    assert pivots.weight < 0
    naive, learnt = Recoverability().chances(DEPTHS, 2.0), pivots.chances(DEPTHS, 2.0)
    assert learnt[-1] < naive[-1]
    again = Recoverability()
    again.load_state_dict(pivots.state_dict())
    assert (again.weight, again.bias, again.fitted) == (pivots.weight, pivots.bias, True)


def test_metrics_report_the_third_that_pivots_are_in() -> None:
    """Each branched state once, whatever the number of its branches."""
    groups = [played(number, 9, turn, [False, True]) for number, turn in enumerate((1, 2, 3, 7))]
    found = search_metrics(groups)
    assert [found[f"search/pivots_{third}"] for third in ("early", "middle", "late")] == [0.5, 0.25, 0.25]
    assert found["search/branch_depth"] == pytest.approx(13 / 36)


def test_a_better_return_counts_if_success_is_unknown() -> None:
    pivots = Recoverability()
    pivots.observe([played(number, 4, 1, [None], paid=0.5) for number in range(6)])
    pivots.observe([played(number, 4, 3, [None]) for number in range(6)])
    assert pivots.fitted
    assert pivots.weight < 0
