"""`starpod check --reward` finds rewards that are not earned by the task, and nothing wrong with the built-in ones."""

import asyncio
import tomllib
from collections.abc import Sequence

import pytest

from starpod.check.requirement import Requirement
from starpod.check.runner import Result, check
from starpod.check.suite import REWARD
from starpod.v1 import environment_pb2 as pb
from tests.support import ROOT, start_server
from tests.tools.check.planted import REWARDS, vault, write_modules
from tests.tools.check.reference_server import ReferenceService, Seat, serve

BARE_NUMBERS = """
from dataclasses import replace

from starpod.environments import word_problems


class Lenient(word_problems.WordProblems):
    spec = replace(word_problems.WordProblems.spec, id="lenient-v1")

    def _steps_of(self, calculation):
        return frozenset(index for index, (_, result) in enumerate(self.steps) if result == calculation.value)
"""
WITHOUT_EXPERT = {"right": [], "any end is a success": [("solved = self.dial == self.secret", "solved = True")]}

Results = dict[str, list[Result]]


def examine(address: str, environments: Sequence[str] = (), requirements: Sequence[Requirement] = REWARD) -> Results:
    report = asyncio.run(check(address, requirements, environments=environments, seconds=120.0))
    return {environment.id: environment.results for environment in report.environments}


def unmet(results: Sequence[Result]) -> dict[str, str]:
    return {each.requirement.id: each.message for each in results if each.status in ("failed", "error")}


def skipped(results: Sequence[Result]) -> set[str]:
    return {each.requirement.id for each in results if each.status == "skipped"}


def id_of(name: str, *, expert: bool = True) -> str:
    return f"{name.replace(' ', '_')}{'' if expert else '_alone'}-v1"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of every vault on one server: of a wrong one, those of the requirement that finds its bug."""
    folder = tmp_path_factory.mktemp("vaults")
    texts = {id_of(name): vault(id_of(name), changes) for name, (_, changes) in REWARDS.items()}
    texts |= {"right-v1": vault("right-v1"), "lenient-v1": BARE_NUMBERS}
    ids = {id_of(name, expert=False): changes for name, changes in WITHOUT_EXPERT.items()}
    texts |= {id_: vault(id_, changes, expert=False) for id_, changes in ids.items()}
    with start_server(*write_modules(folder, texts)) as server:
        results = examine(server.address, ["right-v1", "lenient-v1", *ids])
        for requirement in REWARD:
            if wrong := [id_of(name) for name, (number, _) in REWARDS.items() if number == requirement.id]:
                results |= examine(server.address, wrong, [requirement])
        return results


@pytest.mark.parametrize("name", REWARDS)
def test_a_bug_is_found(name: str, found: Results) -> None:
    messages = unmet(found[id_of(name)])
    assert REWARDS[name][0] in messages, messages
    assert all("expected" in message and "got" in message for message in messages.values()), messages


def test_results_without_work_are_found_to_be_paid(found: Results) -> None:
    assert "writes the expert's numbers alone to meet no criterion" in unmet(found["lenient-v1"])["R-09"]


def test_an_environment_without_a_bug_has_none(found: Results) -> None:
    assert (unmet(found["right-v1"]), skipped(found["right-v1"])) == ({}, set())


def test_without_an_expert_it_is_enough_that_something_is_left_unsolved(found: Results) -> None:
    right, wrong = (found[id_of(name, expert=False)] for name in WITHOUT_EXPERT)
    assert (unmet(right), skipped(right) - {"R-07"}) == ({}, {"R-02", "R-08"})
    assert "R-04" in unmet(wrong)


@pytest.mark.minutes
def test_built_in_environments_have_none() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["starpod.environments"]
    names = [name for name in points if "browser" not in name]
    with start_server(*names) as server:
        found = examine(server.address)
    assert {name: unmet(results) for name, results in found.items()} == {name: {} for name in names}


@pytest.mark.minutes
def test_pay_for_doing_nothing_is_found_in_a_server_of_another_kind() -> None:
    class PaysForNothing(ReferenceService):
        def play(self, seat: Seat, request: pb.StepRequest) -> pb.Transition:
            transition = super().play(seat, request)
            transition.reward += not request.actions
            return transition

    async def both() -> list[list[Result]]:
        found = []
        for service in (ReferenceService(), PaysForNothing()):
            async with serve(service) as address:
                found.append((await check(address, REWARD)).results)
        return found

    right, wrong = map(unmet, asyncio.run(both()))
    assert set(right) <= {"R-04"}  # to go right is all that there is to learn of a walk
    assert "R-03" in wrong


def test_a_number_is_one_of_the_level() -> None:
    assert [each.id for each in REWARD] == [f"R-{number:02}" for number in range(1, len(REWARD) + 1)]
    assert all(isinstance(each, Requirement) and each.level == "reward" for each in REWARD)
