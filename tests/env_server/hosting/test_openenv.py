"""OpenEnv environments as services, on the real base classes: the one of `openenv init`, and one with tools."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openenv.core", reason="OpenEnv is not installed: make test-hosting")

from click.testing import CliRunner
from openenv.cli.__main__ import app
from typer.main import get_command

from starpod.client import JSON, BadArgument, SyncFleet, ToolCall
from starpod.env_server.hosting.openenv import host
from starpod.v1 import environment_pb2 as pb
from tests.env_server.hosting.checks import (
    check_contract,
    check_copies,
    check_recovery,
    check_refusal,
    spec_of,
    words,
)
from tests.support import ServerProcess, start_server

TOOLS = "tests.env_server.hosting.openenv_environments"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the package `parrot`, as `openenv init` writes it."""
    folder = tmp_path_factory.mktemp("packages")
    done = CliRunner().invoke(get_command(app), ["init", "parrot", "--output-dir", str(folder)])
    assert done.exit_code == 0, done.output
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def server(packages: Path) -> Iterator[ServerProcess]:
    hosted = words(
        "openenv",
        "parrot#deterministic=yes",
        f"{TOOLS}:CounterEnvironment?start=5#deterministic=yes&concurrency=inline&success_at=3",
        f"{TOOLS}:CounterEnvironment?start=5#id=unknown-v1&success_at=3",
        f"{TOOLS}:ToolEnvironment#concurrency=thread",
    )
    with start_server(*hosted, environment={"PYTHONPATH": str(packages)}) as process:
        yield process


def test_the_package_that_openenv_writes_is_played(fleet: SyncFleet) -> None:
    """Host it in a process of its own, and act by JSON, by a call of its model, and by plain text."""
    spec = spec_of(fleet, "openenv-parrot-v1")
    assert spec.concurrency == pb.CONCURRENCY_CLASS_PROCESS
    (tool,) = spec.action_space.tools
    schema = json.loads(tool.parameters_schema_json)
    assert (tool.name, schema["required"], [*schema["properties"]]) == ("ParrotAction", ["message"], ["message"])
    assert "plain text, which stands for message" in spec.action_space.grammar
    (session,) = fleet.open("openenv-parrot-v1", seed=1)
    assert session.observation.text.splitlines()[0].endswith("environment ready!")
    for action in (JSON({"message": "hi"}), '{"message": "hi"}', ToolCall("ParrotAction", {"message": "hi"}), "hi"):
        transition = session.step(action)
        assert transition.observation.parts == (
            "echoed_message: hi\nmessage_length: 2",
            JSON({"echoed_message": "hi", "message_length": 2}),
        )
        assert transition.reward == pytest.approx(0.2)
    assert transition.info["metadata"]["step"] == 4
    assert json.loads(session.render())["step_count"] == 4
    transition = session.step([JSON({"words": "hi"}), JSON([1]), ToolCall("Other", {})])
    assert [outcome.valid for outcome in transition.outcomes] == [False] * 3
    assert json.loads(session.render())["step_count"] == 4


def test_seeds_ends_and_arguments_reach_the_environment(fleet: SyncFleet) -> None:
    (session,) = fleet.open("openenv-counter-v1", seed=2**32 + 7)
    assert session.observation.parts[0] == "count: 5\nseed: 7"
    rewards = []
    while not session.done:
        transition = session.step('{"by": 2}')
        rewards.append(transition.reward)
    assert (rewards, transition.terminated, transition.success) == ([1.0, 1.0, 1.0], True, True)
    (cut,) = fleet.open("openenv-counter-v1", options={"limit": 1})
    transition = cut.step("1")  # its only field, as text
    assert (transition.truncated, transition.terminated, transition.success) == (True, False, False)
    schema = json.loads(spec_of(fleet, "openenv-counter-v1").options_schema_json)
    assert {name: field["default"] for name, field in schema["properties"].items()} == {"start": 5, "limit": 0}
    for options in ({"log": "/etc/passwd"}, {"start": "many"}):
        with pytest.raises(BadArgument):
            fleet.open("openenv-counter-v1", options=options)


@pytest.mark.parametrize(("id", "action"), [("openenv-counter-v1", "1"), ("openenv-parrot-v1", "hello")])
def test_a_copy_continues_as_the_original(fleet: SyncFleet, id: str, action: str) -> None:
    check_copies(fleet, id, action, action)


def test_tools_are_called(fleet: SyncFleet) -> None:
    spec = spec_of(fleet, "openenv-tool-v1")
    assert [tool.name for tool in spec.action_space.tools] == ["add", "shout"]
    assert json.loads(spec.action_space.tools[0].parameters_schema_json)["required"] == ["a", "b"]
    assert not spec.capabilities.deterministic
    (session,) = fleet.open("openenv-tool-v1")
    text, value = session.step(ToolCall("add", {"a": 1, "b": 2})).observation.parts
    assert (text, value.value["result"]) == ("3", {"result": 3})
    transition = session.step('{"tool_name": "shout", "arguments": {"word": "hi"}}')
    assert transition.observation.text == "HI"
    wrong = session.step([ToolCall("add", {"a": "x"}), ToolCall("nothing", {}), "add 1 2"])
    assert [outcome.valid for outcome in wrong.outcomes] == [False] * 3
    assert "validation error" in wrong.observation.text


def test_they_keep_the_contract(server: ServerProcess) -> None:
    check_contract(server, "openenv-counter-v1", "openenv-tool-v1", "openenv-parrot-v1")


async def test_episodes_survive_a_killed_server_or_are_reported(server: ServerProcess) -> None:
    await check_recovery(server, "openenv-counter-v1", [JSON({"by": 2})], "unknown-v1")


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("not_here", "there is no module not_here; perhaps pip install not-here"),
        (TOOLS, "it has several environments; name one: .*:CounterEnvironment"),
        (f"{TOOLS}:CountEnvironment", "did you mean CounterEnvironment"),
        ("json", "neither json nor json.server defines"),
        (f"{TOOLS}:UntypedEnvironment", "name the class: #action=MODULE:CLASS"),
        (f"{TOOLS}:CounterEnvironment?begin=3", "takes no 'begin'"),
        (f"{TOOLS}:CounterEnvironment?start=-1", "it raised ValueError when it was tried: start is -1"),
    ],
)
def test_what_cannot_be_hosted_says_why(wanted: str, problem: str) -> None:
    check_refusal(host, wanted, problem)


def test_an_action_model_can_be_named() -> None:
    named = host(f"{TOOLS}:UntypedEnvironment#action={TOOLS}:Count")
    assert [tool.name for tool in named.spec.tools] == ["Count"]


def test_packages_that_need_openenv_are_found(packages: Path) -> None:
    about = packages / "parrot-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: parrot\nVersion: 0.1.0\nRequires-Dist: openenv>=0.2\n"
    )
    (about / "top_level.txt").write_text("parrot\n")
    with start_server("bandit", "openenv:*", environment={"PYTHONPATH": str(packages)}) as process:
        assert "bandit-v1, openenv-parrot-v1" in process.ready
    with start_server("bandit", "openenv:*") as process:
        assert "Serving bandit-v1 on" in process.ready
        assert "openenv:*: no matching environment can be hosted" in process.log
