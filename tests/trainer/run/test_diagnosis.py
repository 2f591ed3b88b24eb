"""Advice from the measured noise of gradients."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.configuration.config import Config
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.output.screen import Screen
from starpod.trainer.run.diagnosis import Diagnosis
from tests.trainer.run.scripted_run import make_shared
from tests.trainer.turns import a_turn


@pytest.mark.parametrize(("share", "signal", "advised"), [(0.6, 0.2, True), (1.0, 0.2, False), (0.6, 2.0, False)])
async def test_a_filter_that_drops_signal_below_the_critical_batch_is_named(
    share: float, signal: float, advised: bool
) -> None:
    told: list[str] = []
    screen = Screen()
    screen.warn = told.append  # type: ignore[method-assign]
    learner = cast(Any, SimpleNamespace(signal_and_noise=lambda groups, *, collected, **_: (signal, collected / 5)))
    config = Config.model_validate({"monitor": {"gradients": {"every": 2}}})
    diagnosis = Diagnosis(make_shared(config, screen=screen), learner, weights=cast(Any, None))
    algorithm = AlgorithmConfig.model_validate({"filter": {"value": share}})
    kept = [
        Group(number, [Episode(number, member, "toy-v1", turns=[a_turn([1])]) for member in (0, 1)])
        for number in (0, 1)
    ]
    metrics = {}
    for step in range(1, 23):
        measured = await diagnosis.measure_noise(kept, 0.4, algorithm, step, 0)
        assert bool(measured) == (step % 2 == 0)
        metrics |= measured
        assert told == [] or step >= 20
    # Two of five groups of two are kept.
    assert metrics["update/signal_to_noise"] == pytest.approx(signal)
    assert metrics["update/critical_batch_episodes"] == pytest.approx(10 / signal)
    assert any("set it to 1" in text for text in told) == advised
    reverse = AlgorithmConfig.model_validate({"preset": "seeupo"})
    assert await diagnosis.measure_noise(kept, 0.4, reverse, 2, 0) == {}
