"""The steps of a run: what is asked for again, what a checkpoint brings back, what the end does."""

import random
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.files import read_groups, write_episodes
from starpod.trainer.data.group import Group
from starpod.trainer.data.updates import read_tokens, read_verdicts
from starpod.trainer.engines.base import EngineError
from starpod.trainer.loop import train
from starpod.trainer.rollout.collect import Collected, Start
from starpod.trainer.run.interrupts import Interrupted
from starpod.trainer.run.progress import Progress, StopReason
from starpod.trainer.run.run import Run
from tests.trainer.run.scripted_run import (
    ScriptedCollector,
    TwoRanks,
    asked_by,
    episode,
    make_run,
    save,
    saved_by,
    told_by,
)
from tests.trainer.tiny_learner import built, group_of


async def played(run: Run) -> list[Group]:
    """Return the groups that the filter keeps in a further step."""
    run.begin_step()
    return run.filter(await run.collect())


async def test_uniform_groups_that_leave_nothing_are_no_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path, lambda _: [1.0, 1.0], algorithm="dapo")
    for _ in range(5):
        await run.learn(await played(run))
        run.finish_step()
    assert "the filter kept no group" in str(run.schedule.reason_to_stop())
    assert run.report.metrics["collect/response_diversity"] == 0, "it is that of all that was played"


def test_the_first_iterations_show_how_many_fit_into_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "elapsed", 30.0)
    for iterations, count in ((50, 20), (10, 10)):
        run = make_run(tmp_path, path=str(iterations), stop={"minutes": 2, "iterations": iterations})
        for step in range(1, 7):
            run.progress.step = step
            run.report._forecast()
            told = f"at this speed, stop.minutes=2 has room for {count} iterations" if step >= 5 else ""
            assert run.output.screen.doing == told


async def test_all_that_was_played_is_kept_and_ends_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path, lambda n: [1.0, 1.0] if n == 1 else [1.0, 0.0], algorithm="dapo")
    run.begin_step()
    await run.collect()
    (file,) = run.output.folder.episodes.path.iterdir()
    assert file.name == "train-000001.jsonl.gz"
    # What dynamic sampling passed over was played as well.
    assert [group.returns for group in read_groups(file)].count([1.0, 1.0]) == 1
    assert (
        run.report.metrics["end/terminal"] == 1.0
        and run.report.metrics["end/max_turns"] == run.report.metrics["end/agent"] == 0.0
    )
    for bound, words in ((0, ""), (1e-4, "take more than collect.keep_mib (0.0001) and are not kept")):
        collect = {"groups": 4, "group_size": 2, "keep_mib": bound}
        run = make_run(tmp_path, path=f"run-{bound}", collect=collect)
        told = told_by(run)
        await run.collect()
        assert list(run.output.folder.episodes.path.iterdir()) == []
        assert words in "".join(told)


async def test_what_the_filter_and_the_update_made_of_the_episodes_is_kept(tmp_path: Path) -> None:
    algorithm = {"preset": "dapo", "filter": {"strategy": "top_fraction", "value": 0.5}}
    run = make_run(tmp_path, lambda n: [1.0, 1.0] if n == 1 else [1.0, n / 10], algorithm=algorithm)
    kept = await played(run)
    run.progress.version = 1  # what was made up, no policy sampled
    await run.learn(kept)
    (file,) = run.output.folder.episodes.path.glob("*.update.gz")
    found = read_verdicts(file)
    assert {group for group, verdict in found.items() if verdict.kept} == {group.id for group in kept} == {0, 2}
    assert "dynamic sampling" in found[1].why
    assert found[3].why == "Its reward_std of 0.495 is number 3 of 4; top_fraction 0.5 keeps 2."
    assert read_tokens(file, 0, 1) is not None and read_tokens(file, 3, 1) is None


