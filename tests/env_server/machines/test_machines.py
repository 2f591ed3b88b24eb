"""Tasks in containers: a real server, a real engine. What an agent can do, and what happens when something dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from starpod.client import SessionLost, SyncFleet, ToolCall, Transition, Want
from starpod.v1 import environment_pb2 as pb
from starpod.v1 import environment_pb2_grpc
from tests.env_server.machines.tasks import COUNT_SLEEPS
from tests.support import ServerProcess, start_server

pytestmark = [pytest.mark.containers, pytest.mark.timeout(180)]


def run(session: Any, command: str) -> str:
    """Run a command and return what the agent is shown."""
    return str(session.step(command).observation.text)


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds. Fail the test if it does not within half a minute."""
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail(f"not within 30 s: {what}")


def containers_of(engine: Any, environment: str = "") -> list[str]:
    found = engine.api.containers(all=True, filters={"label": "starpod.server"})
    return [each["Id"] for each in found if environment in each["Names"][0]]


def finish(session: Any) -> Transition:
    """Play the expert until the end of the episode."""
    while not session.done:
        last = session.step(session.observation.expert_action)
    return last


@pytest.mark.parametrize(
    ("task", "parts"),
    [("hello", {"reward": 1.0}), ("count", {"right": 0.5, "written": 0.5}), ("files", {"reward": 1.0})],
)
def test_the_reference_solves_and_doing_nothing_does_not(fleet: SyncFleet, task: str, parts: dict[str, float]) -> None:
    solved, idle = fleet.open(f"harbor-{task}-v1", count=2, want=Want(expert_action=True))
    assert solved.observation.text == f"Do {task}."
    last = finish(solved)
    assert (last.reward, last.success, last.terminated, dict(last.reward_parts)) == (1.0, True, True, parts)
    while not idle.done:
        last = idle.step([])
    assert (last.reward, last.success, last.truncated) == (0.0, False, True)


def test_turns_that_run_out_are_verified(fleet: SyncFleet) -> None:
    (session,) = fleet.open("harbor-hello-v1", want=Want(expert_action=True))
    session.step(session.observation.expert_action)
    for _ in range(10):
        assert not session.step("true").truncated
    last = session.step("true")
    assert (last.reward, last.success, last.truncated) == (1.0, True, True)
    assert sum(outcome.reward for outcome in last.outcomes) == 1.0


def test_the_shell_lives_as_long_as_the_session(fleet: SyncFleet) -> None:
    (session,) = fleet.open("harbor-hello-v1")
    assert run(session, "cd /tmp\nX='a b'; false") == "[exit status 1]"
    assert run(session, '```bash\necho "$X in $PWD"; cat\n```') == "a b in /tmp\n[exit status 0]"
    session.step(ToolCall("write_file", {"path": "new/it's", "text": "1\n2"}))
    read = session.step(ToolCall("bash", {"command": "cat new/it*"}))
    assert read.observation.text == "1\n2\n[exit status 0]"
    assert run(session, "exit 3") == "[the command ended the shell; a new shell starts in /tmp, without the variables]"
    text = run(session, "pwd; seq 100000")
    assert text.startswith("/tmp\n1\n2\n")
    assert "bytes left out]\n" in text
    assert text.endswith("\n99999\n100000\n[exit status 0]")
    assert not session.step(" ").outcomes[0].valid


def test_a_time_out_ends_the_whole_process_tree(fleet: SyncFleet) -> None:
    (session,) = fleet.open("harbor-hello-v1")
    assert run(session, "cd /tmp") == "[exit status 0]"
    text = run(session, "sleep 1000 & (trap '' TERM HUP; setsid sleep 1000 &); sleep 1000")
    assert "the command took longer than 3 s" in text
    assert run(session, f"pwd; {COUNT_SLEEPS}") == "/tmp\n0\n[exit status 0]"


