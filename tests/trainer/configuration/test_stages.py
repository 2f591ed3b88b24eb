"""Stages: which settings hold when, what is refused before a run begins, and how a run goes from one to the next."""

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.layers import difference
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.stages import StageConfig, Stages, may_change
from tests.trainer.run.scripted_run import make_run


def until(**values: Any) -> StageConfig:
    return StageConfig.model_validate({"until": values})


def indices(stages: list[StageConfig], values: list[float], metric: str = "collect/success") -> list[int]:
    """The stage of each iteration."""
    present, found = Stages(stages), []
    for step, value in enumerate(values, 1):
        found.append(present.index)
        present.update(step, {metric: value})
    return found


def test_a_schedule_of_horizons() -> None:
    """5, 8 and 10 turns, changed after 100 and 200 iterations."""
    values = {"environment": {"max_turns": 10}, "stages": []}
    values["stages"] = [
        {"until": {"iteration": done}, "set": {"environment.max_turns": turns}} for done, turns in ((100, 5), (200, 8))
    ]
    config = parse_config(values)
    stages = Stages(config.stages)
    horizons = {}
    for done in range(201):
        horizons[done] = config.in_stages[stages.index].environment.max_turns
        stages.update(done + 1, {})
    assert [horizons[done] for done in (0, 99, 100, 199, 200)] == [5, 5, 8, 8, 10]


def test_a_metric_ends_a_stage_once_it_held_patience_times_in_a_row() -> None:
    stages = [until(metric="collect/success", at_least=0.6, patience=2), until(metric="collect/success", at_most=0.1)]
    values = [0.7, 0.5, 0.6, 0.6, 0.6, 0.05, 0.9, 0.0]
    assert indices(stages, values) == [0, 0, 0, 0, 1, 1, 2, 2]
    # The first of the two ends counts, and a metric that an iteration lacks does not hold.
    assert indices([until(iteration=3, metric="collect/success", at_least=0.6)], [0.0, 0.0, 0.0, 0.0]) == [0, 0, 0, 1]
    assert indices([until(metric="other", at_least=0.6)], [0.7, 0.7]) == [0, 0]


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.integers(1, 12)), st.floats(0, 1), st.integers(1, 3)), max_size=4),
    st.lists(st.floats(0, 1), max_size=15),
    st.integers(0, 15),
)
def test_stages_never_go_back_and_continue_from_a_checkpoint(
    ends: list[tuple[int | None, float, int]], values: list[float], cut: int
) -> None:
    stages = [until(iteration=i, metric="collect/success", at_least=bound, patience=p) for i, bound, p in ends]
    found = indices(stages, values)
    assert found == sorted(found) and all(index <= len(stages) for index in found)
    first, second, resumed = Stages(stages), Stages(stages), []
    for step, value in enumerate(values, 1):
        present = first if step <= cut else second
        resumed.append(present.index)
        present.update(step, {"collect/success": value})
        if step == cut:
            second.load_state_dict(first.state_dict())
    assert resumed == found or cut == 0


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ({"set": {}}, r"stages\[0\] never ends"),
        ({"until": {"metric": "collect/success"}}, "at_least or until.at_most"),
        ({"until": {"metric": "collect/sucess", "at_least": 0.5}}, "not exist; did you mean collect/success"),
        ({"until": {"metric": "success", "at_least": 0.5}}, "not exist; did you mean collect/success"),
        ({"until": {"metric": "collect/success", "at_least": 5}}, "collect/success is a share, from 0 to 1"),
        ({"until": {"iteration": 2, "patience": 3}}, "no until.metric"),
        ({"until": {"iteration": 2}, "set": {"model.name": "x"}}, "model.name, which cannot differ between stages"),
        ({"until": {"iteration": 2}, "set": {"environment.max_turn": 3}}, "did you mean environment.max_turns?"),
        ({"until": {"iteration": 2}, "set": {"algorithm.clip": 3}}, r"stages\[0\]: no key 'algorithm.clip'"),
        ({"until": {"iteration": 2}, "set": {"collect.group_size": 1}}, "min_group_size 2 is more than"),
        ({"until": {"iteration": 2}, "set": {"algorithm": "starpo-ppo"}}, "needs a different critic"),
        ({"until": {"iteration": 2}, "set": {"environment.max_turns": 0}}, "greater than or equal to 1"),
        ({"until": {"iteration": 2}, "set": {"title.a": 0}}, "cannot differ"),
        ({"until": {"iteration": 1}}, "must be above that of an earlier stage, 1"),
    ],
)
def test_what_makes_no_sense_is_refused_before_a_run_begins(stage: dict[str, Any], words: str) -> None:
    earlier = [{"until": {"iteration": 1}}] * ("earlier" in words)
    with pytest.raises(ConfigError, match=words):
        parse_config({"algorithm": "starpo-grpo", "stages": [*earlier, stage]})


