"""Containers that are left behind, dead ones of the pool, snapshots, and verifiers that fail."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.env_server.machines.tasks import BASE, LEFTOVERS, TEXT_REWARD, leftover_labels, remove_image, write_task

pytestmark = [pytest.mark.containers, pytest.mark.timeout(180)]


@pytest.fixture
def made(engine: Any) -> Iterator[list[Any]]:
    """Environments that are closed after the test, and their images removed."""
    environments: list[Any] = []
    yield environments
    for environment in environments:
        environment.close()
    for environment in environments:
        remove_image(engine, environment.task.path)


def start(made: list[Any], folder: Path, hosting: str = "", **task: str) -> Any:
    """Return an environment of a task at its start, without a server."""
    from starpod.env_server.hosting import harbor

    write_task(folder, **{"tests": TEXT_REWARD, **task})
    environment = harbor.host(f"{folder}#warm=0&{hosting}")
    environment.prepare()
    instance = environment()
    instance.options = environment.Options()
    instance.reset(None)  # type: ignore[arg-type]
    made.append(instance)
    return instance


@pytest.mark.parametrize(("place", "session", "seconds", "stays"), LEFTOVERS)
def test_a_sweep_removes_what_no_session_uses(
    engine: Any, monkeypatch: pytest.MonkeyPatch, place: str, session: str, seconds: int, stays: bool
) -> None:
    """A container may lose its server without noticing, and a server may have no engine when a session ends.

    A container of another machine is removed when its lease is over.
    """
    from docker.errors import NotFound

    monkeypatch.setattr("starpod.env_server.machines.engine.live_sessions", {"used"})
    labels = leftover_labels(engine.server, place, session, seconds)
    container = engine.api.create_container(BASE, ["sleep", "1000"], labels=labels)["Id"]
    engine.api.start(container)
    try:
        engine.sweep()
        with contextlib.suppress(NotFound):
            if not stays:  # another server's sweep may be removing it
                engine.api.wait(container, timeout=30, condition="removed")
        left = [each["Id"] for each in engine.api.containers(all=True)]
        assert (container in left) == stays
    finally:
        engine.remove(container)


def test_a_container_that_could_not_be_removed_is_removed_by_a_sweep(
    engine: Any, made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not answer when the session ends, as while it is restarted."""
    machine = start(made, tmp_path / "kept").machine
    with monkeypatch.context() as patch:
        # The container's first process, which would end with this connection, does not notice.
        patch.setattr(machine.guard, "close", lambda: None)
        patch.setattr(engine.api, "remove_container", lambda *_, **__: _raise(ConnectionError("no engine")))
        machine.close()
    assert engine.sweep() == 1
    assert machine.id not in [each["Id"] for each in engine.api.containers(all=True)]


def _raise(error: Exception) -> None:
    raise error


def test_the_pool_hands_out_no_dead_machine(engine: Any, made: list[Any], tmp_path: Path) -> None:
    from starpod.env_server.machines.metrics import BOOT_SECONDS, DEAD_WARM
    from starpod.env_server.machines.pool import MachinePool

    plan = start(made, tmp_path / "pooled").plan
    pool = MachinePool(engine)
    try:
        alive, dead = (pool_boot(pool, plan) for _ in range(2))
        engine.remove(dead.id)
        pool._warm[plan].extend([dead, alive])
        machine = pool.take(plan)
        assert machine is alive
        assert machine.run("echo ready", 10).text == "ready\n"
        counts = {sample.name: sample.value for metric in DEAD_WARM.collect() for sample in metric.samples}
        assert counts["starpod_machine_dead_warm_total"] == 1
        boots = [sample for metric in BOOT_SECONDS.collect() for sample in metric.samples if "count" in sample.name]
        assert sum(sample.value for sample in boots) >= 3
        machine.booted -= plan.lifetime_seconds / 2
        pool._warm[plan].append(machine)
        assert pool.take(plan) is not machine and machine.closed, "a session would not have its time with it"
    finally:
        pool.close()


def pool_boot(pool: Any, plan: Any) -> Any:
    from starpod.env_server.machines.machine import Machine

    return Machine.boot(pool.engine, plan)


