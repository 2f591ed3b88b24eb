"""Episodes that begin near the expert's success, over the wire."""

import pytest

from starpod.client import Fleet, Limits, Session, Want
from starpod.trainer.agents.base import limits_left
from starpod.trainer.configuration.loading import parse_config
from starpod.trainer.rollout.config import EnvironmentConfig
from starpod.trainer.rollout.environment import make_task
from starpod.trainer.rollout.expert_start import open_near_success
from tests.trainer.lake import ACTIONS, LAKE, collect, reply


async def opened(fleet: Fleet, lake: EnvironmentConfig, moves: int, count: int = 3, group: int = 0) -> list[Session]:
    task, want = make_task(lake, ACTIONS), Want(state_key=True)
    return await open_near_success(task, fleet, 1, count, want=want, moves=moves, group=group)


@pytest.mark.parametrize("moves", [1, 3, 4, 9])
async def test_a_group_begins_a_number_of_moves_before_success(fleet: Fleet, moves: int) -> None:
    sessions = await opened(fleet, LAKE, moves)
    needed = min(moves, 4)
    # The expert's moves take nothing off the limits.
    assert [(each.member, each.step_index, limits_left(each, each.step_index)) for each in sessions] == [
        (member, 4 - needed, Limits(6, 2, 8)) for member in range(3)
    ]
    assert len({session.observation.state_key for session in sessions}) == 1
    for step in range(1, needed + 1):
        # The way over this lake is free: any shortest one is the expert's.
        row = int(sessions[0].observation.text.split()[1])
        assert (await sessions[0].step(["Down" if row < 2 else "Right"])).done == (step == needed)
    for step in range(1, 7):
        assert (await sessions[1].step(["Left"])).done == (step == 6)
    await fleet.close_sessions(sessions)


async def test_members_have_their_own_random_states_and_the_same_in_each_run(fleet: Fleet) -> None:
    ice = LAKE.with_options({"success_rate": 0.5}).model_copy(update={"max_turns": 50, "max_actions": 50})
    paths, seeds = [], set[int]()
    for group in (0, 0, 1):
        sessions = await opened(fleet, ice, 3, count=6, group=group)
        assert sessions[0].step_index > 0
        seeds |= {session.dynamics_seed for session in sessions}
        paths.append([(await session.step(["Left", "Left"])).observation.text for session in sessions])
        await fleet.close_sessions(sessions)
    assert paths[0] == paths[1] and len(set(paths[0])) > 1
    assert len(seeds) == 12, "a later group from this start has other transitions"


async def test_collected_episodes_say_where_they_began(fleet: Fleet) -> None:
    near = LAKE.model_copy(update={"expert_moves_left": 1})
    (group,), _ = await collect(fleet, reply("Right", "Down"), size=2, environment=near)
    assert [(episode.begun_at, len(episode.turns), episode.success) for episode in group] == [(3, 1, True)] * 2
    ((lost,),), _ = await collect(fleet, reply(), environment=near)
    assert (len(lost.turns), lost.end) == (6, "max_turns"), "the expert's moves add no turns"


def test_evaluations_begin_at_the_start_state() -> None:
    (task,) = parse_config({"environment": {"id": "frozen_lake-v1", "expert_moves_left": 2}}).tasks
    assert task.held_out.expert_moves_left is None
