"""Checks of every family of hosted environments: the contract, copies, recovery, and one-line errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from starpod.check.runner import PLAYED, EnvironmentReport, check
from starpod.check.suite import REQUIREMENTS
from starpod.client import Action, Fleet, Limits, SessionLost, SyncFleet, Transition, Want
from starpod.env_server.hosting.request import HostingError
from starpod.v1 import environment_pb2 as pb
from tests.skipped import not_by_time
from tests.support import ServerProcess

WITHOUT = {
    "C-65": "the environment has no score",
    "C-66": "the environment has no expert",
    "C-92": "the server allows too many sessions to fill it",
    "C-95": "no token was given",
    "C-98": "it takes 75 s: run it with --slow",
}
"""What most hosted environments cannot show."""
EXPERT, SCORE = "C-66", "C-65"
ALL_LEVELS = [each.id for each in REQUIREMENTS if each.level != "reward"]
DECIDED = [
    *(PLAYED, "C-04", "C-09", "C-10", "C-12", "C-20", "C-21", "C-51"),
    *(id for id in ALL_LEVELS if "C-41" <= id <= "C-49" or "C-58" <= id <= "C-70" or id in ("C-78", "C-79")),
]
"""What an environment decides: its options, starts, outcomes, observations and whether it repeats.

All else are rules of sessions, which are the same for every family: one environment of one family is held to all.
"""


def words(family: str, *wanted: str) -> tuple[str, ...]:
    """Words of `starpod serve` that host these."""
    return tuple(f"{family}:{text}" for text in wanted)


def spec_of(fleet: SyncFleet, id: str) -> pb.EnvironmentSpec:
    return next(spec for spec in fleet.describe() if spec.id == id)


def check_refusal(host: Callable[[str], object], wanted: str, problem: str) -> None:
    """Hosting it fails with one line that says why."""
    with pytest.raises(HostingError, match=problem) as caught:
        host(wanted)
    assert "\n" not in str(caught.value)


def check_contract(
    server: ServerProcess, *ids: str, required: Collection[str] = DECIDED, shown: Collection[str] = ()
) -> dict[str, dict[str, str]]:
    """Return skipped requirements with the reason, by environment. Fail the test if an environment breaks the contract.

    shown: requirements that most hosted environments cannot show, and these can.
    """
    requirements = [each for each in REQUIREMENTS if each.id in required]
    expected = {id: why for id, why in WITHOUT.items() if id in {*required} - {*shown}}

    async def check_all() -> list[EnvironmentReport]:
        """All environments at the same time: much of it is waiting."""
        reports = (check(server.address, requirements, environments=[id], seconds=90, call_seconds=60) for id in ids)
        return [environment for report in await asyncio.gather(*reports) for environment in report.environments]

    skipped = {}
    for environment in asyncio.run(check_all()):
        broken = [f"{result.requirement.id}: {result.message}" for result in environment.results if result.breaks]
        assert not broken, (environment.id, broken)
        skipped[environment.id] = not_by_time(
            (result.requirement.id, result.message) for result in environment.results if result.status == "skipped"
        )
        assert skipped[environment.id].items() >= expected.items()
        assert not skipped[environment.id].keys() & set(shown)
    assert sorted(skipped) == sorted(ids)
    return skipped


def check_copies(fleet: SyncFleet, id: str, before: Action, after: Action, seed: int = 3) -> None:
    """A fork and a restored snapshot stand where the original does, and go on as it."""
    (session,) = fleet.open(id, seed=seed)
    session.step(before)
    (copy,) = session.fork()
    sessions = (session, copy, fleet.restore(session.snapshot()))
    assert len({each.render() for each in sessions}) == 1
    one, *others = [_seen(each.step(after)) for each in sessions]
    assert others == [one, one]


async def check_recovery(server: ServerProcess, id: str, actions: Sequence[Action] = (), unknown: str = "") -> None:
    """Kill the server in the middle of an episode, and check that the episode continues like an undisturbed one.

    actions: repeated until the episode ends; by default the expert's actions. unknown: an environment on the same
    server that is not known to be deterministic, so that its episodes cannot be replayed. Their loss must be reported.
    """
    seed, limits = 5, Limits(max_turns=8)
    async with Fleet(server.address) as fleet:
        (calm,) = await fleet.open(id, seed=seed, limits=limits, want=Want(expert_action=not actions))
        played: list[Action] = []
        expected: list[Any] = [calm.observation.parts]
        while not calm.done:
            action = actions[len(played) % len(actions)] if actions else calm.observation.expert_action
            assert action is not None
            played.append(action)
            expected.append(_seen(await calm.step(action)))

        (session,) = await fleet.open(id, seed=seed, limits=limits)
        lost = await fleet.open(unknown, seed=seed) if unknown else []
        assert session.observation.parts == expected[0]
        middle = len(played) // 2
        for each in (session, *lost):
            seen = [_seen(await each.step(action)) for action in played[:middle]]
            assert seen == expected[1 : middle + 1]
        await asyncio.to_thread(server.restart)
        assert [_seen(await session.step(action)) for action in played[middle:]] == expected[middle + 1 :]
        assert session.done
        assert session.recoveries == 1
        for each in lost:
            with pytest.raises(
                SessionLost, match=f"{unknown} is not deterministic, and there is no snapshot to continue"
            ):
                await each.step(played[middle])


def _seen(transition: Transition) -> tuple[Any, ...]:
    return transition.observation.parts, transition.reward, transition.end_reason, transition.success
