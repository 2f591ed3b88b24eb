"""Start states of a file: how they are read, reached again over the wire, and shared out among groups."""

from dataclasses import replace
from pathlib import Path

import pytest

from starpod.client import Fleet, Limits, Want
from starpod.trainer.agents.base import limits_left
from starpod.trainer.configuration.config import Config
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.configuration.preflight import check_environment
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.configuration.seeds import SeedCursor
from starpod.trainer.rollout.environment import read_facts
from starpod.trainer.rollout.mixture import Mixture
from starpod.trainer.rollout.saved_starts import SavedStart, open_saved, read_starts
from tests.trainer.lake import LAKE, TASK


async def test_a_group_begins_in_a_saved_state_with_all_its_turns_left(fleet: Fleet, tmp_path: Path) -> None:
    (session,) = await TASK.open(fleet, 1, 1, Want())
    for action in (actions := ["Down", "Right"]):
        await session.step([action])
    seen = session.observation.text
    start = SavedStart("frozen_lake-v1", session.seed, session.dynamics_seed, actions, seen, session.version)
    sessions = await open_saved(TASK, fleet, start, 3, Want(), group=1)
    assert [
        (each.member, each.step_index, each.observation.text, limits_left(each, each.step_index)) for each in sessions
    ] == [(member, 2, seen, Limits(6, 2, 8)) for member in range(3)]
    other, again = [await open_saved(TASK, fleet, start, 3, Want(), group=group) for group in (2, 1)]
    assert len({each.dynamics_seed for each in (*sessions, *other)}) == 6, "a later group has other transitions"
    assert [each.dynamics_seed for each in again] == [each.dynamics_seed for each in sessions], "a resumed one has not"
    await fleet.close_sessions([session, *sessions, *other, *again])
    for changed in (replace(start, observation="another lake"), replace(start, actions=["Left"] * 3)):
        with pytest.raises(ConfigError, match="does not reach the saved start state"):
            await open_saved(TASK, fleet, changed, 2, Want(), group=1)
    # The error comes before the warm start.
    (tmp_path / "starts").write_text(start.to_line() + changed.to_line())
    environment = LAKE.model_copy(update={"starts": str(tmp_path / "starts")})
    config = Config(environment=environment)
    with pytest.raises(ConfigError, match="saved"):
        await check_environment(config, config.tasks[0], fleet, await read_facts(fleet, LAKE))


def test_saved_states_are_shared_out_by_the_number_of_the_tasks_group(tmp_path: Path) -> None:
    path = tmp_path / "starts.jsonl"
    states = [SavedStart("frozen_lake-v1", 20_000 + place, 0, ["Up"], "seen", options={"size": 3}) for place in (0, 1)]
    other = SavedStart("bandit-v1", 1, 1, ["a"], "")
    path.write_text("".join(each.to_line() for each in (states[0], other, states[1])), encoding="utf-8")
    assert read_starts(str(path), "frozen_lake-v1") == states
    environment = {"id": "frozen_lake-v1", "starts": str(path), "starts_share": 0.4}
    config = parse_config({"environments": {"one": environment, "other": environment}})
    mixture, cursor = Mixture(config.tasks), SeedCursor(config.seeds.train)
    first = mixture.starts(["one", "other"] * 4, cursor)
    resumed = Mixture(config.tasks)
    resumed.load_state_dict(mixture.state_dict())
    starts = [*first, *resumed.starts(["one", "other"] * 6, cursor)]
    for task in config.tasks:
        saved = [start.saved for start in starts if start.task == task.name]
        assert saved == [None, None, states[0], None, states[1]] * 2
    assert [start.seed for start in starts] == list(range(10_000, 10_020))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read"),
        ("", "holds no start state of frozen_lake-v1"),
        ("{\n", r"starts\.jsonl:1 is not a start state"),
        ("[]\n", r":1 is not a start state"),
        ('{"environment": "frozen_lake-v1", "seed": 1}\n', "missing 3 required"),
        (SavedStart("frozen_lake-v1", 1, 1, [], "seen").to_line(), "a start state needs actions"),
        (SavedStart("frozen_lake-v1", 1, 1, "Up", "seen").to_line(), "actions are a list of texts"),
    ],
)
def test_a_file_that_holds_none_is_reported(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "starts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_starts(str(path), "frozen_lake-v1")
