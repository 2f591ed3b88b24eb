"""The services that a trainer starts for itself."""

import os
import signal
import subprocess
import sys

import grpc
import pytest

from starpod.client import Fleet, UnknownEnvironment, UnknownVersion
from starpod.trainer.configuration.section import ConfigError
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import local_services, read_facts, server_words
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.client.fake_server import FakeServer
from tests.support import children_of, gone

TRAINER = """
import time
from starpod.trainer.rollout.environment import local_services
with local_services(["bandit-v1"], workers=2) as address:
    print(address, flush=True)
    time.sleep(600)
"""


def test_they_end_with_a_trainer_that_is_killed_outright() -> None:
    command = [sys.executable, "-c", TRAINER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline().startswith("127.0.0.1:")
        services = [service := children_of(trainer.pid)[0]]
        services += children_of(service)
        assert len(services) == 3
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        assert all(gone(each) for each in services)


@pytest.mark.parametrize("alone", [False, True])
def test_they_come_back_at_their_addresses(alone: bool) -> None:
    """alone: whether only the process that watches over the workers is killed; they end with it.

    No start forks: a fork at the wrong moment aborts in gRPC's threads, before the command is run.
    """
    forks: list[None] = []
    os.register_at_fork(before=lambda: forks.append(None))

    def describe() -> pb.DescribeResponse:
        with grpc.insecure_channel(address) as channel:
            stub = EnvironmentServiceStub(channel)
            return stub.Describe(pb.DescribeRequest(), wait_for_ready=True, timeout=60)

    others = children_of(os.getpid())

    def find_service() -> int:
        (service,) = set(children_of(os.getpid())) - set(others)
        return service

    with local_services(["bandit-v1"], workers=2) as address:
        before = describe()
        service = find_service()
        killed = [service, *children_of(service)]
        for each in killed[: 1 if alone else None]:
            os.kill(each, signal.SIGKILL)
        assert all(gone(each) for each in killed)
        again = describe()
        assert again.instance_id != before.instance_id
        assert again.endpoints == before.endpoints and len(set(again.endpoints)) == 2
        service = find_service()
    assert gone(service)
    assert forks == []


def test_the_site_has_them_by_their_name_or_file() -> None:
    assert server_words("bandit-v1", ()) == "--serve bandit-v1"
    assert server_words("vault-v1", ("my files/vault.py",)) == "--serve 'my files/vault.py'"
    assert server_words("shop-v1", ("--store", "a=b")) == "--address SERVER"


def test_what_they_say_is_handed_on() -> None:
    with pytest.raises(ConfigError, match="did you mean frozen_lake-v1"), local_services(["frozen_lak"]):
        pass


async def test_facts_are_those_of_the_newest_version_in_the_range() -> None:
    async with (
        FakeServer(version="1.2.0") as old,
        FakeServer(version="1.10.0") as new,
        Fleet([old.address, new.address]) as fleet,
    ):
        new.spec.action_space.names.append("jump")
        for version, names in (("", "left right bad jump"), ("<1.10", "left right bad")):
            facts = await read_facts(fleet, EnvironmentConfig(id="walk-v1", version=version))
            assert " ".join(facts.actions) == names
        with pytest.raises(UnknownVersion, match=r"fits '>=2': there are 1.10.0,1.2.0"):
            await read_facts(fleet, EnvironmentConfig(id="walk-v1", version=">=2"))
        with pytest.raises(UnknownEnvironment, match="walk-v1"):
            await read_facts(fleet, EnvironmentConfig(id="walk-v2"))
    with pytest.raises(ValueError, match="'~1' is not a version range"):
        EnvironmentConfig(version="~1")
