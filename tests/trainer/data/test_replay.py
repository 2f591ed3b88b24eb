"""Files of episodes, and the buffer that trains on them again."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.files import BadEpisodes, episode_files, read_episodes, read_groups, write_episodes
from starpod.trainer.data.group import Group
from starpod.trainer.data.replay import ReplayBuffer, ReplayConfig, oldest_version
from tests.trainer.turns import a_turn

TURN = a_turn(
    [3, 4],
    observation="P 1 3 √",
    prompt=[1, 2],
    logprobs=[-0.1, -1 / 3],
    finish="stop",
    text="<answer>Up</answer>",
    state_key=b"\x00\xff",
    parts={"environment": 0.1},
)


def make_episode(group: int = 0, member: int = 0, version: int = 0, *, failed: bool = False) -> Episode:
    turns = [replace(TURN, versions=[version, version + 1])]
    return Episode(group, member, "frozen_lake-v1", turns=turns, end="failed" if failed else "terminal")


def make_group(number: int, version: int) -> Group:
    return Group(number, [make_episode(number, member, version) for member in range(2)])


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["episodes.jsonl", "episodes.jsonl.gz"])
def test_what_is_written_is_what_is_read(tmp_path: Path, name: str) -> None:
    episodes = [make_episode(group, member) for group in range(2) for member in range(3)]
    assert write_episodes(tmp_path / "new" / name, episodes) == 6
    assert list(read_episodes(tmp_path / "new" / name)) == episodes
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]
    if name.endswith(".gz"):
        assert gzip.decompress((tmp_path / "new" / name).read_bytes()).count(b"\n") == 6


def test_a_write_that_fails_leaves_nothing_and_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    write_episodes(path, [make_episode()])

    def broken():  # type: ignore[no-untyped-def]
        yield make_episode(1)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_episodes(path, broken())
    assert [episode.group for episode in read_episodes(path)] == [0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_and_a_runs_folder_are_read_file_by_file(tmp_path: Path) -> None:
    write_episodes(tmp_path / "episodes" / "b.jsonl", [make_episode(7), make_episode(7, 1)])
    write_episodes(tmp_path / "episodes" / "a.jsonl.gz", [make_episode(7), make_episode(8, failed=True)])
    (tmp_path / "episodes" / ".torn.jsonl").write_text("{")
    (tmp_path / "metrics.jsonl").write_text("not episodes\n")
    for folder in (tmp_path, tmp_path / "episodes"):
        assert [path.name for path in episode_files(folder)] == ["a.jsonl.gz", "b.jsonl"]
    groups = read_groups(tmp_path)
    # Group 7 of one file is not group 7 of another one.
    assert [(group.id, len(group.episodes), len(group.failed)) for group in groups] == [(0, 1, 0), (1, 0, 1), (2, 2, 0)]
    assert all(episode.group == group.id for group in groups for episode in group.episodes + group.failed)


def test_branches_that_are_compared_apart_are_no_members(tmp_path: Path) -> None:
    branch = replace(make_episode(0, 2), parent=(0, 0), apart=True)
    write_episodes(tmp_path / "episodes.jsonl", [make_episode(), make_episode(0, 1), branch])
    (group,) = read_groups(tmp_path)
    assert ([episode.member for episode in group.episodes], group.branches) == ([0, 1], [branch])
    assert Group.from_json(json.loads(json.dumps(group.to_json()))) == group


def test_held_out_episodes_of_a_folder_are_not_trained_on(tmp_path: Path) -> None:
    evaluation = tmp_path / "episodes" / "eval-000010.jsonl"
    write_episodes(evaluation, [make_episode()])
    with pytest.raises(BadEpisodes, match="only episodes of evaluations"):
        read_groups(tmp_path)
    write_episodes(tmp_path / "episodes" / "train-000010.jsonl", [make_episode(), make_episode(1)])
    assert len(read_groups(tmp_path)) == 2
    assert len(read_groups(evaluation)) == 1


def line(**changes: object) -> str:
    return json.dumps(make_episode().to_json() | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "`turns` is expected"),
        (line(colour="red"), "unexpected keyword argument 'colour'"),
        (line(turns=["up"]), "not an episode"),
        (line(turns=[{"reply": [1]}]), "missing"),
        (line(group="seven"), "`group` must be a whole number"),
        (line(turns=[make_episode().turns[0].to_json() | {"logprobs": [0.0]}]), "2 sampled tokens, 1 log-prob"),
    ],
)
def test_a_bad_line_is_named_with_its_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(line() + "\n\n" + text + "\n")
    with pytest.raises(BadEpisodes) as caught:
        list(read_episodes(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert reason in str(caught.value)


def test_a_torn_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl.gz"
    write_episodes(path, [make_episode(group) for group in range(100)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadEpisodes, match=r"episodes\.jsonl\.gz:\d+: cannot be read"):
        list(read_episodes(path))


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadEpisodes, match="does not exist"):
        list(read_episodes(tmp_path / "no"))
    with pytest.raises(BadEpisodes, match="holds no episodes"):
        read_groups(tmp_path)


# --- the buffer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [{"capacity": 4}, {"groups": 4}, {"offline": "x", "capacity": 4, "groups": 2}, {"reuse": 0}, {"max_staleness": 0}],
)
def test_contradictory_settings_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        ReplayConfig.model_validate(values)


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    assert oldest_version(Group(0, [make_episode(version=9), make_episode(version=3)])) == 3
    assert oldest_version(Group(0, []), default=5) == 5
    assert not ReplayBuffer(ReplayConfig()).enabled


@given(
    capacity=st.integers(1, 6),
    wanted=st.integers(1, 6),
    staleness=st.integers(1, 4),
    arrivals=st.lists(st.integers(0, 3), max_size=8),
    seed=st.integers(0, 2**32),
)
def test_the_buffer_keeps_its_bounds_and_loses_count_of_nothing(
    capacity: int, wanted: int, staleness: int, arrivals: list[int], seed: int
) -> None:
    config = ReplayConfig(capacity=capacity, groups=wanted, max_staleness=staleness)
    buffer, twin = ReplayBuffer(config), ReplayBuffer(config)
    total = 0
    for version, count in enumerate(arrivals):
        sampled, dropped = buffer.sample(version, np.random.default_rng(seed))
        ids = [group.id for group in sampled]
        assert ids == sorted(set(ids))
        assert len(ids) == min(wanted, len(buffer))
        assert all(version - oldest_version(group) <= staleness for group in sampled)
        # A buffer that went through a checkpoint draws the same.
        again, dropped_again = twin.sample(version, np.random.default_rng(seed))
        assert (again, dropped_again) == (sampled, dropped)
        buffer.add([make_group(total + index, version) for index in range(count)], version)
        total += count
        assert len(buffer) <= capacity
        assert buffer.stale + buffer.evicted + len(buffer) == total
        twin = ReplayBuffer(config)
        twin.load_state_dict(json.loads(json.dumps(buffer.state_dict())))


def test_every_group_is_drawn_in_time() -> None:
    buffer = ReplayBuffer(ReplayConfig(capacity=6, groups=2))
    buffer.add([make_group(number, 0) for number in range(6)], 0)
    rng = np.random.default_rng(0)
    drawn = [group.id for _ in range(50) for group in buffer.sample(0, rng)[0]]
    assert set(drawn) == set(range(6))


def test_a_reward_is_written_for_readers_and_read_where_parts_are_missing() -> None:
    paid = a_turn(parts={"environment": 1.0, "format": -0.1})
    assert paid.to_json()["reward"] == paid.reward == 0.9 and Turn.from_json(paid.to_json()) == paid
    assert Turn.from_json({"fresh": True, "reward": 0.5}).parts == {"environment": 0.5}
