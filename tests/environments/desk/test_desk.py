"""desk-v1: tasks and their checklists, calls as tools and as text, what may not be changed, hostile calls."""

import functools
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.env_server import Tool, ToolCall
from starpod.env_server.episodes.live_episode import LiveEpisode, TurnResult, Want
from starpod.environments.desk import Desk
from starpod.environments.desk.tasks import KINDS
from starpod.environments.desk.tools import TOOLS, read_call, write_call
from tests.environments import episodes

start = functools.partial(episodes.start, Desk)


def call(episode: LiveEpisode, name: str, /, **arguments: Any) -> TurnResult:
    return episode.turn([ToolCall(name, arguments)], Want())


def criteria(transition: TurnResult) -> dict[str, bool]:
    assert transition.details is not None and transition.details.criteria is not None
    return dict(transition.details.criteria)


@given(seed=st.integers(0, 2**64 - 1), count=st.integers(1, 4))
def test_tool_calls_and_their_texts_do_every_task_equally(seed: int, count: int) -> None:
    by_tool, by_text = start(seed, count=count), start(seed, count=count, expert_calls="text")
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    while not by_tool.end_reason:
        action = by_tool.environment.expert_action()
        jsonschema.validate(dict(action.arguments), schemas[action.name])
        assert by_text.environment.expert_action() == write_call(action.name, action.arguments)
        one = by_tool.turn([action], Want(state_key=True))
        assert one == by_text.turn([write_call(action.name, action.arguments)], Want(state_key=True))
    played = episodes.play_expertly(start(seed, count=count))
    assert played[-1].reward == 1 and all(criteria(played[-1]).values())
    assert len(played) < 30, "the limit of turns is too low"


@pytest.mark.parametrize("kind", KINDS)
def test_finishing_at_once_is_no_success(kind: str) -> None:
    for seed in range(10):
        transition = call(start(seed, tasks=[kind]), "finish")
        assert (transition.reward, transition.success) == (0, False)
        assert not any(criteria(transition).values())


def test_any_other_change_is_noticed_and_can_be_repaired() -> None:
    episode = start(1, tasks=["report"])
    office, _ = episode.environment.start
    day = next(iter(office.events.values())).day
    addresses = set(office.contacts.values()) - episode.environment.start[1][0].recipients
    event = {"title": "x", "day": "Monday" if day != "Monday" else "Friday", "start": 16, "hours": 1, "attendee": "y"}
    while not criteria(episode.turn([episode.environment.expert_action()], Want()))["nothing_else_changed"]:
        assert not episode.end_reason
    added = call(episode, "add_event", **event)
    assert not criteria(added)["nothing_else_changed"]
    assert criteria(call(episode, "delete_event", id=7))["nothing_else_changed"]
    name = next(iter(office.files))
    assert not criteria(call(episode, "write_file", name=name, text="gone"))["nothing_else_changed"]
    assert episode.environment.score() == 0
    assert criteria(call(episode, "write_file", name=name, text=office.files[name]))["nothing_else_changed"]
    assert not criteria(call(episode, "send_mail", to=min(addresses), subject="", body=""))["nothing_else_changed"]
    while not episode.end_reason:
        transition = episode.turn([episode.environment.expert_action()], Want())
    assert not transition.success, "a mail cannot be taken back"


def test_looking_changes_no_state() -> None:
    episode = start(2, count=4)
    key = episode.environment.state_key()
    looks = {"list_files": {}, "list_mail": {}, "list_events": {"day": "Friday"}, "read_mail": {"id": 1}}
    for name, arguments in looks.items():
        transition = call(episode, name, **arguments)
        assert transition.outcomes[0] is not None and transition.outcomes[0].effective
        assert episode.environment.state_key() == key


def test_a_number_in_a_mail_is_the_whole_number() -> None:
    episode = start(0, tasks=["schedule"])
    task = episode.environment.start[1][0]
    told = functools.partial(call, episode, "send_mail", to=task.address, subject="")
    assert not criteria(told(body=f"{task.day} at 1{task.start}5"))["attendee_told"]
    assert criteria(told(body=f"see you on {task.day.lower()} at {task.start}:00"))["attendee_told"]


def test_share_pays_for_what_holds() -> None:
    assert call(start(3, tasks=["schedule"], reward="share"), "finish").reward == 0
    episode = start(3, tasks=["schedule"], reward="share")
    while not criteria(episode.turn([episode.environment.expert_action()], Want()))["meeting_as_asked"]:
        assert not episode.end_reason
    assert call(episode, "finish").reward == 0.75


def test_the_desk_has_an_end() -> None:
    episode = start(1)
    for number in range(60):
        call(episode, "write_file", name=str(number), text="")
    assert len(episode.environment.files) == 50


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_half_a_surrogate_pair_in_a_text_can_be_shown(tool: Tool) -> None:
    known = {
        name: 1 if schema["type"] == "integer" else "HALF" for name, schema in tool.parameters["properties"].items()
    }
    episode = start(3, expert_calls="text")
    shown = episode.turn([write_call(tool.name, known).replace("HALF", "\\ud800")], Want()).parts
    assert isinstance(shown, str)
    shown.encode()
    episode.environment.render().encode()  # type: ignore[union-attr]


def test_a_call_as_text_may_hold_raw_newlines() -> None:
    assert read_call('write_file {"name": "a", "text": "one\ntwo"}')[1]["text"] == "one\ntwo"