def test_a_copy_keeps_files_and_nothing_else(engine: Any, made: list[Any], tmp_path: Path) -> None:
    original = start(made, tmp_path / "copied", "copies=yes")
    original.step("echo hello > hello.txt; cd /tmp; X=1; sleep 1000 &")
    copy = original.copy()
    made.append(copy)
    copy.step("pwd; cat /app/hello.txt; echo [$X]; grep -l sleep /proc/[0-9]*/comm; rm /app/hello.txt")
    assert copy.told == "/tmp\nhello\n[]\n[exit status 0]"
    state = original.get_state()
    original.close()
    restored = type(original)()
    restored.options = original.options
    restored.set_state(state)
    made.append(restored)
    assert restored.step("done").reward == 1.0
    for image in (BASE, "starpod-snapshot:no", restored.task.image):
        with pytest.raises(ValueError, match="its engine does not have the snapshot"):
            restored.set_state({**state, "image": image})
    engine.api.remove_image(state["image"], force=True)


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("echo why; exit 1", "the verifier wrote no reward; the end of its output: why"),
        ("sleep 1000", "the verifier took longer than 2 s"),
        ("echo good > /logs/verifier/reward.txt", "the verifier wrote no number but 'good"),
        ("echo '{}' > /logs/verifier/reward.json", "which holds values that are no rewards"),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", "the verifier wrote no reward"),
    ],
)
def test_a_verifier_that_fails_is_an_error(made: list[Any], tmp_path: Path, tests: str, problem: str) -> None:
    seconds = 2.0 if tests.startswith("sleep") else 60.0
    environment = start(made, tmp_path / "bad", tests=tests, settings=f"[verifier]\ntimeout_sec = {seconds}\n")
    with pytest.raises(RuntimeError, match=problem):
        environment.step("done")


FORGED = """mkdir -p {folder}; printf '%s' '{text}' > {folder}/{name}; chmod +x {folder}/{name}"""
JSON = 'echo "{\\"reward\\": 1}" > /logs/verifier/reward.json'


@pytest.mark.parametrize(
    ("dockerfile", "name", "command"),
    [
        (
            "",
            "python reads settings in the agent's HOME",
            FORGED.format(
                folder="/tmp/.local/lib/python3.11/site-packages",
                name="usercustomize.py",
                text="import os; os._exit(0)",
            ),
        ),
        (
            "ENV PATH=/app/bin:$PATH\n",
            "the image's PATH begins with a folder of the agent",
            "; ".join(
                FORGED.format(folder="/app/bin", name=name, text=f"#!/bin/sh\n{JSON}") for name in ("rm", "bash")
            ),
        ),
    ],
    ids=["home", "path"],
)
def test_no_program_of_the_agent_runs_as_root(
    made: list[Any], tmp_path: Path, dockerfile: str, name: str, command: str
) -> None:
    tests = 'if /usr/bin/python3 -c "raise SystemExit(1)"; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
    environment = start(made, tmp_path / "forged", tests=tests, dockerfile=dockerfile)
    environment.step(command)
    assert environment.told == "[exit status 0]"
    assert environment.step("done").reward == 0.0, name


def test_an_agent_that_would_own_the_home_of_root_is_refused(made: list[Any], tmp_path: Path) -> None:
    from starpod.env_server.authoring.environment import Unavailable

    with pytest.raises(Unavailable, match=r"works in /root, .* or with #user=root"):
        start(made, tmp_path / "home", dockerfile="WORKDIR /root\n")
    environment = start(made, tmp_path / "home", "user=root", dockerfile="WORKDIR /root\n")
    environment.step("pwd")
    assert environment.told == "/root\n[exit status 0]"


def test_what_is_wrong_with_a_user_or_an_image_is_said(made: list[Any], tmp_path: Path) -> None:
    from starpod.env_server.authoring.environment import Busy, Unavailable

    with pytest.raises(Busy, match=r"invalid user: .nobody-here"):
        start(made, tmp_path / "nobody", "user=nobody-here")
    with pytest.raises(Unavailable, match=r"the image no/such/Image cannot be had: .*invalid reference format"):
        start(made, tmp_path / "absent", settings="[environment]\ndocker_image = 'no/such/Image'\n")


