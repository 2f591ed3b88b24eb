"""A folder of tasks as one environment, with a real engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from starpod.client import StarpodError, SyncFleet, Want
from starpod.env_server.hosting.harbor_set import host
from starpod.env_server.hosting.request import HostingError
from tests.env_server.machines.tasks import write_tasks
from tests.support import start_server

WANT = Want(expert_action=True)


@pytest.fixture(scope="module")
def task_set(folder: Path) -> Iterator[SyncFleet]:
    with start_server(f"harbor_set:{folder}#id=set-v1&copies=fork") as process, SyncFleet(process.address) as fleet:
        yield fleet


@pytest.mark.containers
@pytest.mark.timeout(180)
def test_the_seed_picks_a_task_and_the_option_names_those_to_pick_from(task_set: SyncFleet) -> None:
    def first(seed: int, **options: str) -> str:
        (session,) = task_set.open("set-v1", seed=seed, options=options)
        return str(session.observation.text)

    assert [first(seed) for seed in range(4)] == ["Do count.", "Do hello.", "Do files.", "Do count."]
    assert [first(seed, task="[!f]*") for seed in range(3)] == ["Do count.", "Do hello.", "Do count."]
    with pytest.raises(StarpodError, match=r"no task matches 'helo'; there are count, files, hello"):
        first(0, task="helo")


@pytest.mark.containers
@pytest.mark.timeout(180)
def test_each_task_has_its_own_expert_and_verifier_also_in_a_fork(task_set: SyncFleet) -> None:
    for task in ("count", "hello"):
        (session,) = task_set.open("set-v1", options={"task": task}, want=WANT)
        (fork,) = session.fork(1)
        session.step(session.observation.expert_action)
        assert (session.step("done").reward, fork.step("done").reward) == (1.0, 0.0)


def test_tasks_that_cannot_be_served_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("docker")

    with pytest.raises(HostingError, match="it is no folder of tasks"):
        host(str(tmp_path))
    folder = write_tasks(tmp_path)
    (folder / "count" / "tests" / "test.sh").unlink()
    environment = host(str(folder))
    assert list(environment.tasks) == ["files", "hello"]


def test_servers_that_lack_different_tasks_give_a_seed_the_same_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a lost session would be replayed in another task."""
    pytest.importorskip("docker")
    from starpod.env_server.hosting.harbor import HarborTask

    monkeypatch.setattr(HarborTask, "reset", lambda self, rng: None)
    complete, partial = (host(str(write_tasks(tmp_path))) for _ in range(2))
    for kind in (complete, partial):
        for task in kind.tasks.values():
            task.verifier = None  # type: ignore[assignment]
    del partial.tasks["hello"]

    def pick(kind: Any, seed: int) -> str:
        environment = kind()
        environment.options, environment.seed = kind.Options(), seed
        environment.reset(random.Random(seed))
        return str(environment.task.path.name)

    picked = [(pick(complete, seed), pick(partial, seed)) for seed in range(3)]
    assert {one for one, _ in picked} == {"count", "files", "hello"}
    assert all(one == other for one, other in picked if one != "hello")