async def test_an_advantage_over_scored_turns_can_be_computed_again_from_what_is_kept(tmp_path: Path) -> None:
    """iStar's: (R - mean of the others) + (process - mean of the others), for two episodes of one turn."""
    algorithm = {"preset": "dapo", "advantage": "istar", "dynamic_sampling": {"enabled": False}}

    def score(episodes: Sequence[Episode]) -> list[list[float]]:
        return [[episode.member + episode.group / 4] for episode in episodes]

    scorer = SimpleNamespace(score=score, fit=lambda groups: {})
    run = make_run(tmp_path, algorithm=algorithm, scorer={"kind": "implicit"}, turn_scorer=scorer)
    kept = await played(run)
    run.progress.version = 1  # what was made up, no policy sampled
    await run.learn(kept)
    (file,) = run.output.folder.episodes.path.glob("*.update.gz")
    groups = read_groups(run.output.folder.path)
    assert len(groups) == 4
    for group in groups:
        one, other = group.episodes
        process = [each.turns[0].parts["process"] for each in (one, other)]
        assert process == [group.id / 4, 1 + group.id / 4]
        outcomes = [each.total_reward - own for each, own in zip((one, other), process, strict=True)]
        expected = outcomes[0] - outcomes[1] + process[0] - process[1]
        for member, sign in ((0, 1), (1, -1)):
            tokens = read_tokens(str(file), group.id, member)
            assert tokens is not None and tokens.advantages.tolist() == [pytest.approx(sign * expected, abs=1e-3)]


async def test_nothing_to_train_on_is_a_skipped_update(tmp_path: Path) -> None:
    run = make_run(tmp_path, algorithm="starpo-grpo")
    before = run.progress.version
    await run.learn([Group(0, [Episode(0, 0, "lake", end="context"), Episode(0, 1, "lake", end="context")])])
    assert run.report.metrics["update/skipped"] == 1
    assert run.progress.version == before


