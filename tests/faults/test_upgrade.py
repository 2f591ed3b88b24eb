"""Servers are replaced by newer ones under the same addresses while sessions live."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from starpod.client import Fleet, Session, UnknownVersion
from tests.faults.episodes import QUICK, TALLY, Count
from tests.support import ServerProcess, start_server
from tests.waiting import eventually

TROUBLED = str(Path(__file__).with_name("troubled.py"))


async def turns(sessions: list[Session], count: int) -> list[list[str]]:
    texts: list[list[str]] = [[] for _ in sessions]
    for _ in range(count):
        for place, session in enumerate(sessions):
            texts[place].append((await session.step("go")).observation.text)
    return texts


async def upgrade(server: ServerProcess, fleet: Fleet) -> None:
    """Drains it, and starts version 1.0.1 on its port."""
    assert await asyncio.to_thread(server.terminate) == 0
    await asyncio.to_thread(server.restart, {"STARPOD_TEST_VERSION": "1.0.1"})
    await eventually(
        lambda: any(
            replica.ready and any(spec.version == "1.0.1" for spec in replica.specs)
            for replica in fleet.replicas
            if replica.address == server.address
        )
    )


@pytest.mark.minutes
async def test_a_rolling_upgrade() -> None:
    """Upgrade from 1.0.0 to 1.0.1, one server after the other."""
    arguments = (TROUBLED, "aging-v1", "ageless-v1", "--drain", "0.5")
    with ExitStack() as stack:
        servers = [stack.enter_context(start_server(*arguments)) for _ in range(2)]
        async with Fleet([server.address for server in servers], **QUICK) as fleet:
            replayed = [(await fleet.open("aging-v1", seed=seed))[0] for seed in range(4)]
            snapshot = [(await fleet.open("ageless-v1", seed=seed))[0] for seed in range(4)]
            starts = [int(session.observation.text.split()[-1]) for session in replayed]
            await turns(snapshot, 3)
            texts = await turns(replayed, 3)

            await upgrade(servers[0], fleet)
            # Old sessions continue with the old version, and new ones get the new version.
            for place, more in enumerate(await turns(replayed, 3)):
                texts[place] += more
            assert texts == [[f"1.0.0 at {start + turn}" for turn in range(1, 7)] for start in starts]
            assert {session.address for session in replayed} == {servers[1].address}
            (new,) = await fleet.open("aging-v1", seed=1)
            assert (new.version, new.address) == ("1.0.1", servers[0].address)
            before = [int(text[-1].split()[-1]) for text in await turns(snapshot, 1)]

            await upgrade(servers[1], fleet)
            # Nobody hosts 1.0.0 any more. An episode that has to be replayed is refused, and told why...
            for session in replayed:
                async with asyncio.timeout(90):
                    with pytest.raises(UnknownVersion) as refused:
                        await session.step("go")
                assert refused.value.available == ["1.0.1"]
            # Sessions kept as snapshots continue, too, since 1.0.1 restores snapshots of 1.0.0.
            for start, (text,) in zip(before, await turns(snapshot, 1), strict=True):
                assert 0 < int(text.split()[-1]) - start < 100
                assert text.startswith("1.0.1 at ")
            assert {session.version for session in snapshot} == {"1.0.1"}
            assert (await new.step("go")).observation.text.startswith("1.0.1 at ")
            count = TALLY.setdefault("upgrade in place", Count())
            count.episodes += len(replayed) + len(snapshot) + 1
            count.turns += 4 * 6 + 4 * 5 + 1
            count.recoveries += fleet.recoveries
