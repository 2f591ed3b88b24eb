"""`starpod check` as a function: all of a server's named environments at the same time. Recovery of one episode."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import grpc
import pytest

from starpod.check.runner import EnvironmentReport, check
from starpod.check.suite import REQUIREMENTS
from starpod.client import Action, Fleet, Limits, Session, SessionLost, Transition, Want
from starpod.client.observation import action_to_proto
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
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


async def _all(address: str, ids: Sequence[str], also: str) -> list[EnvironmentReport]:
    reports = await asyncio.gather(
        *(check(address, REQUIREMENTS, environments=[id], also=also, seconds=90, call_seconds=60) for id in ids)
    )
    return [environment for report in reports for environment in report.environments]


def check_all(
    address: str, ids: Sequence[str], also: str = "", shown: Collection[str] = ()
) -> dict[str, dict[str, str]]:
    """By environment, what was skipped and why. Fails the test where the contract is not kept.

    shown: requirements that most hosted environments cannot show, and these can.
    """
    expected = {id: why for id, why in WITHOUT.items() if id not in shown}
    skipped = {}
    for report in asyncio.run(_all(address, ids, also)):
        broken = [f"{result.requirement.id}: {result.message}" for result in report.results if result.breaks]
        assert not broken, (report.id, broken)
        skipped[report.id] = not_by_time(
            (result.requirement.id, result.message) for result in report.results if result.status == "skipped"
        )
        assert skipped[report.id].items() >= expected.items()
        assert not skipped[report.id].keys() & set(shown)
    assert sorted(skipped) == sorted(ids)
    return skipped


async def check_recovery(server: ServerProcess, id: str, actions: Sequence[Action], unknown: str = "") -> None:
    """Kills the server in the middle of an episode, which goes on as one that nobody disturbed.

    actions: again and again, to the end; none: the expert's. unknown: an environment on the same server that is not
    known to be deterministic, so that its episodes cannot be played again: their loss is told.
    """
    seed, limits = 5, Limits(max_turns=8)
    async with Fleet(server.address) as fleet, grpc.aio.insecure_channel(server.address) as channel:
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
        for action, wanted in zip(played[middle:], expected[middle + 1 :], strict=True):
            assert _seen(await session.step(action)) == wanted
            assert await _repeated(channel, session, action) == wanted
        assert session.done
        assert session.recoveries == 1
        for each in lost:
            with pytest.raises(SessionLost, match=f"{unknown} is not deterministic, and there is no snapshot to go on"):
                await each.step(played[middle])


def _seen(transition: Transition) -> tuple[Any, ...]:
    return transition.observation.parts, transition.reward, transition.end_reason, transition.success


async def _repeated(channel: grpc.aio.Channel, session: Session, action: Action) -> tuple[Any, ...]:
    """The reply to the last step, sent once more."""
    request = pb.StepRequest(
        session_id=session.id,
        epoch=session.state.epoch,
        step_index=session.step_index - 1,
        actions=[action_to_proto(action)],
    )
    reply = await EnvironmentServiceStub(channel).Step(request)
    assert reply.next_step_index == session.step_index
    return _seen(Transition.from_proto(reply.transition))
