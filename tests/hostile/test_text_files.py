"""Text files as other programs write them: a byte order mark at the beginning, Unicode's line ends inside a line."""

import json
from pathlib import Path

import pytest

from starpod.client.transport import Transport
from starpod.env_server.sessions.seal import SnapshotSeal
from starpod.env_server.transports.auth import Authenticator
from starpod.load.plan import read_recording, write_recording
from starpod.trainer.data.episode import Episode, Turn
from starpod.trainer.data.files import BadEpisodes, read_episodes
from starpod.trainer.rollout.saved_starts import SavedStart, read_starts

LINE_ENDS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e\r\n"


def test_a_byte_order_mark_is_no_part_of_a_token_or_key(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("k" * 40 + "\n", encoding="utf-8-sig")
    ((_, sent),) = Transport(token=path).metadata()
    assert sent == "Bearer " + "k" * 40
    assert Authenticator(path).identify([("authorization", sent)]).tenant
    marked, plain = SnapshotSeal(path).seal("e-v1", "1.0.0", b"state"), tmp_path / "plain"
    plain.write_text("k" * 40)
    assert marked == SnapshotSeal(plain).seal("e-v1", "1.0.0", b"state")


@pytest.mark.parametrize("end", LINE_ENDS)
def test_a_line_ends_at_its_line_break_alone(tmp_path: Path, end: str) -> None:
    start = SavedStart("e-v1", 1, 1, [f"a{end}b"], f"x{end}z")
    path = tmp_path / "starts.jsonl"
    path.write_text(start.to_line(), encoding="utf-8-sig", newline="")
    assert read_starts(str(path), "e-v1") == [start]


def test_a_recording_of_a_load_may_hold_them_too(tmp_path: Path) -> None:
    pytest.importorskip("hdrh")
    path, episodes = tmp_path / "recording.jsonl", [{"turns": [[LINE_ENDS]]}]
    write_recording(path, "e-v1", episodes)
    head = path.read_text().split("\n")[0]
    path.write_text(head + "\n" + json.dumps(episodes[0], ensure_ascii=False) + "\n", encoding="utf-8-sig")
    assert read_recording(path, "e-v1") == tuple(episodes)


def episode_line(**changes: object) -> str:
    sampled = {"reply": [5, 6], "logprobs": [-0.5, -0.1], "versions": [0, 0]}
    turn = Turn(fresh=True, prompt=[1], parts={"environment": 1.0}, **sampled)
    episode = Episode(0, 0, "bandit-v1", turns=[turn], end="terminal").to_json()
    episode["turns"][0].update(changes)
    return json.dumps(episode) + "\n"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"reply": [5, 6.0]}, "reply holds 6.0; whole numbers from 0 on"),
        ({"reply": [5, -1]}, "reply holds -1"),
        ({"reply": [5, True]}, "reply holds True"),
        ({"versions": [0, None]}, "versions holds None"),
        ({"prompt": ["1"]}, "prompt holds '1'"),
        ({"logprobs": [-0.5, float("nan")]}, "logprobs holds nan"),
        ({"parts": {"environment": "1"}}, "parts holds '1'"),
        ({"parts": {"environment": float("inf")}}, "parts holds inf"),
    ],
)
def test_an_episode_with_a_value_that_is_no_number_is_refused_with_its_line(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text(episode_line() + episode_line(**changes), encoding="utf-8-sig")
    with pytest.raises(BadEpisodes, match=f"e.jsonl:2: turn 1: {problem}"):
        list(read_episodes(path))
