"""Episodes that are played while something goes wrong, and the same ones that nobody disturbed, turn by turn."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc

from starpod.client import Fleet, Limits, Session, Want
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub

ENVIRONMENTS = {
    "frozen_lake-v1": ["Left", "Down", "Right", "Up"],
    "sokoban-v1": ["Left", "Down", "Right", "Up", "Jump"],
}
GROUP_SIZE = 4
LIMITS = Limits(max_turns=12, max_actions=0)
QUICK: dict[str, Any] = {"timeout": 0.5, "grace": 0.05, "health_seconds": 0.2, "patience": 60.0}
"""A fleet that notices in a second what one with the usual settings notices in half a minute."""

Episode = list[tuple[Any, ...]]


@dataclass
class Count:
    """Episodes that survived one fault, their turns, and the recoveries of their sessions."""

    episodes: int = 0
    turns: int = 0
    recoveries: int = 0


TALLY: dict[str, Count] = {}
"""By fault; conftest.py prints it at the end."""


async def live_sessions(address: str) -> int:
    """Return the number of sessions that the server holds, whoever opened them."""
    async with grpc.aio.insecure_channel(address) as channel:
        return int((await EnvironmentServiceStub(channel).Describe(pb.DescribeRequest())).live_sessions)


@dataclass
class Played:
    """Episodes by session, and how often a session was brought back. `groups` of each environment were opened."""

    episodes: list[list[Episode]]
    groups: int
    recoveries: int = 0
    options: dict[str, Any] = field(default_factory=dict)


async def play(
    session: Session, script: random.Random, episodes: int, pause: float, until: asyncio.Event
) -> list[Episode]:
    """Play at least `episodes` episodes, and more until the event is set: turn by turn, as the script says."""
    names = ENVIRONMENTS[session.environment_id]
    played: list[Episode] = []
    while len(played) < episodes or not until.is_set():
        observation = await session.reset(seed=script.getrandbits(32))
        episode: Episode = [(observation.text, observation.state_key, session.seed, session.dynamics_seed)]
        while not session.done:
            if pause:
                await asyncio.sleep(pause * random.random())
            turn = script.choices(names, k=script.randrange(1, 4))
            transition = await session.step(turn)
            episode.append(
                (
                    transition.observation.text,
                    transition.observation.state_key,
                    transition.reward,
                    transition.outcomes,
                    transition.end_reason,
                    transition.success,
                    session.step_index,
                )
            )
        played.append(episode)
    return played


async def open_all(fleet: Fleet, groups: int, **options: Any) -> list[Session]:
    """The sessions of `groups` of each environment."""
    opened = [
        await fleet.open(name, seed=group, count=GROUP_SIZE, limits=LIMITS, want=Want(state_key=True), **options)
        for name in ENVIRONMENTS
        for group in range(groups)
    ]
    return [session for group in opened for session in group]


async def play_all(
    fleet: Fleet, sessions: list[Session], counts: list[int], pause: float, until: asyncio.Event
) -> list[list[Episode]]:
    """All sessions at once: counts[i] episodes of session i, and more until the event."""
    played = await asyncio.gather(
        *(play(session, random.Random(number), counts[number], pause, until) for number, session in enumerate(sessions))
    )
    # Left to their leases they would weigh where the next test's sessions go.
    await fleet.close_sessions(sessions)
    return played


async def disturbed(
    addresses: str | list[str],
    fault: Callable[[Fleet], Awaitable[None]],
    *,
    groups: int = 2,
    pause: float = 0.02,
    opened_with: dict[str, Any] | None = None,
    **fleet: Any,
) -> Played:
    """Return the episodes of sessions that play while `fault` runs. Raise the errors of the sessions."""
    options = opened_with or {}
    over = asyncio.Event()
    async with Fleet(addresses, **{**QUICK, **fleet}) as servers:
        sessions = await open_all(servers, groups, **options)
        playing = asyncio.create_task(play_all(servers, sessions, [1] * len(sessions), pause, over))
        await asyncio.sleep(0.1)  # in the middle of their episodes
        raging = asyncio.ensure_future(fault(servers))
        await asyncio.wait({playing, raging}, return_when=asyncio.FIRST_COMPLETED)
        if playing.done():
            raging.cancel()
            await playing
            raise AssertionError("the episodes ended before the fault did")
        over.set()
        try:
            await raging
        finally:
            episodes = await playing
        return Played(episodes, groups, servers.recoveries, options)


class Reached(Protocol):
    """A server, or a proxy in front of one."""

    address: str


R = TypeVar("R", bound=Reached)


def busiest(fleet: Fleet, reached: Sequence[R]) -> R:
    """The one behind which most sessions of the fleet live: sessions that an earlier fault left to their leases weigh
    where the next ones go."""
    sessions = {replica.address: len(replica.sessions) for replica in fleet.replicas}
    return max(reached, key=lambda each: sessions.get(each.address, 0))


async def undisturbed(address: str, played: Played) -> list[list[Episode]]:
    """Return the episodes of the same programs without a fault, as many episodes each."""
    over = asyncio.Event()
    over.set()
    async with Fleet(address, recovery=False) as fleet:
        counts = [len(episodes) for episodes in played.episodes]
        return await play_all(fleet, await open_all(fleet, played.groups, **played.options), counts, 0.0, over)


async def compare_with_undisturbed(address: str, played: Played, fault: str) -> Count:
    """Holds every turn against the undisturbed run on the server at `address`, and counts under the fault's name."""
    expected = await undisturbed(address, played)
    count = TALLY.setdefault(fault, Count())
    for number, (found_all, expected_all) in enumerate(zip(played.episodes, expected, strict=True)):
        for place, (found, wanted) in enumerate(zip(found_all, expected_all, strict=True)):
            assert found == wanted, f"session {number}, episode {place}"
            count.episodes += 1
            count.turns += len(found) - 1
    count.recoveries += played.recoveries
    return count
