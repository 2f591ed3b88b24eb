"""Verifiers in containers of their own, with a real engine: they get the named files and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from starpod.client import StarpodError, SyncFleet
from tests.env_server.machines.tasks import BASE, remove_image, write_task
from tests.support import start_server

pytestmark = [pytest.mark.containers, pytest.mark.timeout(180)]

TESTS = """[ "$(cat /app/out/answer.txt)" = 3 ] && [ "$(cat /logs/artifacts/log.txt)" = done ] && right=1
[ ! -e /app/scratch ] && [ ! -L /app/out/link ] && [ ! -e /app/out/pipe ] && alone=1
echo "{\\"right\\": ${right:-0}, \\"alone\\": ${alone:-0}}" > /logs/verifier/reward.json"""
COMMAND = """mkdir out && cd out && ln -s /etc/passwd link && mkfifo pipe && echo 3 > answer.txt
touch ../scratch; echo done > /logs/artifacts/log.txt"""


@pytest.fixture(scope="module")
def apart(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncFleet]:
    folder = tmp_path_factory.mktemp("apart")
    own = "artifacts = ['/app/out', '/logs', {source = '/missing'}]\n[verifier]\nenvironment_mode = 'separate'\n"
    write_task(folder / "same", tests=TESTS, settings=own)
    write_task(
        folder / "other", tests=TESTS, settings=own.replace("environment_mode = 'separate'", "[verifier.environment]")
    )
    (folder / "other" / "tests" / "Dockerfile").write_text(
        f"FROM {BASE}\nCOPY . /tests/\nRUN chmod +x /tests/test.sh\n"
    )
    write_task(folder / "large", tests=TESTS, settings=own)
    with start_server(f"harbor:{folder}") as process, SyncFleet(process.address) as fleet:
        yield fleet
    for task in folder.iterdir():
        remove_image(engine, task)


@pytest.mark.parametrize("task", ["same", "other"])
def test_the_verifier_sees_the_artifacts_alone(apart: SyncFleet, task: str) -> None:
    good, idle = apart.open(f"harbor-{task}-v1", count=2)
    good.step(COMMAND)
    idle.step("echo 1 > /logs/artifacts/reward.txt; mkdir -p /logs/agent; echo 1 > /logs/agent/reward.json")
    parts = dict(good.step("done").reward_parts)
    assert parts == {"right": 0.5, "alone": 0.5}
    assert dict(idle.step("done").reward_parts) == {"right": 0.0, "alone": 0.5}


def test_artifacts_that_are_too_large_are_an_error_and_no_reward(apart: SyncFleet) -> None:
    (session,) = apart.open("harbor-large-v1")
    session.step("mkdir out; for n in 1 2 3 4 5; do head -c 60M /dev/zero > out/$n; done")
    with pytest.raises(StarpodError, match="they have more than 268,435,456 bytes"):
        session.step("done")