def test_a_stage_has_a_critic_of_as_many_values_as_the_run() -> None:
    stage = {"until": {"iteration": 2}, "set": {"algorithm.advantage": "hae"}}
    with pytest.raises(ConfigError, match="needs a different critic"):
        parse_config({"algorithm": "starpo-ppo", "prompt": {"blocks": ["switch", "subgoal"]}, "stages": [stage]})


def test_stages_of_several_environments_set_their_keys() -> None:
    lake = {"environments": {"lake": {"id": "frozen_lake-v1"}, "arms": {"id": "bandit-v1"}}}
    stage = {"until": {"iteration": 2}, "set": {"environments.lake.max_turns": 3}}
    first, last = parse_config(lake | {"stages": [stage]}).in_stages
    assert [config.tasks[0].environment.max_turns for config in (first, last)] == [3, None]
    assert may_change("environments.lake.rewards.format_penalty") and not may_change("environments.lake.id")


def test_what_is_written_of_a_stage_gives_the_same_stage_again() -> None:
    values = {
        "algorithm": "starpo-grpo",
        "stages": [
            {"until": {"iteration": 1}, "set": {"algorithm.kl.where": "off", "environment.options.size": 4}},
            {"until": {"iteration": 2}, "set": {"algorithm": "dr-grpo", "rewards.format_penalty": 0}},
        ],
    }
    config = parse_config(values)
    again = parse_config(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert [each.to_dict() for each in again.in_stages[:-1]] == [each.to_dict() for each in config.in_stages[:-1]]
    assert config.in_stages[1].algorithm == parse_config({"algorithm": "dr-grpo"}).algorithm
    assert "stages" not in Config().to_dict()


TREE = st.recursive(
    st.integers(0, 2), lambda below: st.dictionaries(st.sampled_from("abc"), below, max_size=3), max_leaves=6
)


@given(st.dictionaries(st.sampled_from("ab"), TREE, max_size=2), st.dictionaries(st.sampled_from("ab"), TREE))
def test_a_difference_makes_one_of_the_other(base: dict[str, Any], other: dict[str, Any]) -> None:
    other = base | other
    made: dict[str, Any] = {**base}
    for key, value in difference(None, base, other).items():
        *above, last = key.split(".")
        place = made
        for part in above:
            place[part] = place = dict(place[part])
        place[last] = value
    assert made == other


async def test_a_run_learns_and_collects_as_its_stage_says(tmp_path: Path) -> None:
    sets = {"collect.groups": 2, "collect.group_size": 3, "optimizer.lr": 0.5, "algorithm.kl.where": "loss"}
    run = make_run(
        tmp_path,
        algorithm="dr-grpo",
        optimizer={"lr": 0.25},
        stages=[{"until": {"iteration": 1}, "set": sets}, {"until": {"metric": "collect/success_rate", "at_least": 2}}],
    )
    told: list[str] = []
    cast(Any, run.output.screen).warn = told.append
    trainer = run.updating.learner.by_agent[""]
    assert trainer.algorithm.kl.where == "loss" and trainer.optimizer.param_groups[0]["rate"] == 0.5
    for stage, asked in ((0, 2), (1, 6), (1, 10)):
        run.begin_step()
        groups = await run.collect()
        run.finish_step()
        assert run.report.metrics["collect/stage"] == stage
        assert len(cast(Any, run.collecting.collector).asked) == asked and len(groups) == (4 if stage else 2)
    assert trainer.algorithm.kl.where == "off" and trainer.optimizer.param_groups[0]["rate"] == 0.25
    assert any("metric collect/success_rate" in each and "did you mean collect/success" in each for each in told)
