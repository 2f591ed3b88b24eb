"""Several environments in one run: how they are configured, what each gets of a collection, and what is never mixed."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.agents.base import Task
from starpod.trainer.algorithms.advantages import advantages_by_kind, compute_advantages
from starpod.trainer.algorithms.config import AlgorithmConfig
from starpod.trainer.algorithms.filters import filter_groups
from starpod.trainer.algorithms.sections import TopFraction
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import SeedCursor
from starpod.trainer.data.batch import Advantages, RolloutBatch
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.group import Group
from starpod.trainer.evaluation.figures import overall
from starpod.trainer.evaluation.statistics import interval_of_mean, wilson_interval
from starpod.trainer.rollout.collect import Start
from starpod.trainer.rollout.mixture import Mixture
from tests.trainer.algorithms.builders import a_rollout
from tests.trainer.run.scripted_run import ScriptedCollector, make_run
from tests.trainer.turns import a_turn

TWO = {"arms": {"id": "bandit-v1", "weight": 1}, "lake": {"id": "frozen_lake-v1", "weight": 3}}


def several(**values: Any) -> Config:
    return parse_config({"environments": TWO} | values)


def test_keys_of_an_environment_override_sections_of_the_run() -> None:
    lake = {"prompt": {"words": 7}, "evaluation": {"options": {"size": 5}, "episodes": 9}, "rewards": {"shaping": {}}}
    config = several(
        environments={"arms": "bandit-v1", "lake": {"id": "frozen_lake-v1", "options": {"size": 4, "map": []}, **lake}},
        prompt={"style": "compact"},
        warm_start={"steps": 3, "noise": 0.1},
    )
    arms, lake_ = config.tasks
    assert (arms.name, arms.environment.id, arms.weight) == ("arms", "bandit-v1", 1.0)
    assert (arms.prompt.words, lake_.prompt.words, lake_.prompt.style) == (100, 7, "compact")
    assert (arms.evaluation.episodes, lake_.evaluation.episodes) == (256, 9)
    assert lake_.held_out.options == {"size": 5, "map": []}
    assert (lake_.warm_start.steps, lake_.warm_start.noise) == (3, 0.1)
    # config.yaml holds the one form that is in use, and gives the same run again.
    assert "environment" not in config.to_dict() and "environments" not in Config().to_dict()
    assert parse_config(config.to_dict()) == config


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"environment": "sokoban-v1"}, "environment and environments are both given"),
        ({"evaluation": {"options": {"size": 4}}}, "give environments.NAME.evaluation.options"),
        ({"environments": {"Lake 1": "frozen_lake-v1"}}, "environments.Lake 1: the name is used in metrics"),
        ({"environments": {"lake": {"weight": 2}}}, "environments.lake.id must be given: Name"),
        ({"environments": {"lake": {"id": "a", "weight": 0}}}, "environments.lake.weight: Input should be greater"),
        ({"environments": {"lake": {"id": "a", "wait": 2}}}, "no key 'environments.lake.wait'; did you mean weight"),
        ({"environments": {"lake": {"id": "a", "workers": 2, "addresses": "b:1"}}}, "environments.lake: "),
        ({"environments": {"lake": {"id": "a", "prompt": {"word": 2}}}}, "'environments.lake.prompt.word'; did you"),
        ({"environments": {"lake": {"id": "a", "prompt": {"words": 0}}}}, "environments.lake.prompt.words: Input"),
        ({"environments": {"lake": {"id": "a", "warm_start": {"lr": 1}}}}, "give warm_start.lr"),
        ({"environments": {"lake": {"id": "a", "evaluation": {"every": 1}}}}, "give evaluation.every"),
        ({"environments": {"lake": {"id": "a", "evaluation": {"episodes": 9999}}}}, "fewer than the 9999 episodes"),
    ],
)
def test_mistakes_are_reported(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        several(**values)
    assert told in str(error.value) and "\n" not in str(error.value)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.lists(st.integers(0, 9), max_size=12))
def test_groups_are_divided_by_weight_wherever_a_checkpoint_falls(weights: list[int], counts: list[int]) -> None:
    environments = {f"e{number}": {"id": "a", "weight": weight} for number, weight in enumerate(weights)}
    tasks = parse_config({"environments": environments}).tasks
    whole, cut = Mixture(tasks), Mixture(tasks)
    given_, names = dict.fromkeys(environments, 0), []
    for count in counts:
        cut, before = Mixture(tasks), cut
        cut.load_state_dict(json.loads(json.dumps(before.state_dict())))
        names += cut.divide(count)
    assert names == whole.divide(sum(counts))
    for number, name in enumerate(names, 1):
        given_[name] += 1
        for each, weight in zip(environments, weights, strict=True):
            share = number * weight / sum(weights)
            assert given_[each] < share + 1 and given_[each] > share - len(weights)


def test_other_weights_begin_the_division_anew() -> None:
    before = Mixture(several().tasks)
    assert before.divide(4) == ["lake", "arms", "lake", "lake"]
    after = Mixture(several(environments={**TWO, "lake": "frozen_lake-v1"}).tasks)
    after.load_state_dict(before.state_dict())
    # Nothing is made up for: with the old counts the next groups would all be of the other one.
    assert after.divide(4) == ["arms", "lake", "arms", "lake"]


def test_starts_have_ids_of_their_own_and_the_options_of_the_level() -> None:
    curriculum = {"levels": [{"size": 3}, {"size": 4}, {}], "success": 0.5, "window": 1}
    environments = {**TWO, "lake": {"id": "frozen_lake-v1", "curriculum": curriculum}}
    mixture, cursor = Mixture(several(environments=environments).tasks), SeedCursor(Config().seeds.train)
    assert mixture.starts(["lake", "arms"], cursor) == [Start(0, 10_000, "lake", {"size": 3}), Start(1, 10_001, "arms")]
    assert mixture.update([Group(0, [played("lake", 0, 0, 1.0)]), Group(1, [played("arms", 1, 0, 0.0)])]) == ["lake"]
    assert mixture.starts(["lake"], cursor) == [Start(2, 10_002, "lake", {"size": 4})]
    # What was begun before says nothing of the new level.
    assert mixture.update([Group(0, [played("lake", 0, 1, 1.0)])]) == []
    assert mixture.levels() == {"lake": 1}
    untold = played("lake", 3, 0, 1.0)
    untold.success = None
    assert mixture.silent([Group(3, [untold])]) == ["lake"]
    assert mixture.silent([Group(3, [untold, played("lake", 3, 1, 0.0)])]) == []


def played(task: str, group: int, member: int, reward: float) -> Episode:
    turn = a_turn(logprobs=[-1.0], reward=reward)
    return Episode(group, member, "any-v1", turns=[turn], end="terminal", success=reward > 0, task=task)


@pytest.mark.parametrize(
    ("advantage", "options"),
    [
        ("grpo", {}),
        ("reinforce_plus_plus", {"whiten": True}),
        ("reinforce_plus_plus_baseline", {"whiten": True}),
        ("gae", {"whiten": True}),
    ],
)
def test_the_rewards_of_one_environment_do_not_change_the_advantages_of_another(
    advantage: str, options: dict[str, Any]
) -> None:
    config = AlgorithmConfig.model_validate({"preset": "dapo", "advantage": advantage, **options})
    own = [[0.0, 1.0], [1.0, 2.0], [0.0, 0.0], [3.0, 1.0]]

    def advantages_of(rollout: RolloutBatch) -> Advantages:
        for episode, task in zip(rollout.episodes, ["a", "b"] * 4, strict=True):
            episode.task = task
        return advantages_by_kind(config, rollout)

    def mixed(factor: float) -> torch.Tensor:
        rows = [row for mine in own for row in (mine, [factor * value for value in mine])]
        values = [[0.5, 0.25]] * 8
        rollout = a_rollout(rows, groups=[0, 1, 0, 1, 2, 3, 2, 3], values=values)
        return advantages_of(rollout).advantages_BT

    alone = compute_advantages(config, a_rollout(own, groups=[0, 0, 2, 2], values=[[0.5, 0.25]] * 4)).advantages_BT
    torch.testing.assert_close(mixed(1000.0)[0::2], alone, rtol=0, atol=0)
    assert not torch.equal(mixed(1.0)[1::2], torch.zeros_like(alone))
    if advantage == "gae":
        rollout = a_rollout(own * 2, groups=[0, 0, 1, 1, 2, 2, 3, 3], values=[[0.5, 0.25]] * 8)
        found = advantages_of(rollout)
        assert found.returns_BT is not None
        torch.testing.assert_close(found.returns_BT, compute_advantages(config, rollout).returns_BT)


def test_each_environment_has_a_quota_of_the_filter() -> None:
    """Deviations of 10 do not push those of 0.1 out."""
    deviations = {"lake": (10.0, 20.0, 30.0, 40.0), "arms": (0.1, 0.2)}
    groups = [
        Group(number, [played(task, number, 0, 0.0), played(task, number, 1, deviation)])
        for number, (task, deviation) in enumerate((task, each) for task, all_ in deviations.items() for each in all_)
    ]
    groups = [groups[0], groups[4], *groups[1:4], groups[5]]
    kept = filter_groups(TopFraction(value=0.5), groups)
    assert [group.id for group in kept] == [2, 3, 5]


def test_the_mean_of_evaluations_weights_environments_equally() -> None:
    low, high = wilson_interval(8, 16)
    one = {"episodes": 16, "failed": 1, "success": 0.5, "success_low": low, "success_high": high, "return_mean": 0.5}
    one |= {"return_low": None, "return_high": None, "turns_mean": 2.0, "format_rate": 1.0}
    other = one | {"episodes": 4, "success": 1.0, "success_low": 0.5, "success_high": 1.0, "turns_mean": 4.0}
    found = overall(
        {"arms": {**one, "reference": {"random": one, "walk": one}}, "lake": {**other, "reference": {"random": other}}}
    )
    assert (found["episodes"], found["failed"], found["success"], found["turns_mean"]) == (20, 2, 0.75, 3.0)
    assert found["success_low"] == pytest.approx(0.75 - ((0.5 - low) ** 2 + 0.25) ** 0.5 / 2)
    assert found["return_low"] is None
    assert list(found["reference"]) == ["random"] and found["reference"]["random"]["success"] == 0.75
    assert found["environments"]["lake"]["success"] == 1.0
    assert overall({"": one}) == one


def test_the_interval_of_a_mean_narrows_with_the_root_of_the_number() -> None:
    assert interval_of_mean([(0.5, 0.4, 0.7)]) == pytest.approx((0.4, 0.7))
    assert interval_of_mean([(0.5, 0.4, 0.7)] * 4) == pytest.approx((0.45, 0.6))


class Tasks(ScriptedCollector):
    """Groups of the task that each start names; the first of `arms` is lost. seen: what was asked for, in order."""

    seen: ClassVar[list[str]] = []

    async def play_group(self, start: Start, size: int, begun: dict[int, Episode] | None = None) -> Group:
        task = start.task or self.task.name
        self.seen.append(task)
        if task == "arms" and self.seen.count("arms") == 1:
            return Group(start.id, [])
        rewards = [1.0, 0.0][:size] if task == "arms" else [10.0, 0.0][:size]
        return Group(start.id, [played(task, start.id, member, reward) for member, reward in enumerate(rewards)])


async def test_a_run_asks_the_same_environment_again_and_reports_each_retry(tmp_path: Path) -> None:
    Tasks.seen = []

    def plays(**shared: Any) -> ScriptedCollector:
        by_task = {name: Tasks(**shared | {"task": Task("any", name=name)}) for name in TWO}
        return Tasks(**shared, others=by_task)

    evaluation = {"episodes": 4, "reference": []}
    run = make_run(tmp_path, plays=plays, environments=TWO, algorithm="starpo-s", evaluation=evaluation)
    run.begin_step()
    groups = await run.collect()
    assert Tasks.seen == ["lake", "arms", "lake", "lake", "arms"]
    assert [group.id for group in groups] == [0, 2, 3, 4]
    kept = run.filter(groups)
    found = {
        name.removeprefix("environments/"): value for name, value in run.report.metrics.items() if "ments/" in name
    }
    assert (found["lake/groups"], found["arms/groups"]) == (3, 1)
    assert (found["lake/return_mean"], found["arms/return_mean"]) == (5.0, 0.5)
    assert (found["lake/success"], found["lake/turns_mean"], found["lake/tokens_per_turn"]) == (0.5, 1.0, 1.0)
    assert found["lake/reward_std_in_group"] == pytest.approx(10 / 2**0.5)
    assert found["lake/kept_fraction"] == len([group for group in kept if group.kind == "lake"]) / 3
    assert found["arms/kept_fraction"] == 1.0 and run.report.metrics["collect/success"] == 0.5

    await run.evaluate()
    assert Tasks.seen[5:] == ["arms"] * 4 + ["lake"] * 4
    (line,) = run.output.folder.read_evaluations()
    assert (line["episodes"], line["success"], line["return_mean"]) == (8, 1.0, 5.5)
    assert line["environments"]["lake"]["return_mean"] == 10.0
