"""Collecting by itself: what is asked for again, what is measured, and what files give."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from starpod.trainer.algorithms.terms import PROCESS
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.data.group import Group
from starpod.trainer.engines.base import EngineStats
from starpod.trainer.parallel.ranks import Parallel
from starpod.trainer.rollout.collect import CollectionFailed
from starpod.trainer.run.collecting import Collecting
from starpod.trainer.run.progress import Progress
from tests.trainer.run.scripted_run import Outcome, ScriptedCollector, TwoRanks, episode, make_collector, make_shared


def make_collecting(
    outcome: Outcome = lambda _: [1.0, 0.0],
    *,
    plays: type[ScriptedCollector] = ScriptedCollector,
    parallel: Parallel | None = None,
    offline: Sequence[Group] = (),
    **values: Any,
) -> Collecting:
    config = parse_config({"collect": {"groups": 4, "group_size": 2}} | values)
    shared = make_shared(config, parallel=parallel)
    return Collecting(shared, [make_collector(config, plays, outcome)], offline=offline)


def asked_by(collecting: Collecting) -> list[int]:
    """The numbers of the start states that were asked for."""
    return [start.id for start in cast(Any, collecting.collector).asked]


async def test_groups_that_are_too_small_are_asked_for_again_as_often_as_configured() -> None:
    collect = {"groups": 4, "group_size": 2, "max_rounds": 2}
    collecting = make_collecting(lambda n: [1.0, 0.0] if n == 0 else [1.0], collect=collect)
    collection = await collecting.collect(Progress())
    assert [group.id for group in collection.groups] == [0]
    assert asked_by(collecting) == list(range(10))
    assert collection.metrics["collect/groups_dropped"] == 9


async def test_the_cause_of_failed_episodes_is_reported_and_a_run_without_groups_ends() -> None:
    collecting = make_collecting(lambda n: [1.0, 0.0] if n % 4 else [1.0], algorithm="starpo-grpo")
    told: list[str] = []
    cast(Any, collecting)._shared.screen.warn = told.append
    await collecting.collect(Progress())
    assert told[0] == "1 episodes failed, the first one with: Unavailable: the server is gone"
    with pytest.raises(CollectionFailed, match=r"40 episodes failed .* error: Unavailable: the server is gone"):
        await make_collecting(lambda _: [], algorithm="dapo").collect(Progress())


class Buggy(ScriptedCollector):
    """A bug of the environment fails the episodes that fail."""

    async def play_group(self, *arguments: Any) -> Group:
        group = await ScriptedCollector.play_group(self, *arguments)
        for each in group.failed:
            each.error = "EnvironmentBug: lake-v1: Step raised KeyError: 'ice' (lake.py, line 9)"
        return group


async def test_bugs_of_the_environment_in_a_quarter_of_the_episodes_end_the_run_with_its_place() -> None:
    collect = {"groups": 2, "group_size": 2, "min_group_size": 1}
    with pytest.raises(
        CollectionFailed, match=r"step 0, 2 of 4 episodes failed .*KeyError: 'ice' \(lake\.py, line 9\)"
    ):
        await make_collecting(lambda _: [1.0], plays=Buggy, collect=collect).collect(Progress())
    lost = await make_collecting(lambda _: [1.0], collect=collect).collect(Progress())
    assert lost.metrics["collect/failed"] == 2, "a server that is lost may come back"


async def test_uniform_groups_are_asked_for_again_as_often_as_dynamic_sampling_says() -> None:
    algorithm = {"preset": "dapo", "dynamic_sampling": {"enabled": True, "max_rounds": 1}}
    # Of the first four one is uniform, and so is all that is asked for instead.
    collecting = make_collecting(lambda n: [1.0, 1.0] if n == 2 or n > 3 else [1.0, 0.0], algorithm=algorithm)
    collection = await collecting.collect(Progress())
    assert asked_by(collecting) == list(range(5))
    assert [group.id for group in collection.groups] == [0, 1, 3]
    assert [group.id for group in collection.rejected_groups] == [2, 4]
    assert collection.metrics["collect/groups_reasked"] == 2
    # The curve is of all that was played: choosing must not look like learning.
    assert collection.metrics["collect/success"] == 7 / 10


class Echoing(ScriptedCollector):
    """All replies describe the same."""

    async def play_group(self, *arguments: Any) -> Group:
        group = await ScriptedCollector.play_group(self, *arguments)
        for each in group.episodes:
            each.turns[0].blocks["description"] = "goal Up"
            each.turns[0].pay({"description": 0.25})
        return group


async def test_what_a_collection_repeats_is_punished_before_it_is_measured() -> None:
    rewards = {"relations": {"description": 0.5, "repetition": -0.1}}
    collecting = make_collecting(plays=Echoing, rewards=rewards, prompt={"blocks": ["description"]}, algorithm="dapo")
    collection = await collecting.collect(Progress())
    assert collection.metrics["reward/description"] == pytest.approx(-0.05)
    assert collection.groups[0].returns == [0.95, -0.05]


async def test_the_rate_of_sampling_is_that_of_all_ranks() -> None:
    collecting = make_collecting(parallel=TwoRanks(False))
    stats = iter([EngineStats(reused=5), EngineStats(sampled=30, reused=20, prefilled=45, seconds=2.0)])
    cast(Any, collecting.collector.agents.engine).stats = lambda: next(stats)
    metrics = (await collecting.collect(Progress())).metrics
    assert (metrics["rate/sampled_tokens_per_s"], metrics["rate/prompt_reused"]) == (30.0, 0.25)


async def test_offline_no_batch_holds_a_group_twice_and_a_pass_holds_each_once() -> None:
    groups = [Group(n, [episode(n, 0, 0.0), episode(n, 1, 1.0)]) for n in range(6)]

    async def batches(count: int, size: int) -> list[list[int]]:
        collecting = make_collecting(offline=groups, algorithm="starpo-grpo", collect={"groups": size})
        return [
            [group.id for group in (await collecting.collect(Progress(step))).groups] for step in range(1, count + 1)
        ]

    of_four = await batches(4, 4)
    assert all(len(set(batch)) == 4 for batch in of_four) and of_four[0] != of_four[1]
    assert sorted(group for batch in await batches(3, 2) for group in batch) == list(range(6))


async def test_a_further_pass_is_filtered_without_the_scorers_old_rewards() -> None:
    groups = [Group(n, [episode(n, 0, 0.0), episode(n, 1, 1.0)]) for n in range(2)]
    collecting = make_collecting(offline=groups, collect={"groups": 2})
    for step in (1, 2):
        collection = await collecting.collect(Progress(step))
        assert [group.returns for group in collection.groups] == [[0.0, 1.0]] * 2
        for each in (one for group in groups for one in group.episodes):
            each.turns[0].pay({PROCESS: 0.5})  # as a scorer does, before the update


async def test_replayed_groups_are_older_ones() -> None:
    collecting = make_collecting(replay={"capacity": 8, "groups": 2})
    progress = Progress()
    for expected in (0, 2):
        progress.step += 1
        collection = await collecting.collect(progress)
        groups, metrics = collecting.with_replayed(collection.groups, progress)
        assert len(groups) == 4 + expected and metrics == {"collect/stale_dropped": 0.0}
        turns = [turn for group in groups for each in group.episodes for turn in each.turns]
        assert not any(PROCESS in turn.parts for turn in turns)
        for turn in turns:
            turn.pay({PROCESS: 0.5})  # as a scorer does, before the update
    assert {group.id for group in groups[4:]} < {0, 1, 2, 3}
