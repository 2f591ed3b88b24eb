"""The server's wall clock leaps; leases and sessions do not notice, since they go by the monotonic clock."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from starpod.client import Fleet
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.faults.episodes import ENVIRONMENTS, compare_with_undisturbed, disturbed
from tests.support import ServerProcess, start_server

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
SECONDS_OF_A_DAY = 86_400


@pytest.mark.minutes
@pytest.mark.skipif(not LIBRARIES, reason="needs libfaketime (Debian: apt-get install libfaketime)")
async def test_the_clock_leaps_forward_and_back(server: ServerProcess, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    faked = {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        # Setting the real clock only moves this clock.
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    arguments = (*ENVIRONMENTS, "--log-format", "json", "--log-level", "info")
    with start_server(*arguments, environment=faked) as leaping:

        async def leap(_: Fleet) -> None:
            async with grpc.aio.insecure_channel(leaping.address) as channel:
                stub = EnvironmentServiceStub(channel)
                for reaped, days in enumerate((30, -30), start=1):
                    (tmp_path / "next").write_text(f"{days * SECONDS_OF_A_DAY:+}\n")
                    (tmp_path / "next").replace(clock)
                    short, long = [
                        (await stub.Open(pb.OpenRequest(environment_id="frozen_lake-v1", lease_seconds=lease)))
                        for lease in (0.5, 100.0)
                    ]
                    # No sooner, no later: whatever the clock on the wall says.
                    async with asyncio.timeout(60):
                        while not (await stub.Renew(renew(short))).missing:
                            await asyncio.sleep(2.0)  # longer than its lease and the reaper's round
                    assert not (await stub.Renew(renew(long))).missing
                    # Renew misses a session at once. The reaper says so with its round, by the clock of now.
                    async with asyncio.timeout(60):
                        while len(leaping.log.splitlines()) < reaped:
                            await asyncio.sleep(0.1)

        played = await disturbed(leaping.address, leap, opened_with={"lease_seconds": 60.0}, timeout=60.0)
        await compare_with_undisturbed(server.address, played, "wall clock leaps 30 days on, then 60 back")
        assert played.recoveries == 0
        months = {json.loads(line)["time"][:7] for line in leaping.log.splitlines()}
        assert len(months) == 2, f"the clock did not leap: {months}"


def renew(opened: pb.OpenResponse) -> pb.RenewRequest:
    return pb.RenewRequest(session_ids=[opened.sessions[0].session_id])
