"""Levels of options, each left by success."""

import json

import pytest

from starpod.trainer.rollout.config import CurriculumConfig
from starpod.trainer.rollout.curriculum import Curriculum

LEVELS = ({"size": 3}, {"size": 4}, {})


def test_a_level_is_left_when_the_mean_of_its_window_is_high_enough() -> None:
    curriculum = Curriculum(CurriculumConfig(levels=LEVELS, success=0.5, window=2))
    seen = []
    for success in (1.0, 0.2, 0.9, 0.2, 0.7, 0.4, 0.6, 1.0, 1.0):
        seen.append(curriculum.options)
        curriculum.update(success)
    # The first value of a window is never one of the level before: 0.2 and 0.9 would be enough.
    assert seen == [{"size": 3}] * 2 + [{"size": 4}] * 2 + [{}] * 5
    assert curriculum.level == 2


def test_it_continues_from_a_checkpoint_in_the_middle_of_a_window() -> None:
    config = CurriculumConfig(levels=LEVELS, success=0.8, window=3)
    one = Curriculum(config)
    for success in (0.9, 0.9, 0.9, 0.9, 0.9):
        one.update(success)
    other = Curriculum(config)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert (one.level, other.level) == (1, 1)
    assert one.update(0.7) and other.update(0.7)
    shorter = Curriculum(CurriculumConfig(levels=LEVELS[:1]))
    shorter.load_state_dict(one.state_dict())
    assert (shorter.level, shorter.options) == (0, {"size": 3})


@pytest.mark.parametrize("levels", [(), ({"size": 3},)])
def test_without_a_next_level_nothing_happens(levels: tuple[dict[str, int], ...]) -> None:
    curriculum = Curriculum(CurriculumConfig(levels=levels, window=1))
    assert not curriculum.update(1.0)
    assert (curriculum.enabled, curriculum.options) == (bool(levels), levels[0] if levels else {})
