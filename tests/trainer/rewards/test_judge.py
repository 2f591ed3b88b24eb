"""Judges over a real socket: verdicts, votes, and replies that are recorded and never requested twice."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from starpod.client import Fleet
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.data.episode import Episode
from starpod.trainer.rewards.judge import Judge, JudgeFailed
from starpod.trainer.rewards.reward import RewardConfig, Rewards
from starpod.trainer.rollout.collect import Start
from tests.fake_openai import Answer, fake_openai
from tests.trainer.lake import TEMPLATE, collector, reply
from tests.trainer.scripted_engine import ScriptedEngine
from tests.trainer.turns import a_turn

EPISODE = Episode(
    0,
    0,
    "desk-v1",
    instructions="Help the customer.",
    turns=[a_turn(observation="Hello", text="no", attempt=0), a_turn(observation="Hm?", text="Gladly!", attempt=1)],
    final_observation="Thanks.",
)


def write_judge(folder: Path, url: str, **values: Any) -> Path:
    path = folder / "polite.yaml"
    path.write_text(json.dumps({"rubric": "Is it polite?", "model": "m", "base_url": url, **values}))
    return path


def judge(
    folder: Path, answer: Answer, episode: Episode = EPISODE, **values: Any
) -> tuple[float, list[dict[str, Any]]]:
    with fake_openai(answer) as endpoint:
        return Judge(write_judge(folder, endpoint.base_url, **values))(EPISODE), endpoint.requests


def voting(*replies: str) -> Answer:
    """An endpoint that gives one reply after the other."""
    left = list(replies)
    return lambda body: left.pop(0)


def test_a_judge_reads_the_rubric_and_the_last_attempt(tmp_path: Path) -> None:
    verdict, requests = judge(tmp_path, lambda body: 'Well. {"mark": 0} No: {"mark": 4}', highest=5, temperature=0.5)
    assert verdict == 0.8
    assert requests[0]["temperature"] == 0.5 and requests[0]["max_tokens"] == 1000
    system, user = (message["content"] for message in requests[0]["messages"])
    assert "Is it polite?" in system and '{"mark": "a number from 0 to 5"}' in system
    assert user.split("\n\n")[1:-1] == [
        "Instructions: Help the customer.",
        "Environment: Hm?",
        "Agent : Gladly!",
        "Environment: Thanks.",
    ]


def test_criteria_are_decided_by_the_median_of_votes_that_can_be_read(tmp_path: Path) -> None:
    votes = [
        '{"a": true, "b": 0}',
        '{"a": 1, "b": 1}',
        '{"a": 0, "b": 0}',
        "hm",
        '{"a": 1, "b": 0}',
        '{"a": 2, "b": 0}',
    ]
    verdict, requests = judge(tmp_path, voting(*votes), votes=6, criteria={"a": "Is it a?", "b": "Is it b?"})
    assert verdict == 0.5 and len(requests) == 6 and "- b: Is it b?" in requests[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("replies", "reason"),
    [
        (['{"mark": 1}', '{"mark": 0}'], r"the votes on mark tie: \[0.0, 1.0\]"),
        (["yes", '{"mark": 1}'], "1 of 2 replies have no marks; the first one ends with 'yes'"),
        (['{"mark": NaN}', '{"mark": "1"}'], "2 of 2 replies have no marks"),
        (['{"mark": 1} and so on...', '{"other": 1}'], "2 of 2 replies have no marks"),  # the first one is cut off
    ],
)
def test_a_tie_and_replies_without_marks_are_no_verdict(tmp_path: Path, replies: list[str], reason: str) -> None:
    with pytest.raises(JudgeFailed, match=reason):
        judge(tmp_path, voting(*replies), votes=2)


def test_recorded_replies_are_not_requested_again_even_after_a_kill(tmp_path: Path) -> None:
    with fake_openai(lambda body: '{"mark": 1}') as endpoint:
        path = write_judge(tmp_path, endpoint.base_url, votes=3)
        assert Judge(path)(EPISODE) == 1.0
        record = tmp_path / "polite.replies.jsonl"
        whole = record.read_bytes()
        record.write_bytes(whole[:-20])  # killed while it wrote the last reply
        assert Judge(path)(EPISODE) == 1.0 and record.read_bytes().endswith(b"\n" + whole.splitlines(keepends=True)[-1])
        assert Judge(path)(EPISODE) == 1.0
        assert len(endpoint.requests) == 4
        changed = replace(EPISODE, final_observation="Go away.")
        assert Judge(path)(changed) == 1.0 and len(endpoint.requests) == 7


def test_equal_requests_at_the_same_time_are_sent_once(tmp_path: Path) -> None:
    with fake_openai(lambda body: '{"mark": 1}') as endpoint:
        asked = Judge(write_judge(tmp_path, endpoint.base_url))
        episodes = [replace(EPISODE, instructions=str(number % 10)) for number in range(80)]
        with ThreadPoolExecutor(40) as pool:
            assert set(pool.map(asked, episodes)) == {1.0}
    assert len(endpoint.requests) == 10 and endpoint.most_at_once <= 16


def test_an_address_that_fails_says_what_to_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"failed: status 401 of this test|Error code: 401.*check base_url and model"):
        judge(tmp_path, lambda body: 401)
    monkeypatch.setattr("starpod.trainer.rewards.judge.RETRIES", 0)
    with pytest.raises(ConfigError, match=r"127.0.0.1:9/v1/ failed: .*refused.*that the server runs"):
        Judge(write_judge(tmp_path, "http://127.0.0.1:9/v1"))(EPISODE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_url": ""}, "set OPENAI_API_KEY to your key, or base_url in"),
        ({"vote": 3}, "no key 'vote'; did you mean votes"),
        ({"votes": 0}, "votes"),
        ({"model": None}, "model"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=message):
        Judge(write_judge(tmp_path, **{"url": "http://x/v1", **values}))


async def test_a_judge_pays_the_last_turn_in_training_and_an_episode_without_verdict_fails(
    tmp_path: Path, fleet: Fleet
) -> None:
    def answer(body: dict[str, Any]) -> str:
        return '{"mark": 0.5}' if "Down || Right" in body["messages"][1]["content"] else "I cannot say."

    with fake_openai(answer) as endpoint:
        path = write_judge(tmp_path, endpoint.base_url)
        config = RewardConfig.model_validate({"shaping": {str(path): 2.0}})
        assert config.names == {"environment", "format", "polite"}
        for actions, verdict in ((("Down", "Right"), {"polite": 1.0}), (("Right", "Down"), None)):
            players = collector(fleet, ScriptedEngine(TEMPLATE, reply(*actions)))
            collected = await replace(players, rewards=Rewards(config)).collect([Start(0, 1)], 1, min_size=0)
            (episode,) = collected.groups[0].members
            if verdict:
                assert episode.success and "polite" not in episode.turns[0].parts
                assert episode.turns[-1].parts == {"environment": 1.0, "format": 0.0, **verdict}
            else:
                assert episode.failed and episode.error.startswith("JudgeFailed: 1 of 1 replies have no marks")
        players = replace(players, rewards=Rewards(config).without_judges())  # as in evaluations
        assert not (await players.collect([Start(0, 2)], 1)).failed
    assert len(endpoint.requests) == 2 and "G" in endpoint.requests[0]["messages"][1]["content"]