def make_offline_run(tmp_path: Path, rewards: Sequence[float], **values: Any) -> Run:
    """A run on groups of two episodes in a file, whose gradients are measured."""
    write_episodes(tmp_path / "played.jsonl", [episode(n // 2, n % 2, reward) for n, reward in enumerate(rewards)])
    replay = {"offline": str(tmp_path / "played.jsonl")}
    return make_run(tmp_path, replay=replay, monitor={"gradients": {"every": 1}}, **values)


async def test_offline_episodes_are_never_taken_for_the_present_policys(tmp_path: Path) -> None:
    """Version 0 of another run sampled them, and this run is at version 0: their log-probabilities are other ones."""
    run = make_offline_run(tmp_path, [0.0, 1.0] * 2, algorithm="starpo-grpo")
    await run.learn(await played(run))
    assert run.report.metrics["gradients/1/groups"] >= 1


async def test_groups_that_the_filter_drops_are_diagnosed(tmp_path: Path) -> None:
    run = make_offline_run(tmp_path, [1.0] + [0.0] * 7, algorithm="starpo-s")
    kept = await played(run)
    assert (len(kept), run.report.metrics["gradients/zero/groups"], run.report.metrics["gradients/1/groups"]) == (
        1,
        3,
        1,
    )


async def test_a_checkpoint_brings_back_its_evaluation_and_the_reason_to_stop(tmp_path: Path) -> None:
    early = {"early_stop": {"low_success_times": 1}}
    run = make_run(tmp_path, lambda _: [0.0], monitor=early)
    run.begin_step()
    await run.evaluate()
    reason = run.schedule.reason_to_stop()
    assert reason is not None and "success was below" in reason.text and not reason.limits
    await save(run)

    again = make_run(tmp_path, monitor=early)
    again.restore(loaded := saved_by(again))
    assert again.evaluating.score == (0.0, 0.0)
    assert again.schedule.reason_to_stop() == reason
    # Saved once more before anything else happened, as a signal does: its score is not lost.
    await save(again)
    saved = saved_by(again)
    assert saved.path != loaded.path and again.output.checkpoints.best() is not None

    regardless = make_run(tmp_path, monitor={"early_stop": {"low_success": False}})
    regardless.restore(saved)
    assert regardless.schedule.reason_to_stop() is None


@pytest.mark.parametrize(
    ("change", "same_task"),
    [
        ({"environment": {"options": {"size": 6}}}, False),
        ({"environment": {"max_turns": 3}}, False),
        ({"evaluation": {"temperature": 0.5}}, False),
        ({"seeds": {"selection": {"start": 6000, "stop": 7000}}}, False),
        ({"evaluation": {"greedy": True}}, True),
    ],
)
async def test_scores_of_another_task_do_not_count_after_a_resumption(
    tmp_path: Path, change: dict[str, dict[str, Any]], same_task: bool
) -> None:
    values = {"stop": {"success": 0.5}, "checkpoint": {"keep": 9}, "monitor": {"early_stop": {"low_success": False}}}
    run = make_run(tmp_path, lambda _: [1.0], **values)
    run.begin_step()
    await run.evaluate()
    await save(run)
    run.begin_step()
    await save(run)
    assert run.schedule.reason_to_stop() is not None

    evaluation = {"episodes": 4, "reference": [], "every": 1, **change.get("evaluation", {})}
    again = make_run(tmp_path, lambda _: [0.0], **{**values, **change, "evaluation": evaluation})
    again.restore(saved_by(again))
    assert (again.schedule.reason_to_stop() is not None) == same_task
    assert again.evaluating.is_done(1) == again.evaluating.is_best(1) == same_task
    checkpoints = again.output.checkpoints
    assert (checkpoints.best() is not None) == (checkpoints.folder / "best").exists() == same_task
    await again.evaluate()
    await save(again)
    best = checkpoints.best()
    assert best is not None and best.step == (1 if same_task else 2) and again.evaluating.is_best(best.step)


async def test_a_budget_of_tokens_is_counted_over_a_resumption(tmp_path: Path) -> None:
    run = make_run(tmp_path, lambda _: [1.0, 0.0], stop={"tokens": 10**6})
    run.begin_step()
    sampled = sum(episode.sampled_tokens for group in await run.collect() for episode in group.episodes)
    assert run.progress.tokens == sampled > 0
    await save(run)

    again = make_run(tmp_path, lambda _: [1.0, 0.0], stop={"tokens": 2 * sampled})
    again.restore(saved_by(again))
    assert again.schedule.reason_to_stop() is None
    again.begin_step()
    await again.collect()
    assert again.schedule.reason_to_stop() == (
        f"{2 * sampled:,} tokens were sampled: stop.tokens={2 * sampled}",
        ("tokens",),
    )


async def test_a_checkpoint_brings_back_the_random_streams(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(1).item(), float(np.random.random()), random.random()]

    run = make_run(tmp_path)
    await save(run)
    expected = draw()
    make_run(tmp_path).restore(saved_by(run))
    assert draw() == expected


def progress(run: Run) -> Any:
    """Return the run's part of a checkpoint, without the clock."""
    return {**saved_by(run).state, "elapsed": None}


async def test_an_interrupted_warm_start_continues_from_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []

    def begin(name: str) -> Run:
        optimizer = {"lr": 1e-3, "critic_lr": 1e-3}
        warm_start = {"steps": 5, "batch_size": 2}
        run = make_run(tmp_path, path=name, algorithm="starpo-ppo", optimizer=optimizer, warm_start=warm_start)
        run.warm_start.demonstrations = group_of(built("none"), 1, (1.0,) * 4).episodes

        async def play_references() -> dict[str, Any]:
            played.append(name)
            return {"": {"random": {"success": 0.5}}}

        monkeypatch.setattr(run.evaluating.held_out, "play_references", play_references)
        return run

    whole = begin("whole")
    await whole.prepare()
    await save(whole)
    cut = begin("cut")
    steps = iter(range(5))

    def interrupt() -> None:
        if next(steps) == 2:
            cut.shared.interrupts.signal = signal.SIGINT
            raise Interrupted

    monkeypatch.setattr(cut.shared.interrupts, "raise_if_requested", interrupt)
    assert await train(cut) == ("stopped by SIGINT and saved", ())
    assert (saved_by(cut).step, next(steps)) == (0, 3)
    resumed = begin("cut")
    resumed.warm_start.demonstrations = ()
    resumed.restore(saved_by(resumed))
    assert not resumed.warm_start.over
    await resumed.prepare()
    await save(resumed)
    assert played == ["whole", "cut"] and resumed.warm_start.references
    assert progress(resumed) == progress(whole)
    for part, tensors in saved_by(whole).tensors.items():
        assert all(torch.equal(saved_by(resumed).tensors[part][name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("phase", "step", "saved"),
    [("evaluate", 0, 0), ("collect", 1, 0), ("sync", 2, 1), ("evaluate", 2, 2), ("evaluate_final", 2, 2)],
)
async def test_an_engine_that_dies_in_any_phase_costs_no_finished_step(
    tmp_path: Path, phase: str, step: int, saved: int
) -> None:
    """All groups are uniform, so there is nothing to learn from them."""
    run = make_run(tmp_path, lambda _: [1.0, 1.0], algorithm="dapo", stop={"iterations": 2}, checkpoint={"every": 25})
    act = getattr(run, phase)

    async def die() -> Any:
        if run.progress.step == step:
            raise EngineError("the engine is dead")
        return await act()

    setattr(run, phase, die)
    with pytest.raises(EngineError):
        await train(run)
    assert saved_by(run).step == saved


@pytest.mark.parametrize("part", ["rollouts.write_rollouts", "updating.weights.leave_gpu"])
async def test_an_error_before_the_weights_change_leaves_a_checkpoint_of_the_last_finished_step(
    tmp_path: Path, part: str
) -> None:
    """The checkpoint has cursors, levels, random states and replay buffer as they were at the beginning of the step."""
    environment = {"id": "lake", "curriculum": {"levels": [{"a": 1}, {}], "success": 0.4, "window": 3}}
    run = make_run(tmp_path, environment=environment, replay={"capacity": 8, "groups": 2})
    await run.prepare()
    for _ in range(2):
        await played(run)
        run.finish_step()
    await save(run)
    expected = progress(run)
    shutil.rmtree(run.output.checkpoints.folder)
    run.persistence._saved_step = -1

    async def fail(*_: object) -> None:
        raise OSError("no space")

    name, _, method = part.rpartition(".")
    setattr(attrgetter(name)(run), method, fail)
    run.begin_step()
    torch.rand(1)
    with pytest.raises(OSError) as raised:
        await run.learn(await run.collect())
    await run.persistence.rescue(raised.value)
    assert (saved_by(run).step, progress(run)) == (2, expected)


@pytest.mark.parametrize("gradients", [0, 1])
async def test_an_engine_that_sleeps_is_halted_from_the_first_pass_of_the_policy_to_the_next_weights(
    tmp_path: Path, gradients: int
) -> None:
    run = make_run(tmp_path, engine={"name": "vllm", "sleep": True}, monitor={"gradients": {"every": gradients}})
    log: list[str] = []

    async def note(what: str, *_: object) -> None:
        log.append(what)

    async def die() -> None:
        raise EngineError("it died falling asleep")

    engine = cast(Any, run.collecting.collector.agents.engine)
    for verb in ("pause", "load", "resume"):
        setattr(engine, verb, partial(note, verb))
    learner = cast(Any, run.updating.learner)
    learner.learn = learner.gradients = lambda *_, **__: {}
    await run.prepare()
    kept = await played(run)
    assert log == ["pause"] * gradients
    if gradients:
        await run.sync()  # although there are no new weights: it was halted for nothing
        assert log == ["pause", "load", "resume"]
        return
    await run.learn(kept)
    assert log == ["pause"]
    await run.sync()
    assert log == ["pause", "load", "resume"]
    run.finish_step()
    run.begin_step()
    kept = run.filter(kept)
    engine.pause = die
    with pytest.raises(EngineError) as raised:
        await run.learn(kept)
    await run.persistence.rescue(raised.value)
    assert saved_by(run).step == 1, "no weight had changed"


async def test_a_kl_term_cannot_be_added_to_a_run_that_kept_no_reference(tmp_path: Path) -> None:
    run = make_run(tmp_path, algorithm="starpo-s")
    await run.prepare()
    await save(run)
    with pytest.raises(ConfigError, match=r"kl\.where"):
        make_run(tmp_path, algorithm="starpo-ppo").restore(saved_by(run))


@pytest.mark.parametrize(("mine", "others"), [(False, False), (False, True), (True, False)])
async def test_all_ranks_evaluate_the_end_or_none_does(tmp_path: Path, mine: bool, others: bool) -> None:
    run = make_run(tmp_path, parallel=TwoRanks(others))
    run.shared.interrupts.signal = signal.SIGTERM if mine else None
    await run.finish(StopReason("over"))
    assert bool(asked_by(run)) == (not mine and not others)


async def test_the_same_weights_are_not_evaluated_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.begin_step()
    await run.evaluate()
    await run.finish(StopReason("over"))
    assert len(asked_by(run)) == 2 * 4  # the final one is on other start states
    assert run.evaluating.score == (0.5, 0.5) and run.output.checkpoints.best() is not None


async def test_the_final_figure_is_the_best_checkpoints_on_seeds_that_did_not_choose_it(tmp_path: Path) -> None:
    seen: list[tuple[str, list[int], float]] = []
    worth = {"selection": iter([0.0, 1.0, 0.0]), "evaluation": iter([0.0])}

    async def collect(self: Any, starts: Sequence[Start], size: int, *, min_size: int = 1) -> Collected:
        weight = next(run.updating.learner.policies.parameters()).flatten()[0].item()
        seen.append((self.agents.purpose, [start.seed for start in starts], weight))
        value = next(worth[self.agents.purpose])
        return Collected([Group(start.id, [replace(episode(start.id, 0, value), seed=start.seed)]) for start in starts])

    run = make_run(tmp_path, plays=type("Player", (ScriptedCollector,), {"collect": collect}))
    for _ in range(3):
        run.begin_step()
        with torch.no_grad():
            next(run.updating.learner.policies.parameters()).flatten()[0] = float(run.progress.step)
        run.progress.version += 1
        await run.evaluate()
        assert run.evaluating.is_best(run.progress.step) == (run.progress.step in (1, 2)), (
            "what is best is saved when it is found"
        )
        await save(run)
    await run.finish(StopReason("over"))
    assert [weight for _, _, weight in seen] == [1.0, 2.0, 3.0, 2.0]
    assert [(purpose, seeds[0]) for purpose, seeds, _ in seen] == [("selection", 5000)] * 3 + [("evaluation", 0)]
    final = run.output.folder.read_final()
    assert final is not None
    assert (final["step"], final["last_step"], final["success"], final["seeds"]) == (2, 3, 0.0, [0, 4])
    assert final["results"] == {"seed": [0, 1, 2, 3], "sample": [0] * 4, "success": [False] * 4, "return": [0.0] * 4}
    assert [file.name for file in run.output.folder.episodes.files("final")] == ["final-000002.jsonl"]
    # The checkpoint to go on from holds the last weights.
    saved = saved_by(run)
    assert (saved.step, saved.state["version"]) == (3, 3)


async def test_a_time_limit_counts_from_the_first_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, stop={"minutes": 1})
    clock = SimpleNamespace(now=run.progress._start_time)
    monkeypatch.setattr("starpod.trainer.run.progress.perf_counter", lambda: clock.now)

    async def long_imitation() -> dict[str, Any]:
        clock.now += 90
        return {}

    monkeypatch.setattr(run.evaluating.held_out, "play_references", long_imitation)
    await run.prepare()
    assert run.schedule.reason_to_stop() is None
    clock.now += 60
    assert run.schedule.reason_to_stop() == ("the time is up: stop.minutes=1", ("minutes",))
