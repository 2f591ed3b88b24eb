"""A partition between machines: a server in another network namespace, and a link that loses every packet."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator

import pytest

from starpod.client import Fleet
from tests.faults.episodes import ENVIRONMENTS, compare_with_undisturbed, disturbed
from tests.support import ServerProcess, start_server
from tests.waiting import eventually

NOWHERE = "02:00:00:00:00:99"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Wire:
    """Joins this namespace and another one. `name` is the other's; `here` and `there` are the two addresses."""

    def __init__(self) -> None:
        self.name = f"starpod{os.getpid()}"
        self.ours, self.theirs = f"sp{os.getpid()}a", f"sp{os.getpid()}b"
        # 198.18.0.0/15 is for tests of networks (RFC 2544).
        net = f"198.18.{os.getpid() % 250}"
        self.here, self.there = f"{net}.1", f"{net}.2"

    def build(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.ours, "type", "veth", "peer", "name", self.theirs, "netns", self.name)
        ip("addr", "add", f"{self.here}/30", "dev", self.ours)
        ip("link", "set", self.ours, "up")
        for words in (("addr", "add", f"{self.there}/30", "dev", self.theirs), ("link", "set", self.theirs, "up")):
            ip("-n", self.name, *words)
        ip("-n", self.name, "link", "set", "lo", "up")

    def partition(self) -> None:
        """Each side takes the other for a machine that nobody has: packets go out and arrive nowhere, in silence."""
        ip("neigh", "replace", self.there, "lladdr", NOWHERE, "dev", self.ours, "nud", "permanent")
        ip("-n", self.name, "neigh", "replace", self.here, "lladdr", NOWHERE, "dev", self.theirs, "nud", "permanent")

    def heal(self) -> None:
        ip("neigh", "del", self.there, "dev", self.ours)
        ip("-n", self.name, "neigh", "del", self.here, "dev", self.theirs)

    def remove(self) -> None:
        for words in (("netns", "del", self.name), ("link", "del", self.ours)):
            with contextlib.suppress(OSError):
                ip(*words)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    try:
        wire.build()
    except OSError as error:
        wire.remove()
        pytest.skip(f"no network namespace can be made here: {error}")
    try:
        yield wire
    finally:
        wire.remove()


@pytest.mark.minutes
async def test_a_partition_that_outlasts_keepalive_and_heals(server: ServerProcess, wire: Wire) -> None:
    prefix = ["ip", "netns", "exec", wire.name]
    arguments = (*ENVIRONMENTS, "--host", wire.there, "--keepalive", "1")
    with start_server(*arguments, prefix=prefix) as far, start_server(*ENVIRONMENTS) as near:

        async def part(fleet: Fleet) -> None:
            wire.partition()
            await eventually(lambda: fleet.recoveries > 0)
            await asyncio.sleep(2.0)  # longer than keepalive on either side
            wire.heal()
            await eventually(
                lambda: all(replica.ready and not replica.closer.unclosed for replica in fleet.replicas), 60
            )
            # It is used again, as soon as the other one has no fewer sessions.
            opened = [(await fleet.open("frozen_lake-v1", seed=7))[0] for _ in range(200)]
            assert far.address in {session.address for session in opened}
            await fleet.close_sessions(opened)

        played = await disturbed([near.address, far.address], part)
    await compare_with_undisturbed(server.address, played, "partition (network namespaces)")
    assert played.recoveries > 0
