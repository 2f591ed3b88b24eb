"""Tasksets of verifiers as services: its own episodes, with the session's caller in the model's place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="verifiers is not installed: make test-hosting")

from starpod.client import JSON, EnvironmentBug, SyncFleet, ToolCall
from starpod.env_server.hosting.verifiers import host
from tests.env_server.hosting.checks import check_contract, check_recovery, check_refusal, words
from tests.support import ServerProcess, start_server

TASKSETS = Path(__file__).parent / "tasksets"
SUMS, COUNTER, GUESS = "verifiers-sums-v1", "verifiers-counter-v1", "verifiers-guess-v1"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    hosted = words(
        "verifiers",
        "sums?num_tasks=3#deterministic=yes&success_at=2",
        "counter#deterministic=yes&tasks=3",
        "guess#deterministic=yes",
        "guess#id=unknown-v1",
    )
    with start_server(*hosted, environment={"PYTHONPATH": str(TASKSETS)}) as process:
        yield process


def test_a_question_is_answered_and_scored(fleet: SyncFleet) -> None:
    (session,) = fleet.open(SUMS, seed=4)
    text, messages = session.observation.parts
    assert text == "[system]\nBe short.\n\n[user]\n1 + 1 = ?"
    assert messages == JSON([{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1 = ?"}])
    end = session.step("2")
    assert (end.reward, end.terminated, end.success) == (2.5, True, True)
    assert end.reward_parts == {"right": 2.0, "brief": 0.5}
    assert end.info == {"metrics": {"characters": 1.0}, "stop_condition": "agent_completed"}


def test_tools_are_called_and_their_state_is_scored(fleet: SyncFleet) -> None:
    (session,) = fleet.open(COUNTER, seed=2)
    assert session.observation.parts[0] == "Count to 3."
    assert not session.step(ToolCall("subtract", {})).outcomes[0].valid
    for call, count in ((ToolCall("add", {"amount": 1}), 1), ('{"tool_name": "add", "arguments": {"amount": 2}}', 3)):
        transition = session.step(call)
        assert transition.observation.parts[0] == f"The count is {count}."
        assert (transition.reward, transition.terminated) == (0.0, False)
    refused = session.step(JSON({"tool_name": "add", "arguments": {"amount": "far"}}))
    assert "validation error" in refused.observation.text and not refused.terminated
    end = session.step("Done.")
    assert (end.reward, end.terminated, end.success) == (1.0, True, None)


def test_an_environment_talks_over_several_turns(fleet: SyncFleet) -> None:
    (session,) = fleet.open(GUESS, seed=7)
    assert [session.step(guess).observation.parts[0] for guess in ("5", "8")] == ["More.", "Less."]
    end = session.step("7")
    assert (end.reward, end.terminated, end.reward_parts) == (1.0, True, {"guessed": 1.0})


def test_a_limit_of_the_agent_truncates(fleet: SyncFleet) -> None:
    (session,) = fleet.open(GUESS, seed=7)
    for _ in range(3):
        assert not session.step("0").done
    end = session.step("0")
    assert (end.reward, end.terminated, end.truncated) == (0.0, False, True)


def test_a_scorer_that_breaks_is_no_reward(fleet: SyncFleet) -> None:
    (session,) = fleet.open(SUMS, seed=0)
    with pytest.raises(EnvironmentBug, match="a bug on purpose"):
        session.step("break")


def test_copies_are_episodes_played_again(fleet: SyncFleet) -> None:
    (session,) = fleet.open(COUNTER, seed=1)
    session.step(ToolCall("add", {"amount": 1}))
    restored = fleet.restore(session.snapshot())
    ends = []
    for each in (session, restored):
        assert each.step(ToolCall("add", {"amount": 1})).observation.parts[0] == "The count is 2."
        ends.append(each.step("Done.").reward)
    assert ends == [1.0, 1.0]


async def test_episodes_survive_a_killed_server_or_are_reported(server: ServerProcess) -> None:
    """Sessions are rebuilt by replay of what was said."""
    await check_recovery(server, GUESS, ["1", "4", "9", "5"], unknown="unknown-v1")


def test_the_contract_is_kept(server: ServerProcess) -> None:
    check_contract(server, SUMS, GUESS)


@pytest.mark.minutes
def test_the_contract_is_kept_with_tools(server: ServerProcess) -> None:
    """A session starts a process of tools, which imports all of verifiers: few requirements."""
    check_contract(server, COUNTER, required=("C-30", "C-41", "C-48", "C-79"))


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("sums?num_task=3", "taskset.num_task: Extra inputs are not permitted"),
        ("sums?num_tasks=0", "it has no task"),
        ("sums#concurrency=process", "concurrency is 'process'; use one of thread"),
        ("pair", "an episode has the agents left, right; only one agent is supported"),
        ("boxed", "requires image 'ubuntu:24.04'"),
        ("missing", "taskset 'missing' not found"),
    ],
)
def test_unhostable_environments_are_reported(wanted: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TASKSETS)
    check_refusal(host, wanted, re.escape(told))


def test_packages_of_tasksets_are_found(tmp_path: Path) -> None:
    for module in ("sums", "boxed"):
        about = tmp_path / f"{module}-0.1.0.dist-info"
        about.mkdir()
        needs = "verifiers>=0.4" if module == "sums" else "verifiers; extra == 'dev'"
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\nRequires-Dist: {needs}\n"
        )
        (about / "top_level.txt").write_text(f"{module}\n")
    path = {"PYTHONPATH": f"{TASKSETS}:{tmp_path}"}
    with start_server("bandit", "verifiers:*", environment=path) as process:
        assert "bandit-v1, verifiers-sums-v1 on" in process.ready