async def test_a_copy_counts_while_it_is_made(engine: Any, made: list[Any], tmp_path: Path) -> None:
    """Otherwise many copies at a time would exceed --max-containers."""
    from starpod.env_server import Limits
    from starpod.env_server.episodes.effects import Journal
    from starpod.env_server.processes.hosts import LocalHost, Pools, ResetPlan
    from starpod.v1.values import Want

    environment = type(start(made, tmp_path / "counted", "copies=fork"))
    want, before = Want(), LocalHost.containers
    host = LocalHost(environment, Pools.of(1, 60.0), Journal(), want)
    await host.reset(ResetPlan(environment.Options(), Limits(), 1, 1, want))
    copying = asyncio.ensure_future(host.fork(None))
    await asyncio.sleep(0)
    assert LocalHost.containers == before + 2
    for each in (host, await copying):
        each.close()
    assert LocalHost.containers == before


def test_a_session_is_not_lost_by_a_snapshot_that_fails(
    engine: Any, made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starpod.env_server.authoring.environment import Busy

    environment = start(made, tmp_path / "unsaved", "copies=yes")
    monkeypatch.setattr(engine.api, "commit", lambda *_, **__: _raise(ConnectionError("the disk is full")))
    with pytest.raises(Busy, match="its container cannot be saved: it cannot be reached: the disk is full"):
        environment.get_state()
    environment.step("echo hello > hello.txt")
    assert environment.step("done").reward == 1.0


def test_time_of_the_agent_ends_the_episode_and_its_work_counts(made: list[Any], tmp_path: Path) -> None:
    environment = start(made, tmp_path / "slow", settings="[agent]\ntimeout_sec = 1.0\n")
    outcome = environment.step("echo hello > hello.txt; sleep 1000")
    assert (outcome.reward, outcome.truncated, outcome.terminated) == (1.0, True, False)


def test_a_verifier_runs_beside_a_fork_bomb(made: list[Any], tmp_path: Path) -> None:
    environment = start(made, tmp_path / "bombed")
    environment.step("echo hello > hello.txt; (setsid bash -c 'b() { b | b & }; b' >/dev/null 2>&1 &); sleep 0.5")
    assert environment.step("done").reward == 1.0


def test_the_server_waits_for_room_after_a_fork_bomb(
    made: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended processes count towards the limit until they are reaped, so that the server's first commands may fail."""
    from starpod.env_server.machines.shell import CommandResult

    machine = start(made, tmp_path / "full").machine
    statuses = iter([1, None, 1, 0])
    monkeypatch.setattr(machine, "run", lambda *_, **__: CommandResult("", next(statuses), "/"))
    machine.clear("/tests")
    assert list(statuses) == []


def test_user_and_variables_of_task_and_image_count(made: list[Any], tmp_path: Path) -> None:
    dockerfile = "RUN useradd --create-home worker\nUSER worker\nENV A=image\n"
    settings = "[environment.env]\nB = 'task'\n"
    environment = start(made, tmp_path / "users", dockerfile=dockerfile, settings=settings)
    environment.step("echo $(whoami) $HOME $A $B")
    assert environment.told == "worker /home/worker image task\n[exit status 0]"
    root = start(made, tmp_path / "rooted", settings="[agent]\nuser = 'root'\n")
    root.step("id -u; mount -t tmpfs none /mnt")
    assert root.told.startswith("0\nmount: ")


def test_an_address_is_reached_again_after_a_time_out_and_never_by_a_verifier(made: list[Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as target:
        target.settimeout(30)
        port = target.getsockname()[1]
        ask = f"echo hello > /dev/tcp/127.0.0.1/{port}"
        tests = f"! {ask}; echo $((1 - $?)) > /logs/verifier/reward.txt"
        environment = start(made, tmp_path / "reaching", f"command_seconds=2&reach=127.0.0.1:{port}", tests=tests)
        for command in (ask, f"{ask}; sleep 100", ask):
            environment.step(command)
            assert target.accept()[0].recv(100) == b"hello\n"
        assert environment.step("done").reward == 1.0


def test_an_image_without_python_reaches_nothing(made: list[Any], tmp_path: Path) -> None:
    environment = start(made, tmp_path / "bare", "reach=127.0.0.1:1", dockerfile="RUN rm /usr/bin/python3*\n")
    with pytest.raises(RuntimeError, match=r"cannot reach 127\.0\.0\.1:1: the image .* needs python3"):
        environment.step("true")
