"""Levels of options, each left by success, and pools of tasks, which are played by their difficulty."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import SeedRange
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.rollout.config import LevelsConfig, TaskPoolConfig
from starpod.trainer.rollout.curriculum import Levels, TaskPool

LEVELS = ({"size": 3}, {"size": 4}, {})


def test_a_level_is_left_when_the_mean_of_its_window_is_high_enough() -> None:
    curriculum = Levels(LevelsConfig(levels=LEVELS, success=0.5, window=2))
    seen = []
    for success in (1.0, 0.2, 0.9, 0.2, 0.7, 0.4, 0.6, 1.0, 1.0):
        seen.append(curriculum.options)
        curriculum.record(success)
    # The first value of a window is never one of the level before: 0.2 and 0.9 would be enough.
    assert seen == [{"size": 3}] * 2 + [{"size": 4}] * 2 + [{}] * 5
    assert curriculum.level == 2


def test_it_continues_from_a_checkpoint_in_the_middle_of_a_window() -> None:
    config = LevelsConfig(levels=LEVELS, success=0.8, window=3)
    one = Levels(config)
    for success in (0.9, 0.9, 0.9, 0.9, 0.9):
        one.record(success)
    other = Levels(config)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert (one.level, other.level) == (1, 1)
    assert one.record(0.7) and other.record(0.7)
    shorter = Levels(LevelsConfig(levels=LEVELS[:1]))
    shorter.load_state_dict(one.state_dict())
    assert (shorter.level, shorter.options) == (0, {"size": 3})


def test_members_that_a_search_chose_do_not_count() -> None:
    episodes = [Episode(0, member, "a", seed=FIRST, success=member >= 2) for member in range(4)]
    levels, tasks = Levels(LevelsConfig(levels=LEVELS, success=0.5, window=1)), pool(2)
    for curriculum in (levels, tasks):
        curriculum.update([Group(0, episodes, naive=2)])
    assert (levels.level, tasks.metrics()["tasks_never"]) == (0, 1)
    levels.update([Group(0, episodes[2:], naive=2)])
    assert levels.level == 0
    levels.update([Group(0, episodes)])
    assert levels.level == 1
    for curriculum in ({"levels": [{"size": 3}]}, {"kind": "tasks", "tasks": 5}):
        search = {"strategy": "beam", "naive": 0}
        with pytest.raises(ConfigError, match=r"raise collect\.search\.naive"):
            parse_config({"environment": {"curriculum": curriculum}, "collect": {"search": search}})


@pytest.mark.parametrize("levels", [(), ({"size": 3},)])
def test_without_a_next_level_nothing_happens(levels: tuple[dict[str, int], ...]) -> None:
    curriculum = Levels(LevelsConfig(levels=levels, window=1))
    assert not curriculum.record(1.0)
    assert (curriculum.enabled, curriculum.options) == (bool(levels), levels[0] if levels else {})


FIRST = 10_000


def pool(tasks: int, half_life: float = 1.0) -> TaskPool:
    return TaskPool(TaskPoolConfig(tasks=tasks, half_life=half_life), SeedRange(start=FIRST, stop=2**40), 7)


def play(tasks: TaskPool, number: int, success: Sequence[float], *, groups: int = 4, size: int = 8) -> list[int]:
    """Play an iteration of episodes that succeed with each task's probability. Return its tasks."""
    seeds = [tasks.choose_seed(number * groups + index, 0) for index in range(groups)]
    rng = random.Random(number)
    played = [
        Episode(group, member, "a", seed=seed, success=rng.random() < success[seed - FIRST])
        for group, seed in enumerate(seeds)
        for member in range(size)
    ]
    tasks.update([Group(group, played[group * size : (group + 1) * size]) for group in range(groups)])
    return [seed - FIRST for seed in seeds]


def test_tasks_that_are_solved_sometimes_are_played_most_and_none_starves() -> None:
    success = [0.0] * 20 + [0.5] * 10 + [1.0] * 20
    tasks = pool(50)
    counts = Counter(task for number in range(250) for task in play(tasks, number, success))
    sometimes = sum(counts[task] for task in range(20, 30))
    assert sometimes > 500, "with equal shares, it would be 200 of 1000"
    assert min(counts[task] for task in range(50)) >= 4
    values = tasks.metrics()
    assert values["tasks_never"] + values["tasks_sometimes"] + values["tasks_always"] == pytest.approx(1)
    assert 10 <= values["tasks_effective"] <= 50 and 0 < values["tasks_sometimes"] < 1


def test_the_estimates_follow_the_policy() -> None:
    tasks = pool(10)
    for number in range(30):
        play(tasks, number, [0.0] * 10)
    assert tasks.metrics()["tasks_never"] == 1
    for number in range(30, 60):
        play(tasks, number, [1.0] * 10)
    assert tasks.metrics()["tasks_always"] > 0.8


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 9), st.integers(1, 12), st.integers(0, 5), st.randoms(use_true_random=False))
def test_a_pool_continues_from_a_checkpoint_with_the_same_choices(
    size: int, groups: int, cut: int, rng: random.Random
) -> None:
    success = [rng.random() for _ in range(size)]
    whole, other = pool(size), pool(size)
    for number in range(cut):
        play(whole, number, success, groups=groups)
    other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for number in range(cut, cut + 3):
        chosen = play(whole, number, success, groups=groups)
        assert chosen == play(other, number, success, groups=groups)
        counts = Counter(chosen)
        assert (
            set(counts) <= set(range(size))
            and max(counts.values()) - min(counts.get(task, 0) for task in range(size)) <= 1
        )
    assert whole.metrics() == other.metrics()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"curriculum": "tasks"}, "environment.curriculum.tasks must be given"),
        (
            {"curriculum": {"kind": "tasks", "tasks": 5, "levels": []}},
            "environment.curriculum.levels belongs to levels",
        ),
        ({"curriculum": {"kind": "tasks", "tasks": 5}, "starts": "a.jsonl"}, "drop one of them"),
        ({"curriculum": {"kind": "tasks", "tasks": 5_001}}, "more than the seeds of seeds.train"),
    ],
)
def test_a_pool_that_cannot_be_played_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config({"environment": values, "seeds": {"train": {"start": 10_000, "stop": 15_000}}})
