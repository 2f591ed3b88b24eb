"""Asynchronous collection: the bound of staleness, episodes during an update, and groups that a resumed run drops."""

import asyncio
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.diagnostics.metrics import spent_in
from starpod.trainer.rollout.collect import Start
from starpod.trainer.run.run import Run
from tests.trainer.run.scripted_run import ScriptedCollector, asked_by, episode, make_run, save, saved_by
from tests.trainer.turns import a_turn


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowCollector(ScriptedCollector):
    """A collector whose episodes take a number of iterations of the event loop.

    Their first token has the policy's version at their beginning, and the last token that at their end. The groups in
    `lost` fail.
    """

    version: Callable[[], int]
    slow: Callable[[int], int]
    lost: Collection[int]

    async def play_group(self, start: Start, size: int, begun: dict[int, Episode] | None = None) -> Group:
        assert begun is not None
        if start.id in self.lost:
            return Group(start.id, [], [Episode(start.id, 0, "lake", end="failed", error="Unreachable")])
        if not begun:
            first = self.version()
            for _ in range(self.slow(start.id)):
                await asyncio.sleep(0)
            for member in range(size):
                begun[member] = episode(start.id, member, float(member % 2))
                versions = [first, self.version()]
                begun[member].turns = [a_turn([1, 2], logprobs=[-1.0, -1.0], versions=versions, reward=member % 2)]
        self.asked.append(start)
        return Group(start.id, list(begun.values()))


def make_slow_run(
    tmp_path: Path,
    *,
    plays: type[SlowCollector] | None = None,
    slow: Callable[[int], int] = lambda start: 1,
    lost: Collection[int] = (),
    **values: Any,
) -> Run:
    made = partial(plays or SlowCollector, version=lambda: run.progress.version, slow=slow, lost=lost)
    run = make_run(tmp_path, plays=made, **values)
    return run


async def collect(run: Run) -> list[int]:
    """The groups of one iteration, whose update takes a while and changes nothing but the version."""
    run.begin_step()
    groups = await run.collect()
    for _ in range(5):
        await asyncio.sleep(0)
    run.progress.version += run.shared.settings.now.replay.reuse
    return [group.id for group in groups]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    bound=st.integers(0, 5),
    reuse=st.integers(1, 2),
    groups=st.integers(1, 3),
    lost=st.sets(st.integers(0, 20), max_size=8),
    slow=st.lists(st.integers(0, 60), min_size=1, max_size=7),
)
def test_nothing_is_staler_than_the_bound_and_nothing_is_passed_over(
    tmp_path: Path, bound: int, reuse: int, groups: int, lost: set[int], slow: list[int]
) -> None:
    """Whatever takes how long, and whatever is lost and replaced."""
    assume(not 0 < bound < reuse)

    async def train() -> None:
        run = make_slow_run(
            tmp_path,
            slow=lambda start: slow[start % len(slow)],
            lost=lost,
            collect={"groups": groups, "group_size": 2, "max_staleness": bound, "max_rounds": 30, "keep_mib": 0},
            replay={"reuse": reuse},
            stop={"iterations": 6},
        )
        taken: list[int] = []
        for _ in range(6):
            taken += await collect(run)
            assert run.report.metrics.get("collect/staleness_max", 0) <= bound
            assert run.report.metrics.get("collect/stale_groups", 0) == 0
        # In order, none twice, none but the lost left out; and nothing was played that no step trains on.
        assert taken == [start for start in range(100) if start not in lost][: 6 * groups]
        assert len(run.collecting.ahead) == 0

    asyncio.run(train())


async def test_the_budget_is_used(tmp_path: Path) -> None:
    """Two steps ahead, and no further: tokens are as old as they may be, and no older."""
    run = make_slow_run(tmp_path, collect={"groups": 4, "group_size": 2, "max_staleness": 2}, stop={"iterations": 4})
    oldest = []
    for admitted in (12, 16, 16, 16):
        await collect(run)
        assert asked_by(run) == list(range(admitted))
        oldest.append(run.report.metrics["collect/staleness_max"])
    assert oldest == [0, 1, 2, 2]


