"""Frames of episodes, drawn again over the wire."""

from starpod.client import Fleet
from starpod.trainer.agents.scripted import ReferenceAgents
from starpod.trainer.data.episode import Episode
from starpod.trainer.rollout.collect import Collector, starts_from
from starpod.trainer.rollout.frames import draw_episodes
from tests.support import ServerProcess
from tests.trainer.rollout.test_collect import ACTIONS, LAKE, server

__all__ = ["server"]
TASK = LAKE.task(ACTIONS)
PNG = b"\x89PNG"


async def played(fleet: Fleet) -> list[Episode]:
    collector = Collector(fleet=fleet, agents=ReferenceAgents("random"), task=TASK)
    return (await collector.collect(starts_from(range(3)), 1)).episodes


async def test_a_frame_before_each_turn_and_one_at_the_end(server: ServerProcess) -> None:
    async with Fleet(server.address) as fleet:
        episodes = await played(fleet)
        drawn = await draw_episodes({"": (fleet, TASK)}, enumerate(episodes))
    assert list(drawn) == [0, 1, 2]
    for place, frames in drawn.items():
        assert len(frames) == len(episodes[place].turns) + 1
        assert all(frame.startswith(PNG) for frame in frames) and len(set(frames)) > 1


async def test_what_cannot_be_repeated_is_left_out_and_pictures_are_bounded(server: ServerProcess) -> None:
    async with Fleet(server.address) as fleet:
        first, second, third = await played(fleet)
        first.turns[0].observation = "another lake"
        second.task = "elsewhere"
        lost = Episode(9, 0, "frozen_lake-v1", turns=third.turns, end="failed")
        players = {"": (fleet, TASK)}
        drawn = await draw_episodes(players, enumerate([first, second, lost, third, third]))
        assert list(drawn) == [3, 4] and drawn[3] == drawn[4]
        # Pictures that are there already cost nothing.
        size = sum(map(len, set(drawn[3])))
        assert list(await draw_episodes(players, enumerate([third, third]), most=size)) == [0, 1]
        assert await draw_episodes(players, enumerate([third]), most=size - 1) == {}
    async with Fleet(server.address) as fleet:
        server.kill()
        assert await draw_episodes({"": (fleet, TASK)}, enumerate([third])) == {}
