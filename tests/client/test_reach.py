"""Earlier states of an episode: reached from a snapshot or by a replay, with the same random state."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from starpod.client import EpisodePath, Fleet, Opening, PathTurn, ReplayDiverged, Reseeding, Session, StarpodError, Want
from tests.client.fake_server import FakeServer

WANT = Want(state_key=True)


async def played(fleet: Fleet) -> tuple[EpisodePath, list[bytes]]:
    """Play five turns, one without actions, reseeded after two. Return the path and the state key before each turn."""
    (session,) = await fleet.open("walk-v1", seed=3, want=WANT)
    origin = Opening("walk-v1", session.seed, session.dynamics_seed, version=f"=={session.version}")
    events: list[PathTurn | Reseeding] = []
    keys = []
    for number, action in enumerate(["left", "right", "left", "", "right"]):
        if number == 2:
            events.append(Reseeding(77, await session.snapshot()))
            (session,) = await session.fork(reseed=True, dynamics_seeds=[77])
        events.append(PathTurn([action] if action else [], session.observation.text, await session.snapshot()))
        keys.append(session.observation.state_key)
        if action:
            await session.step(action)
    return EpisodePath(origin, events, session.observation.text), [*keys, session.observation.state_key]


def noting(visited: list[int]) -> Callable[[Session, int], Awaitable[None]]:
    async def note(_: Session, number: int) -> None:
        visited.append(number)

    return note


async def test_each_state_is_reached_from_its_snapshot_or_by_a_replay(fleet: Fleet) -> None:
    path, keys = await played(fleet)
    bare = replace(path, events=[replace(event, snapshot=None) for event in path.events])
    for turn, key in enumerate(keys):
        for way, first in ((path, min(turn, 4)), (bare, 0)):
            visited: list[int] = []
            session = await fleet.reach(way, turn, want=WANT, visit=noting(visited))
            assert session.observation.state_key == key
            assert visited == [*range(first, turn + 1)]
    assert (await fleet.reach(bare, want=WANT)).observation.state_key == keys[-1]
    with pytest.raises(ValueError, match="has 5 turns"):
        await fleet.reach(path, 6)


async def test_a_spoilt_snapshot_is_replayed_and_its_path_is_compared(fake: FakeServer, fleet: Fleet) -> None:
    path, keys = await played(fleet)
    spoilt = replace(
        path,
        events=[e if e.snapshot is None else replace(e, snapshot=replace(e.snapshot, state=b"")) for e in path.events],
    )
    session = await fleet.reach(spoilt, want=WANT)
    assert session.observation.state_key == keys[-1]
    other = replace(path, events=[], final="another observation")
    refused = replace(path, events=[PathTurn(["left"] * 100)])
    for wrong in (other, refused):
        with pytest.raises(ReplayDiverged, match="options or the version differ"):
            await fleet.reach(wrong)
    with pytest.raises(StarpodError):
        await fleet.reach(replace(path, events=[], origin=replace(path.events[0].snapshot, state=b"")))
    assert list(fake.sessions) == [session.id]