async def test_what_a_step_has_spent_is_what_was_played_for_it(tmp_path: Path) -> None:
    """Eight episodes of a turn and two tokens, whatever was played meanwhile for later steps."""
    run = make_slow_run(tmp_path, collect={"groups": 4, "group_size": 2, "max_staleness": 2}, stop={"iterations": 4})
    for _ in range(4):
        await collect(run)
        assert spent_in(run.report.metrics) == {"environment_steps": 8.0, "sampled_tokens": 16.0, "forks": 0.0}
    searched = {"environment_steps": 30.0, "sampled_tokens": 50.0, "forks": 4.0}
    assert spent_in(run.report.metrics | {f"search/{name}": value for name, value in searched.items()}) == searched


async def test_episodes_continue_during_an_update(tmp_path: Path) -> None:
    """The update waits for a group of a later step, which waits for the update to begin."""
    collect = {"groups": 4, "group_size": 2, "max_staleness": 1}
    loop, updating, played = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    class Held(SlowCollector):
        async def play_group(self, start: Start, size: int, begun: dict[int, Episode] | None = None) -> Group:
            if start.id < 4:
                return await SlowCollector.play_group(self, start, size, begun)
            await updating.wait()
            played.set()
            await asyncio.sleep(60)
            raise AssertionError

    def learn(*arguments: Any, **named: Any) -> dict[str, float]:
        loop.call_soon_threadsafe(updating.set)
        assert played.wait(60)
        return {}

    run = make_slow_run(tmp_path, plays=Held, collect=collect, algorithm="starpo-grpo")
    run.updating.learner.learn = learn  # type: ignore[method-assign]
    run.begin_step()
    await run.learn(run.filter(await run.collect()))
    assert run.report.metrics["time/overlap_share"] > 0
    await run.collecting.ahead.close()


async def test_what_is_too_old_after_a_change_of_the_bound_is_dropped_and_replaced(tmp_path: Path) -> None:
    """A checkpoint keeps all admitted groups. A run with a smaller bound replaces groups that are too old."""
    many = {"groups": 2, "group_size": 2, "max_staleness": 3}
    run = make_slow_run(tmp_path, collect=many)
    for _ in range(2):
        await collect(run)
    await save(run)
    assert sorted(asked_by(run)) == list(range(10))

    same = make_slow_run(tmp_path, collect=many)
    loaded = same.output.checkpoints.latest()
    assert loaded is not None
    same.restore(loaded)
    assert len(same.collecting.ahead) == 6
    assert await collect(same) == [4, 5]
    assert same.report.metrics["collect/staleness_max"] == 2 and same.report.metrics["collect/stale_groups"] == 0

    strict = make_slow_run(tmp_path, collect={**many, "max_staleness": 1})
    strict.restore(loaded)
    # 4 to 7 were begun by version 0, 8 and 9 by version 1; the policy has version 2.
    assert await collect(strict) == [8, 9]
    assert strict.report.metrics["collect/stale_groups"] == 4 and strict.report.metrics["collect/staleness_max"] == 1
    for each in (run, same, strict):
        await each.collecting.ahead.close()


def test_bounds_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_staleness 1 .* replay\.reuse 2"):
        parse_config({"collect": {"max_staleness": 1}, "replay": {"reuse": 2}})
    with pytest.raises(ConfigError, match=r"replay\.offline collects none"):
        parse_config({"collect": {"max_staleness": 1}, "replay": {"offline": "episodes"}})
    assert Config().collect.max_staleness == 0


class Whole(ScriptedCollector):
    """Plays all members of a group, whose number is that of its stage."""

    async def play_group(self, start: Start, size: int, begun: dict[int, Episode] | None = None) -> Group:
        return Group(start.id, [episode(start.id, member, float(member)) for member in range(size)])


async def test_a_resumed_run_too_finishes_groups_in_the_stage_in_which_they_began(tmp_path: Path) -> None:
    collect = {"groups": 2, "group_size": 3, "max_staleness": 1}
    stages = [{"until": {"iteration": 1}, "set": {"collect.group_size": 2}}]
    whole = make_run(tmp_path, plays=Whole, collect=collect, stages=stages)
    whole.begin_step()
    await whole.collect()
    whole.finish_step()
    assert whole.shared.settings.now.collect.group_size == 3
    await save(whole)
    resumed = make_run(tmp_path, plays=Whole, collect=collect, stages=stages)
    resumed.restore(saved_by(whole))
    for run in (whole, resumed):
        sizes = []
        for _ in range(2):
            run.begin_step()
            sizes.append([len(group.episodes) for group in await run.collect()])
        assert sizes == [[2, 2], [3, 3]]
        await run.collecting.ahead.close()
