"""Episodes that begin near the expert's success, over the wire."""

import pytest

from starpod.client import Fleet, Limits, Session, Want
from starpod.trainer.agents.base import limits_left
from starpod.trainer.prompts.conversation import Template
from starpod.trainer.rollout.collect import Start
from starpod.trainer.rollout.environment import EnvironmentConfig
from starpod.trainer.rollout.expert_start import open_near_success
from tests.support import ServerProcess
from tests.trainer.rollout.test_collect import ACTIONS, LAKE, collector, reply, server, template
from tests.trainer.scripted_engine import ScriptedEngine

__all__ = ["server", "template"]


async def opened(fleet: Fleet, lake: EnvironmentConfig, moves: int, count: int = 3) -> list[Session]:
    return await open_near_success(lake.task(ACTIONS), fleet, 1, count, want=Want(state_key=True), moves=moves)


async def expert_needs(session: Session) -> int:
    (copy,) = await session.fork()
    steps = 0
    while not copy.done:
        # The way over this lake is free: any shortest one is the expert's.
        row = int(copy.observation.text.split()[1])
        await copy.step(["Down" if row < 2 else "Right"])
        steps += 1
    await copy.close()
    return steps


@pytest.mark.parametrize("moves", [1, 2, 3, 4, 9])
async def test_a_group_begins_so_many_moves_before_success(server: ServerProcess, moves: int) -> None:
    async with Fleet(server.address) as fleet:
        sessions = await opened(fleet, LAKE, moves)
        assert [session.member for session in sessions] == [0, 1, 2]
        assert len({session.observation.state_key for session in sessions}) == 1
        assert await expert_needs(sessions[0]) == min(moves, 4)
        # The expert's moves take nothing off the limits.
        for session in sessions:
            assert session.step_index == 4 - min(moves, 4)
            assert limits_left(session) == Limits(6, 2, 8)
        for _ in range(5):
            await sessions[1].step(["Left"])
        assert not sessions[1].done
        assert (await sessions[1].step(["Left"])).done
        await fleet.close_sessions(sessions)
        assert (await fleet.describe())[0].id == "frozen_lake-v1"


async def test_members_have_luck_of_their_own_and_the_same_in_each_run(server: ServerProcess) -> None:
    ice = LAKE.with_options({"success_rate": 0.5}).model_copy(update={"max_turns": 50, "max_actions": 50})
    paths = []
    async with Fleet(server.address) as fleet:
        for _ in range(2):
            sessions = await opened(fleet, ice, 3, count=6)
            assert sessions[0].step_index > 0
            assert len({session.dynamics_seed for session in sessions}) == 6
            paths.append([(await session.step(["Left", "Left"])).observation.text for session in sessions])
            await fleet.close_sessions(sessions)
    assert paths[0] == paths[1] and len(set(paths[0])) > 1


async def test_collected_episodes_say_where_they_began(server: ServerProcess, template: Template) -> None:
    near = LAKE.model_copy(update={"expert_moves_left": 1})
    async with Fleet(server.address) as fleet:
        engine = ScriptedEngine(template, lambda request, context: reply("Right", "Down"))
        (group,) = (await collector(fleet, engine, near).collect([Start(0, 1)], 2)).groups
    for episode in group.episodes:
        assert (episode.begun_at, len(episode.turns), episode.success) == (3, 1, True)
