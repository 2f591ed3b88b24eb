"""Reasoning Gym's datasets as services."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("reasoning_gym", reason="Reasoning Gym is not installed: make test-hosting")

import reasoning_gym

from starpod.client import BadArgument, SyncFleet, Want
from starpod.env_server.hosting.families import add_hosted
from starpod.env_server.hosting.reasoning_gym import host
from starpod.env_server.registry import Registry
from starpod.v1 import environment_pb2 as pb
from tests.env_server.hosting.checks import EXPERT, check_contract, check_recovery, check_refusal, words
from tests.support import ServerProcess

LEGS = "reasoning-leg_counting-v1"
BY_HASH = "reasoning-isomorphic_strings-v1"
"""A dataset that iterates over a set of text."""


WORDS = words("reasoning-gym", "leg_counting", "isomorphic_strings", "prime_factorization", "graph_color")


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_a_question_is_the_packages_own(fleet: SyncFleet, seed: int) -> None:
    entry = reasoning_gym.create_dataset("leg_counting", seed=seed % 2**31, size=1)[0]
    right, wrong = fleet.open(LEGS, seed=seed, count=2, want=Want(expert_action=True))
    assert right.observation.text == entry["question"]
    assert right.observation.expert_action == entry["answer"]
    done = right.step(entry["answer"])
    assert (done.reward, done.terminated, done.success) == (1.0, True, True)
    assert done.info["metadata"]["total_legs"] == int(entry["answer"])
    done = wrong.step("a few")
    assert (done.terminated, done.success) == (True, False)
    assert done.reward < 0.1


def test_callers_choose_the_difficulty(fleet: SyncFleet) -> None:
    (session,) = fleet.open(LEGS, seed=3, options={"min_animals": 1, "max_animals": 1})
    entry = reasoning_gym.create_dataset("leg_counting", seed=3, size=1, min_animals=1, max_animals=1)[0]
    assert session.observation.text == entry["question"]
    for options in ({"size": 3}, {"seed": 3}, {"min_animals": "many"}):
        with pytest.raises(BadArgument):
            fleet.open(LEGS, options=options)
    with pytest.raises(BadArgument, match="max_animals must be >= min_animals"):
        fleet.open(LEGS, options={"min_animals": 9, "max_animals": 2})


def test_an_answer_that_the_scorer_cannot_read_is_wrong(fleet: SyncFleet) -> None:
    """The scorer raises for it. This is the policy's mistake and no error of the session."""
    (session,) = fleet.open("reasoning-prime_factorization-v1", seed=1)
    done = session.step("banana")
    assert (done.reward, done.terminated, done.success) == (0.0, True, False)
    assert "ValueError" in done.info["scorer_raised"]


def test_a_dataset_without_answers_has_no_expert(fleet: SyncFleet) -> None:
    experts = {spec.id: spec.capabilities.expert_action for spec in fleet.describe()}
    assert not experts["reasoning-graph_color-v1"]
    assert experts[LEGS]


def test_the_order_of_sets_is_the_same_in_all_servers(fleet: SyncFleet) -> None:
    """Processes of sessions have one salt of text hashes, whatever that of their server is."""
    texts = [session.observation.text for session in fleet.open(BY_HASH, seed=1, count=2)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    program = "import reasoning_gym as r; print(r.create_dataset('isomorphic_strings', seed=1, size=1)[0]['question'])"
    own = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert texts == [own.stdout.removesuffix("\n")] * 2
    assert host("isomorphic_strings").spec.deterministic
    assert not host("isomorphic_strings#concurrency=inline").spec.deterministic


def test_a_session_has_a_process_of_its_own(fleet: SyncFleet) -> None:
    """Some scorers evaluate the answer."""
    assert {spec.concurrency for spec in fleet.describe()} == {pb.CONCURRENCY_CLASS_PROCESS}


def test_it_keeps_the_contract(server: ServerProcess) -> None:
    check_contract(server, BY_HASH, shown={EXPERT})


async def test_episodes_survive_a_killed_server(server: ServerProcess) -> None:
    await check_recovery(server, LEGS)


def test_a_star_hosts_all_that_fit_and_can_be(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    ids = add_hosted(registry, "reasoning_gym:*_counting")
    assert ids == registry.ids
    assert LEGS in ids
    assert all(id.endswith("_counting-v1") for id in ids)
    add_hosted(registry, "reasoning_gym:com*")
    assert (
        "composite cannot be hosted: these arguments make no dataset: Must specify at least one dataset" in caplog.text
    )


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("leg_count", "did you mean leg_counting"),
        ("leg_counting?legs=3", "takes no 'legs'"),
        ("leg_counting?size=3", "size is set by each session's seed"),
        ("leg_counting?min_animals=0", "min_animals must be positive"),
        ("composite", "Must specify at least one dataset"),
    ],
)
def test_what_cannot_be_hosted_says_why(wanted: str, problem: str) -> None:
    check_refusal(host, wanted, problem)
