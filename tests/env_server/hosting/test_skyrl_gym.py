"""SkyRL-gym environments as services, over the operator's rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("skyrl_gym", reason="SkyRL-gym is not installed: make test-hosting")

import skyrl_gym
from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv

from starpod.client import JSON, BadArgument, SyncFleet
from starpod.env_server.hosting.skyrl_gym import host
from starpod.v1 import environment_pb2 as pb
from tests.env_server.hosting.checks import check_contract, check_copies, check_recovery, check_refusal
from tests.env_server.hosting.checks import words as words_of
from tests.support import ServerProcess

GSM8K = "skyrl-gsm8k_multi_turn-v1"
ROWS = [
    {
        "prompt": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "2 + 3 = ? End with #### N"},
        ],
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"ground_truth": "5"},
        "extra_info": {"max_turns": 4},
    },
    {"prompt": "4 + 4 = ? End with #### N", "reward_spec": {"ground_truth": "8"}, "extra_info": {}},
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture(scope="module")
def words(rows: Path) -> tuple[str, ...]:
    quick = f"gsm8k_multi_turn#rows={rows}&deterministic=yes&concurrency=inline&success_at=1"
    unknown, apart = (f"gsm8k_multi_turn#rows={rows}&{more}" for more in ("id=unknown-v1", "max_turns=2&id=apart-v1"))
    return words_of("skyrl-gym", quick, unknown, apart)


def test_a_conversation_is_the_packages_own(fleet: SyncFleet) -> None:
    replies = ["Hm.", "I think #### 4", "No: #### 5"]
    own = GSM8kMultiTurnEnv(extras={"reward_spec": {"ground_truth": "5"}, "extra_info": {"max_turns": 4}})
    messages, _ = own.init(ROWS[0]["prompt"])
    (session,) = fleet.open(GSM8K, seed=10)
    assert session.observation.parts == (
        "[system]\nBe short.\n\n[user]\n2 + 3 = ? End with #### N",
        JSON(messages),
    )
    for reply in replies:
        step, transition = own.step(reply), session.step(reply)
        assert transition.reward == step["reward"]
        assert transition.terminated == step["done"]
        text, told = transition.observation.parts
        assert told.value == step["observations"]
        assert text == (step["observations"][0]["content"] if step["observations"] else "")
    assert (transition.success, transition.info["metrics"]) == (True, {"steps": 3})


def test_the_seed_picks_the_row(fleet: SyncFleet) -> None:
    texts = [fleet.open(GSM8K, seed=seed)[0].observation.text for seed in range(4)]
    assert texts[0] == texts[2] != texts[1] == texts[3] == "4 + 4 = ? End with #### N"


def test_callers_choose_nothing_else(fleet: SyncFleet) -> None:
    for options in ({"rows": "/etc/passwd"}, {"max_turns": 100}, {"extras": {}}):
        with pytest.raises(BadArgument):
            fleet.open(GSM8K, options=options)


def test_a_session_has_a_process_of_its_own_by_default(fleet: SyncFleet) -> None:
    specs = {spec.id: spec for spec in fleet.describe()}
    assert specs["apart-v1"].concurrency == pb.CONCURRENCY_CLASS_PROCESS
    assert not specs["apart-v1"].capabilities.deterministic
    (session,) = fleet.open("apart-v1", seed=1)
    session.step("#### 1")
    transition = session.step("#### 8")  # the second of the two turns that the operator allows
    assert (transition.terminated, transition.reward, transition.success) == (True, 1.0, None)


def test_copies_are_conversations_said_again(fleet: SyncFleet) -> None:
    check_copies(fleet, GSM8K, "Hm.", "#### 5")


def test_it_keeps_the_contract(server: ServerProcess) -> None:
    check_contract(server, GSM8K, "apart-v1")


async def test_episodes_survive_a_killed_server_or_are_reported(server: ServerProcess) -> None:
    await check_recovery(server, GSM8K, ["Hm.", "It is #### 4", "No: #### 5"], "unknown-v1")


def test_arguments_are_its_configuration(tmp_path: Path) -> None:
    """Arguments override the defaults of the configuration class that the constructor names."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROWS[1], ensure_ascii=False).replace("End", "\u2028End"))
    game = host(f"search?topk=7#rows={rows}").factory.begin(0)  # type: ignore[attr-defined]
    tools = game.environment.tool_group
    assert (tools.topk, tools.search_url) == (7, "http://127.0.0.1:8000/retrieve")
    check_refusal(host, f"search?top=7#rows={rows}", "Key 'top' not in 'SearchEnvConfig'")


def test_every_environment_of_the_package_is_found() -> None:
    for name in skyrl_gym.envs.registration.registry:
        check_refusal(host, name, "it needs prompts: #rows=FILE")


@pytest.mark.parametrize(
    ("wanted", "line", "problem"),
    [
        ("gsm8k_multi", "{}", "did you mean gsm8k_multi_turn"),
        ("not_here:x", "{}", "there is no module not_here"),
        ("gsm8k", "{}", "line 1 is not an object with a prompt of messages: 'prompt'"),
        ("gsm8k", "hello", "line 1 is not an object"),
        ("gsm8k", '{"prompt": [{"role": "user"}]}', "prompt must be text or a list"),
        ("gsm8k", '{"prompt": "x", "env_class": "aime"}', "line 1 is a row of aime"),
        ("gsm8k", '{"prompt": "x"}', "row 1: AssertionError: reward_spec field is required"),
        ("gsm8k", "", "has no rows"),
    ],
)
def test_what_cannot_be_hosted_says_why(wanted: str, line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(line)
    check_refusal(host, f"{wanted}#rows={file}", problem)
    check_refusal(host, f"gsm8k#rows={tmp_path / 'none'}", "cannot read its rows")
