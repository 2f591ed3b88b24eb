"""The agents' actions, and recordings of them."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.load.plan import (
    ActionSource,
    Recorded,
    Valid,
    as_turn,
    make_policy,
    read_recording,
    write_recording,
    write_turn,
)
from starpod.v1 import environment_pb2 as pb

TEXTS = st.text(max_size=20)
ACTIONS = st.one_of(
    TEXTS.map(lambda text: pb.Action(text=text)),
    TEXTS.map(lambda text: pb.Action(json=text)),
    st.builds(lambda name, text: pb.Action(tool_call=pb.ToolCall(name=name, arguments_json=text)), TEXTS, TEXTS),
    st.builds(lambda data: pb.Action(tensor=pb.Tensor(dtype="uint8", shape=[len(data)], data=data)), st.binary()),
)
EPISODES = st.lists(st.lists(st.lists(ACTIONS, max_size=3), min_size=1, max_size=4), min_size=1, max_size=4)


def messages(turn: Any) -> list[pb.Action]:
    return [pb.Action(text=action) if isinstance(action, str) else action for action in turn]


@given(EPISODES)
def test_what_is_recorded_is_played_again(episodes: list[list[list[pb.Action]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.jsonl"
        lines = [
            {"seed": 2**63 + number, "turns": [write_turn(as_turn(turn)) for turn in turns]}
            for number, turns in enumerate(episodes)
        ]
        write_recording(path, "lake-v1", lines)
        policy = Recorded(read_recording(path, "lake-v1"), 0)
    for number, turns in [*enumerate(episodes), (0, episodes[0])]:  # and round again
        assert policy.begin() == (2**63 + number, None)
        for turn in turns:
            played = policy.next(None)
            assert played is not None
            assert messages(played) == turn
        assert policy.next(None) is None


def test_valid_actions_come_from_the_observation() -> None:
    observation = pb.Observation(valid_actions=[pb.Action(text="a"), pb.Action(text="b")])
    policy = Valid(random.Random(1))
    assert {policy.next(observation)[0] for _ in range(50)} == {"a", "b"}


def test_an_expert_falls_back_where_it_knows_nothing() -> None:
    policy = make_policy(ActionSource("expert", ("x",)), 0, 0)
    assert policy.next(pb.Observation(expert_action=pb.Action(text="best"))) == ["best"]
    assert policy.next(pb.Observation()) == ("x",)


def test_players_differ_and_runs_do_not() -> None:
    turns = ActionSource("random", tuple("abcdef"))
    play, again = ([make_policy(turns, place, 1).next(None) for place in range(40)] for _ in range(2))
    assert play == again and len({str(each) for each in play}) > 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a recording"),
        ("no json", "not a recording"),
        ('{"format": "other"}', "not a recording"),
        ('{"format": "starpod-load-recording", "environment": "x-v1"}', "holds no episode"),
        ('{"format": "starpod-load-recording", "environment": "x-v1"}\n{"seed": 1}', "not a recording"),
        ('{"format": "starpod-load-recording", "environment": "y-v1"}\n{"turns": [["a"]]}', "recorded in y-v1"),
    ],
)
def test_an_invalid_recording_is_reported(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        read_recording(path, "x-v1")
