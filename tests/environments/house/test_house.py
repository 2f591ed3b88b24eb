"""house-v1: tasks of every kind, what can be done where, what is seen, splits, the expert and nonsense."""

import functools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server.episodes.live_episode import LiveEpisode, TurnResult, Want
from starpod.environments.house import House
from starpod.environments.house.rooms import CLOSED, TASKS, HouseTask, kind_of, possible_tasks
from starpod.environments.house.state import Nothing, State
from starpod.v1.values import EndReason
from tests.environments import episodes

start = functools.partial(episodes.start, House)
SEEDS = st.integers(0, 2**64 - 1)


def small(task: HouseTask, things: dict[str, str]) -> State:
    places = ("cabinet 1", "desk 1", "fridge 1", "microwave 1", "shelf 1", "sinkbasin 1")
    return State(task, places, things)


def act(state: State, *actions: str) -> list[str]:
    return [state.act(action) for action in actions]


def turn(episode: LiveEpisode, action: Any) -> TurnResult:
    return episode.turn([action], Want())


@given(
    seed=SEEDS,
    task=st.sampled_from(TASKS),
    split=st.sampled_from(["all", "train", "test"]),
    furniture=st.sampled_from([0, 8]),
)
def test_the_expert_does_every_task_by_valid_actions(seed: int, task: str, split: str, furniture: int) -> None:
    episode = start(seed, tasks=[task], split=split, furniture=furniture)
    played = episodes.play_expertly(episode)
    assert (played[-1].reward, played[-1].end_reason) == (1, EndReason.TERMINAL)


@given(seed=SEEDS, choices=SEEDS)
def test_every_valid_action_can_be_done_and_the_expert_recovers(seed: int, choices: int) -> None:
    rng = random.Random(choices)
    episode = start(seed, max_steps=10_000)
    house = episode.environment
    for _ in range(30):
        if episode.end_reason:
            return
        valid = house.valid_actions()
        assert len(set(valid)) == len(valid)
        transition = turn(episode, rng.choice(valid))
        assert transition.outcomes[0] is not None and transition.outcomes[0].valid
    for _ in range(150):
        if not episode.end_reason:
            transition = turn(episode, house.expert_action())
    assert transition.success


def test_no_task_is_done_at_the_start_and_all_kinds_come() -> None:
    houses = [start(seed, furniture=furniture).environment for seed in range(200) for furniture in (0, 8)]
    assert {house.state.task.kind for house in houses} == set(TASKS)
    assert all(house.score() == 0 for house in houses)


def test_heating_needs_the_thing_in_the_hand_and_the_microwave() -> None:
    state = small(HouseTask("heat", "apple", "shelf"), {"apple 1": "fridge 1", "apple 2": "shelf 1"})
    for early in ("take apple 1 from fridge 1", "heat apple 1 with microwave 1", "open fridge 1", "go to attic 1"):
        with pytest.raises(Nothing):
            state.act(early)
    assert act(state, "go to fridge 1", "open fridge 1", "take apple 1 from fridge 1")[1].endswith("You see apple 1.")
    assert state.stages() == {"taken": True, "heated": False, "placed": False}
    with pytest.raises(Nothing):
        state.act("take apple 2 from shelf 1")  # one thing at a time, and not from afar
    act(state, "go to microwave 1", "heat apple 1 with microwave 1", "go to shelf 1")
    act(state, "put apple 1 in shelf 1")
    assert state.done()


def test_cooling_undoes_heating() -> None:
    state = small(HouseTask("heat", "apple", "shelf"), {"apple 1": "desk 1"})
    act(state, "go to desk 1", "take apple 1 from desk 1", "go to microwave 1", "heat apple 1 with microwave 1")
    act(state, "go to fridge 1", "cool apple 1 with fridge 1", "go to shelf 1", "put apple 1 on shelf 1")
    assert not state.done() and not state.stages()["heated"]


def test_the_lamp_shines_on_what_is_held() -> None:
    state = small(HouseTask("look", "book", ""), {"book 1": "shelf 1"})
    act(state, "go to desk 1", "use desklamp 1", "go to shelf 1", "take book 1 from shelf 1")
    assert not state.done()
    act(state, "go to desk 1", "use desklamp 1")
    assert state.done()


def test_two_things_have_to_be_there_at_once() -> None:
    state = small(HouseTask("place_two", "pen", "shelf"), {"pen 1": "desk 1", "pen 2": "desk 1"})
    act(state, "go to desk 1", "take pen 1 from desk 1", "go to shelf 1", "put pen 1 in/on shelf 1")
    act(state, "take pen 1 from shelf 1", "put pen 1 in shelf 1")
    assert [*state.stages().values()] == [True, True, False, False]
    act(state, "go to desk 1", "take pen 2 from desk 1", "go to shelf 1", "move pen 2 to shelf 1")
    assert state.done()


def test_contents_behind_a_door_are_not_shown() -> None:
    house = start(5, furniture=12).environment
    told = house.observe()
    for thing, place in house.state.things.items():
        assert thing not in told
        assert thing not in house.render()
        if kind_of(place) in CLOSED:
            shown = house.state.act(f"go to {place}")
            assert thing not in shown and thing in house.state.act(f"open {place}")


def test_train_and_test_have_no_pair_in_common() -> None:
    pairs = {
        split: {start(seed, split=split).environment.state.task for seed in range(300)} for split in ("train", "test")
    }
    assert not pairs["train"] & pairs["test"]
    assert len(pairs["test"]) > 20
    assert len({task for kind in TASKS for task in possible_tasks(kind)}) > 150


def test_each_action_costs_a_step() -> None:
    episode = start(1, max_steps=2)
    assert not turn(episode, "fly").end_reason
    transition = turn(episode, "  Go  TO  fridge 1 ")
    assert transition.outcomes[0] is not None and transition.outcomes[0].valid
    assert (transition.truncated, transition.success) == (True, False)


def test_the_state_key_knows_no_history() -> None:
    one, other = start(1), start(1)
    for action in ("go to desk 1", "go to fridge 1", "open fridge 1", "close fridge 1"):
        turn(one, action)
    turn(other, "go to fridge 1")
    assert one.environment.state_key() == other.environment.state_key()
