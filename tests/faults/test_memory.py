"""Memory that runs out in one place costs what was there, and nothing else."""

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from starpod.client import EnvironmentBug, Fleet
from tests.faults.episodes import TALLY, Count
from tests.support import ServerProcess, children_of, start_server
from tests.waiting import eventually

TROUBLED = str(Path(__file__).with_name("troubled.py"))
MEBIBYTE = 2**20
CGROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


def address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.minutes
@pytest.mark.skipif(sys.platform != "linux", reason="needs prlimit of a running process")
async def test_an_allocation_that_fails_costs_its_session_alone() -> None:
    """RLIMIT_AS on a worker: the environment that cannot have its memory has failed, and its neighbours go on."""
    with start_server(TROUBLED, "hungry-v1") as server:
        async with Fleet(server.address) as fleet:
            greedy, *others = await fleet.open("hungry-v1", seed=1, count=4)
            limit = address_space(server.pid) + 128 * MEBIBYTE  # enough for a stack more
            resource.prlimit(server.pid, resource.RLIMIT_AS, (limit, limit))
            with pytest.raises(EnvironmentBug, match="MemoryError"):
                await greedy.step("eat")
            for _ in range(5):
                for transition in await fleet.step_many(others, ["go"] * 3):
                    assert transition.reward == 1.0
            assert fleet.recoveries == 0


@contextlib.contextmanager
def memory_cgroup(name: str, pid: int, headroom: int) -> Iterator[None]:
    """The process may have so much more memory than now, in bytes; beyond, the kernel kills it. What it has already
    stays charged to where it came from."""
    for root, file in zip(CGROUPS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(headroom))
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            group.rmdir()
            continue
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here: that needs root and a writable hierarchy")


@pytest.mark.minutes
async def test_a_worker_that_is_killed_for_its_memory_is_started_again() -> None:
    """The kernel's OOM killer takes one of two workers; its sessions go on, and those of the other never notice."""
    with start_server(TROUBLED, "hungry-v1", "--workers", "2") as server:
        async with Fleet(server.address, patience=90.0) as fleet:
            await eventually(lambda: len(fleet.replicas) == 2 and all(replica.ready for replica in fleet.replicas))
            sessions = [(await fleet.open("hungry-v1", seed=seed))[0] for seed in range(8)]
            async with Fleet(server.address, recovery=False, discover=False) as alone:
                (victim,) = await alone.open("hungry-v1", seed=99)
                name = victim.address
                pid = worker_at(server, name)
                instance = next(replica.instance_id for replica in fleet.replicas if replica.address == name)
                with memory_cgroup(f"starpod-test-{os.getpid()}", pid, 96 * MEBIBYTE):
                    seen: list[list[str]] = [[] for _ in sessions]

                    async def walk() -> None:
                        for place, session in enumerate(sessions):
                            seen[place].append((await session.step("go")).observation.text)

                    await walk()
                    for _ in range(12):
                        try:
                            await victim.step("eat")
                        except Exception:  # the worker is gone, and with it the one who ate
                            break
                        await walk()
                    await eventually(
                        lambda: all(r.ready and r.instance_id != instance for r in fleet.replicas if r.address == name)
                    )
                    await walk()
            assert worker_at(server, name) != pid
            assert 0 < fleet.recoveries < len(sessions)
            count = TALLY.setdefault("worker killed for its memory", Count())
            count.recoveries += fleet.recoveries
        async with Fleet(server.address) as fleet:
            for seed, texts in enumerate(seen):
                (session,) = await fleet.open("hungry-v1", seed=seed)
                assert [(await session.step("go")).observation.text for _ in texts] == texts
                count.episodes, count.turns = count.episodes + 1, count.turns + len(texts)


def worker_at(server: ServerProcess, address: str) -> int:
    """The process that listens there."""
    port = address.rpartition(":")[2]
    for pid in children_of(server.pid):
        if f"--port\0{port}\0" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise AssertionError(f"no worker on port {port}")