def test_limits_of_processes_memory_and_files_hold(fleet: SyncFleet) -> None:
    (session,) = fleet.open("harbor-hello-v1")
    assert "took longer" in run(session, "bomb() { bomb | bomb & }; bomb 2>/dev/null; sleep 100")
    assert run(session, "python3 -c 'bytearray(10**9)'").endswith("[exit status 137]")
    assert "File size limit exceeded" in run(session, "head -c 65M /dev/zero > big")
    assert "wrote more than 67,108,864 bytes" in run(session, "yes")
    assert run(session, "echo alive") == "alive\n[exit status 0]"


def test_an_agent_has_no_network_no_root_and_no_reward_file(fleet: SyncFleet) -> None:
    (session,) = fleet.open("harbor-hello-v1")
    assert run(session, "ls /sys/class/net") == "lo\n[exit status 0]"
    assert run(session, "id -u; grep -c 'CapEff:.0*$' /proc/self/status") == "1000\n1\n[exit status 0]"
    assert run(session, "echo 1 > /logs/verifier/reward.txt").endswith("Permission denied\n[exit status 1]")
    assert run(session, "mkdir /tests").endswith("Permission denied\n[exit status 1]")
    assert session.step("done").reward == 0.0


def test_a_command_that_is_sent_twice_runs_once(fleet: SyncFleet, server: ServerProcess) -> None:
    """The connection breaks while the command runs. The caller sends it again over another one, and once more later."""
    (session,) = fleet.open("harbor-hello-v1")
    (probe,) = fleet.open("harbor-hello-v1")
    request = pb.OpenRequest(environment_id="harbor-hello-v1")
    with grpc.insecure_channel(server.address) as channel:
        opened = environment_pb2_grpc.EnvironmentServiceStub(channel).Open(request).sessions[0]
        step = pb.StepRequest(session_id=opened.session_id, epoch=1, actions=[pb.Action(text="echo x >> n; sleep 1")])
        call = environment_pb2_grpc.EnvironmentServiceStub(channel).Step.future(step)
        time.sleep(0.3)
        call.cancel()
    with grpc.insecure_channel(server.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        replies = [stub.Step(step), stub.Step(step)]
        assert replies[0] == replies[1]
        count = pb.StepRequest(
            session_id=opened.session_id, epoch=1, step_index=1, actions=[pb.Action(text="wc -l < n")]
        )
        assert stub.Step(count).transition.observation.parts[0].text == "1\n[exit status 0]"
        stub.Close(pb.CloseRequest(session_ids=[opened.session_id]))
    for each in (session, probe):
        each.close()


def test_a_dead_container_is_a_lost_session(fleet: SyncFleet, engine: Any) -> None:
    (session,) = fleet.open("harbor-count-v1")
    name = session.step("true").info["container"]

    def end() -> None:
        engine.api.kill(name)  # Removing alone may take longer than the command.
        engine.remove(name)

    threading.Timer(0.5, end).start()
    with pytest.raises(SessionLost, match="harbor-count-v1 is not deterministic, and there is no snapshot"):
        session.step("sleep 2.9; echo 1 > answer.txt")


def test_a_deterministic_task_is_replayed_in_another_container(fleet: SyncFleet, engine: Any) -> None:
    (session,) = fleet.open("again-v1")
    first = session.step("echo hello > hello.txt; cd /tmp")
    engine.remove(first.info["container"])
    assert run(session, "pwd") == "/tmp\n[exit status 0]"
    assert session.recoveries == 1
    assert session.step("done").reward == 1.0


def test_closed_and_expired_sessions_leave_no_container(fleet: SyncFleet, engine: Any) -> None:
    fleet.open("harbor-files-v1")[0].close()
    fleet.open("harbor-files-v1", lease_seconds=1.0)
    eventually(lambda: len(containers_of(engine, "harbor-files")) <= 1, "only the warm one is left")


def test_no_container_outlives_a_killed_server(folder: Any, engine: Any) -> None:
    with start_server(f"harbor:{folder}/hello#id=killed-v1") as server, SyncFleet(server.address) as fleet:
        fleet.open("killed-v1", count=2)
        assert len(containers_of(engine, "killed-v1")) >= 2
        server.kill()
        eventually(lambda: not containers_of(engine, "killed-v1"), "all containers are gone")
