"""Each call over a socket: order, repeats, groups, forks, snapshots, limits."""

import asyncio
import hashlib
import json
import time
from typing import Any

import numpy as np
import pytest
from google.protobuf import struct_pb2

from starpod.env_server.authoring.environment import EnvironmentOptions
from starpod.env_server.episodes import convert
from starpod.env_server.episodes.errors import CallError
from starpod.env_server.operation.config import ServerLimits
from starpod.env_server.sessions.requests import parse_options
from starpod.env_server.transports.encoding import read_json
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Serve, Stream, entered, step_request, text_of
from tests.env_server.troublesome import Waiting, Walk
from tests.waiting import eventually

RESEED = pb.FORK_RANDOMNESS_RESEED


async def test_a_repeated_step_is_made_once(client: Client) -> None:
    session = await client.open("walk-v1")
    first = await client.step(session, 0, "Right")
    assert await client.step(session, 0, "Right") == first
    assert await client.step(session, 1, "Right") != first
    for index, action, epoch in ((1, "Left", 1), (0, "Right", 1), (3, "Right", 1), (2, "Right", 2)):
        failure = await client.fails(client.step(session, index, action, epoch=epoch))
        assert (failure.code, failure.reason) == ("FAILED_PRECONDITION", "OUT_OF_ORDER")
        assert failure.metadata == {"expected_epoch": "1", "expected_step_index": "2", "advice": "give_up"}


async def test_a_repeated_reset_is_made_once(client: Client) -> None:
    session = await client.open("walk-v1")
    first = await client.ask("Reset", session, epoch=1)  # no seed: a second draw would show
    assert first.session.epoch == 2
    assert (await client.fails(client.step(session, 0, "Right", epoch=1))).reason == "OUT_OF_ORDER"
    assert await client.ask("Reset", session, epoch=1) == first
    assert (await client.fails(client.ask("Reset", session, epoch=1, seed=5))).reason == "OUT_OF_ORDER"
    await client.step(session, 0, "Right", epoch=2)
    assert (await client.fails(client.ask("Reset", session, epoch=1))).metadata["expected_epoch"] == "2"


async def test_reset_takes_new_options_wants_and_limits_and_keeps_them(client: Client) -> None:
    session = await client.open("walk-v1")
    limits = pb.LimitOverrides(max_turns=1)
    response = await client.ask(
        "Reset", session, epoch=1, seed=1, want=pb.Want(score=True), options={"start": 7}, limits=limits
    )
    assert (response.session.observation.score, response.limits.max_turns) == (0.5, 1)
    assert float(text_of(response.session)[3:]) == float(text_of(session)[3:]) + 7
    last = await client.step(session, 0, "Right", epoch=2)
    assert (last.truncated, last.terminated, last.end_reason) == (True, False, pb.END_REASON_MAX_TURNS)
    assert last.observation.score == 0.5
    again = (await client.ask("Reset", session, epoch=2, seed=1)).session
    assert text_of(again) == text_of(response.session)


async def test_a_failed_reset_leaves_the_episode_as_it_was(client: Client) -> None:
    session = await client.open("walk-v1")
    moved = await client.step(session, 0, "Right")
    failure = await client.fails(client.ask("Reset", session, epoch=1, options={"start": 99, "strat": 1}))
    assert (failure.code, failure.fields) == ("INVALID_ARGUMENT", ["options.start", "options.strat"])
    assert "it has: start" in failure.message
    assert (await client.ask("Render", session)).data.decode() == text_of(moved)
    await client.step(session, 1, "Right")


async def test_names_match_whatever_their_case_and_unknown_ones_count_against_no_limit(client: Client) -> None:
    session = await client.open("walk-v1", limits=pb.LimitOverrides(max_actions_per_turn=2, max_actions=3))
    turn = await client.step(session, 0, " rIGHT ", "jump", "LEFT", "Right")
    executed, valid, effective = zip(*((o.executed, o.valid, o.effective) for o in turn.outcomes), strict=True)
    assert executed == (True, False, True, False)
    assert valid == (True, False, True, True)
    assert effective == (True, False, False, False)
    end = await client.step(session, 1, "Left", "Left")
    assert end.end_reason == pb.END_REASON_MAX_ACTIONS and end.truncated and not end.success
    assert [outcome.executed for outcome in end.outcomes] == [True, False]


async def test_info_reward_parts_and_criteria_survive_the_wire(client: Client) -> None:
    turn = await client.step(await client.open("walk-v1"), 0, "report", "report")
    assert (turn.reward, dict(turn.reward_parts), dict(turn.criteria)) == (
        1.0,
        {"a": 0.5, "b": 0.5},
        {"reported": True},
    )
    assert (turn.info["list"][1]["two"], turn.info["none"], turn.info["id"]) == (2.0, None, "9007199254740993")


TEXT = pb.Action(text="hello")
LIST = pb.Action(json='{"a": [1, null]}')
TOOL = pb.Action(tool_call=pb.ToolCall(name="search", arguments_json='{"q": "x"}'))
TENSOR = pb.Action(tensor=pb.Tensor(dtype="float32", shape=[2, 1], data=np.array([1, 2], "<f4").tobytes()))


@pytest.mark.parametrize(
    ("action", "shown"),
    [
        (TEXT, pb.Part(text="hello")),
        (LIST, pb.Part(json=LIST.json)),
        (TOOL, pb.Part(json='{"name": "search", "arguments": {"q": "x"}}')),
        (TENSOR, pb.Part(tensor=TENSOR.tensor)),
    ],
    ids=["text", "json", "tool_call", "tensor"],
)
async def test_every_kind_of_action_reaches_the_environment(client: Client, action: pb.Action, shown: pb.Part) -> None:
    session = await client.open("anything-v1")
    for _ in range(2):
        reply = await client.ask("Step", session, epoch=1, actions=[action])
        assert list(reply.transition.observation.parts) == [shown]


@pytest.mark.parametrize(
    "action",
    [
        pb.Action(json="[1, 2, 3]"),
        pb.Action(tool_call=pb.ToolCall(name="t", arguments_json='{"a": 1}')),
        pb.Action(tensor=pb.Tensor(dtype="int8", shape=[3], data=b"abc")),
        pb.Action(text="x" * 5_000),
    ],
    ids=["json", "tool_call", "tensor", "long text"],
)
async def test_an_environment_may_change_what_it_is_given(client: Client, action: pb.Action) -> None:
    """A Step that is sent again is known by its request. Of a long one, and of a rich reply, a session keeps bytes."""
    session = await client.open("altering-v1")
    first = await client.ask("Step", session, epoch=1, actions=[action])
    assert await client.ask("Step", session, epoch=1, actions=[action]) == first
    failure = await client.fails(client.ask("Step", session, epoch=1, actions=[action, TEXT]))
    assert (failure.reason, failure.metadata["expected_step_index"]) == ("OUT_OF_ORDER", "1")
    kept = client.table[session.session_id]
    assert isinstance(kept.last_request, bytes) and len(kept.last_request) == 16
    assert isinstance(kept.last_reply, bytes)
    short = await client.open("walk-v1")
    await client.step(short, 0, "Left")
    assert client.table[short.session_id].last_request == ("Left",)
    assert not isinstance(client.table[short.session_id].last_reply, bytes)


@pytest.mark.parametrize(
    ("action", "field"),
    [
        (pb.Action(), "actions[0]"),
        (pb.Action(json="{"), "actions[0].json"),
        (pb.Action(tool_call=pb.ToolCall(name="x", arguments_json="[]")), "actions[0].tool_call.arguments_json"),
        (pb.Action(tensor=pb.Tensor(dtype="object")), "actions[0].tensor.dtype"),
        (pb.Action(tensor=pb.Tensor(dtype="int8", shape=[-1])), "actions[0].tensor.shape"),
        (pb.Action(tensor=pb.Tensor(dtype="int8", shape=[2**40], data=b"1")), "actions[0].tensor.data"),
    ],
)
async def test_malformed_actions_are_named(client: Client, action: pb.Action, field: str) -> None:
    session = await client.open("anything-v1")
    failure = await client.fails(client.ask("Step", session, epoch=1, actions=[action]))
    assert (failure.code, failure.fields) == ("INVALID_ARGUMENT", [field])
    await client.step(session, 0, "still alive")


@pytest.mark.parametrize(
    "actions",
    [
        [pb.Action(json="[" + "1," * 9_000 + "1]")],
        [pb.Action(json="[" + "1," * 5_000 + "1]")] * 2,
        [pb.Action(json='{"a":' * 60 + "[" + "{}," * 9_000 + "1]" + "}" * 60)],
        [pb.Action(tool_call=pb.ToolCall(name="t", arguments_json='{"a": [' + "0," * 9_000 + "0]}"))],
        [pb.Action(text="x" * (4 * 2**20 + 1))],
        [pb.Action(text="")] * 1_025,
    ],
    ids=["values", "values of several", "nested", "arguments", "bytes", "count"],
)
async def test_actions_are_measured_before_they_are_converted(client: Client, actions: list[pb.Action]) -> None:
    session = await client.open("anything-v1")
    failure = await client.fails(client.ask("Step", session, epoch=1, actions=actions))
    assert (failure.reason, failure.fields) == ("BAD_ARGUMENT", ["actions"])
    marks_in_a_text = pb.Action(json='["' + ",:[{" * 50_000 + '"]')
    assert (await client.ask("Step", session, epoch=1, actions=[marks_in_a_text])).next_step_index == 1


@pytest.mark.parametrize(
    ("start", "problem"),
    [([None] * 8_192, "8192 values"), ("x" * 66_000, "65536")],
    ids=["values", "bytes"],
)
async def test_options_are_measured_before_they_are_validated(client: Client, start: Any, problem: str) -> None:
    failure = await client.fails(client.open("walk-v1", options={"start": start}))
    assert failure.reason == "BAD_ARGUMENT" and problem in failure.message


class Numbers(EnvironmentOptions):
    whole: int = 0
    several: tuple[int, ...] = ()
    rate: float = 0.0


NUMBERED = type("Numbered", (Walk,), {"Options": Numbers})


@pytest.mark.parametrize("value", ['"whole": 9007199254740992', '"several": [1, 1152921504606846977]'])
def test_options_that_were_rounded_on_the_way_are_refused(value: str) -> None:
    """JSON numbers arrive as doubles, so that 2^53 + 1 would silently become 2^53."""
    options = struct_pb2.Struct()
    options.update(json.loads(f"{{{value}}}"))
    with pytest.raises(CallError, match="would be rounded"):
        parse_options(NUMBERED, convert.options_from(options))
    with pytest.raises(CallError, match="would be rounded"):
        read_json(pb.OpenRequest, f'{{"seed": 9007199254740993, "options": {{{value}}}}}'.encode(), ServerLimits())
    exact = parse_options(NUMBERED, {"whole": "9007199254740993", "rate": 2.0**60})
    assert exact.model_dump(exclude={"several"}) == {"whole": 2**53 + 1, "rate": 2.0**60}


async def test_wrong_options_are_named_up_to_a_number(client: Client) -> None:
    failure = await client.fails(client.open("walk-v1", options={f"x{number}": 1 for number in range(1_000)}))
    assert 5 < len(failure.fields) <= 20
    failure = await client.fails(client.open("searched-v1", options={"findable": False}))  # only the search can tell
    assert (failure.code, failure.fields) == ("INVALID_ARGUMENT", ["options"])
    assert "nothing can be found; set findable" in failure.message
    assert await client.live() == 0


async def test_a_group_shares_the_start_and_not_the_random_state(client: Client) -> None:
    group = await client.group("walk-v1", 4, seed=9)
    assert [session.member for session in group] == [0, 1, 2, 3]
    assert len({text_of(session) for session in group}) == 1
    luck = [text_of(await client.step(session, 0, "Right")) for session in group]
    assert len(set(luck)) == 4
    again = await client.open("walk-v1", seed=9, dynamics_seed=group[2].dynamics_seed)
    assert text_of(await client.step(again, 0, "Right")) == luck[2]
    same = await client.group("walk-v1", 2, seed=9, dynamics_seed=3)
    assert len({text_of(await client.step(session, 0, "Right")) for session in same}) == 1


async def test_a_reopened_member_keeps_its_random_state_through_resets(client: Client) -> None:
    group = await client.group("walk-v1", 4, seed=9)
    alone = await client.open("walk-v1", seed=9, first_member=2)
    assert (alone.member, alone.dynamics_seed) == (2, group[2].dynamics_seed)
    one, other = [(await client.ask("Reset", each, epoch=1, seed=10)).session for each in (group[2], alone)]
    assert one.dynamics_seed == other.dynamics_seed != alone.dynamics_seed
    copies = await client.fork(alone, epoch=2, randomness=RESEED, count=3)
    (again,) = await client.fork(alone, epoch=2, randomness=RESEED, first_member=2)
    assert (again.member, again.dynamics_seed) == (2, copies[2].dynamics_seed)


@pytest.mark.parametrize("environment", ["searched-v1", "searched_alone-v1"])
async def test_a_group_with_a_slow_reset_equals_its_members_opened_alone(client: Client, environment: str) -> None:
    for session in await client.group(environment, 3, seed=4):
        alone = await client.open(environment, seed=4, dynamics_seed=session.dynamics_seed)
        assert text_of(alone) == text_of(session)
        for index in range(3):
            assert await client.step(alone, index, "draw") == await client.step(session, index, "draw")


async def test_a_key_opens_once_even_when_asked_at_the_same_time(client: Client) -> None:
    def opened(environment: str = "searched-v1", key: str = "run-1/group-7", **fields: Any) -> Any:
        return client.ask("Open", environment_id=environment, key=key, **fields)

    replies = await asyncio.gather(*[opened(count=2) for _ in range(5)])
    assert all(reply == replies[0] for reply in replies)
    assert await client.live() == 2
    assert (await client.fails(opened(count=3))).reason == "KEY_REUSED"
    assert (await client.fails(opened("no-v1", key="k"))).reason == "UNKNOWN_ENVIRONMENT"
    await opened("walk-v1", key="k")  # a failed call left the key free


@pytest.mark.parametrize(("environment", "action"), [("walk-v1", "Right"), ("fragile-v1", "fine")])
async def test_forks_keep_or_reseed_their_random_state(client: Client, environment: str, action: str) -> None:
    session = await client.open(environment)
    await client.step(session, 0, action)
    kept = await client.fork(session, 1, count=2, key="kept")
    assert [(copy.step_index, copy.epoch) for copy in kept] == [(1, 1), (1, 1)]
    reseeded = await client.fork(session, 1, count=2, randomness=RESEED)
    seeds = [copy.dynamics_seed for copy in reseeded]
    same = await client.fork(session, 1, count=2, randomness=RESEED, dynamics_seeds=seeds)
    assert {text_of(copy) for copy in (*kept, *reseeded)} == {text_of(kept[0])}
    results = [await client.step(copy, 1, action) for copy in (*kept, *reseeded, *same)]
    original = await client.step(session, 1, action)
    assert original == results[0] == results[1]
    assert len({text_of(result) for result in (original, *results[2:4])}) == 3
    assert results[2:4] == results[4:6]
    stale = await client.fails(client.fork(session, 1))
    assert (stale.reason, stale.metadata["expected_step_index"]) == ("OUT_OF_ORDER", "2")


@pytest.mark.parametrize(
    ("environment", "action"), [("walk-v1", "Right"), ("fragile-v1", "fine"), ("searched-v1", "draw")]
)
async def test_a_snapshot_continues_on_another_server(
    client: Client, serve: Serve, environment: str, action: str
) -> None:
    session = await client.open(environment)
    await client.step(session, 0, action)
    taken = await client.ask("Snapshot", session)
    assert (taken.epoch, taken.step_index) == (1, 1)
    other = await serve()
    expected = [await client.step(session, index, action) for index in (1, 2)]
    for copy in (await other.ask("Restore", snapshot=taken.snapshot, count=2)).sessions:
        assert copy.step_index == 1
        assert [await other.step(copy, index, action) for index in (1, 2)] == expected


async def test_snapshots_are_checked(client: Client) -> None:
    snapshot = await client.snapshot(await client.open("walk-v1", version="1.0.0"))
    assert snapshot.environment_version == "1.0.0"
    assert (await client.snapshot(await client.open("walk-v1"))).environment_version == "1.1.0"

    async def refused(version: str = "1.0.0", state: bytes = snapshot.state, forge: bool = True) -> str:
        digest = hashlib.sha256(f"walk-v1\0{version}\0".encode() + state).digest() if forge else snapshot.digest
        changed = pb.SessionSnapshot(environment_id="walk-v1", environment_version=version, state=state, digest=digest)
        return (await client.fails(client.ask("Restore", snapshot=changed))).reason

    assert await refused(state=snapshot.state[:-1], forge=False) == "BAD_ARGUMENT"
    assert await refused("1.1.0", forge=False) == "BAD_ARGUMENT"
    for forged in (b"", b"\x80", b"\xc1", b"not a state"):
        assert await refused(state=forged) == "BAD_ARGUMENT"
    assert await refused("0.9.0") == "INCOMPATIBLE_SNAPSHOT"


async def test_versions_live_side_by_side(client: Client) -> None:
    specs = (await client.ask("Describe", environment_id="walk-v1")).environments
    assert [spec.version for spec in specs] == ["1.1.0", "1.0.0"]
    for wanted, got in (("", "1.1.0"), ("<1.1", "1.0.0"), ("1.0.0", "1.0.0"), (">=1.0,<2", "1.1.0")):
        response = await client.ask("Open", environment_id="walk-v1", version=wanted)
        assert response.environment_version == got
    missing = await client.fails(client.open("walk-v1", version=">=2"))
    assert (missing.code, missing.metadata["available"]) == ("NOT_FOUND", "1.1.0,1.0.0")
    assert (await client.fails(client.open("walk-v1", version="~1"))).fields == ["version"]
    assert (await client.fails(client.open("wlak-v1"))).metadata["nearest"].split(",")[0] == "walk-v1"


async def test_wants_and_modes_that_nobody_can_meet_are_refused(client: Client) -> None:
    for capability in ("expert_action", "image"):
        failure = await client.fails(client.open("walk-v1", want=pb.Want(**{capability: True})))
        assert (failure.code, failure.metadata["capability"]) == ("UNIMPLEMENTED", capability)
    session = await client.open("walk-v1", want=pb.Want(valid_actions=True, state_key=True))
    assert [action.text for action in session.observation.valid_actions][:2] == ["Left", "Right"]
    assert len(session.observation.state_key) == 16
    html = await client.ask("Render", session, mode="html")
    assert html.mime == "text/html; charset=utf-8" and html.data.startswith(b"<b>")
    failure = await client.fails(client.ask("Render", session, mode="png"))
    assert failure.fields == ["mode"] and "text, html" in failure.message


async def test_calls_on_one_session_keep_their_order(client: Client) -> None:
    session = await client.open("waiting-v1")
    steps = []
    for index, action in enumerate(("gate", "2", "1", "0")):
        steps.append(asyncio.create_task(client.step(session, index, action)))
        await client.pending(session, index + 1)  # gRPC promises no order of calls that are made at once
    Waiting.opened.set()
    turns = await asyncio.gather(*steps)
    assert text_of(turns[-1]) == "gate,2,1,0"


async def test_a_call_past_its_deadline_is_finished_and_cached(client: Client) -> None:
    session = await client.open("waiting-v1")
    with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
        await client.step(session, 0, "gate", timeout=0.05)
    Waiting.opened.set()
    assert text_of(await client.step(session, 0, "gate")) == "gate"
    assert text_of(await client.step(session, 1, "1")) == "gate,1"


async def test_limits_answer_with_what_was_met_and_when_to_come_back(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_sessions=2, max_group=2, max_snapshot_bytes=64, max_step_actions=3))
    session = await client.open("walk-v1")
    full = await client.fails(client.group("walk-v1", 2))
    assert (full.code, full.limit, full.metadata["advice"]) == (
        "RESOURCE_EXHAUSTED",
        ("OVERLOADED", "max_sessions"),
        "retry",
    )
    assert full.retry_after and full.retry_after > 0
    assert (await client.fails(client.group("walk-v1", 3))).fields == ["count"]
    assert (await client.fails(client.snapshot(session))).limit == ("TOO_LARGE", "max_snapshot_bytes")
    assert (await client.fails(client.step(session, 0, *["Left"] * 4))).fields == ["actions"]
    await client.open("walk-v1")
    await client.close(session)
    await client.open("walk-v1")


async def test_calls_in_flight_are_bounded(serve: Serve) -> None:
    """Calls that their caller has cancelled count, too."""
    client = await serve(limits=ServerLimits(max_calls_in_flight=2))
    left, session, other = [await client.open("waiting-v1") for _ in range(3)]
    call = client.stub.Step(step_request(left, 0, "gate"))
    await entered()
    call.cancel()
    step = asyncio.create_task(client.step(session, 0, "gate"))
    await client.pending(session, 1)  # by then the news has come that the first caller is gone
    assert (await client.fails(client.step(other, 0, "1"))).limit == ("OVERLOADED", "max_calls_in_flight")
    Waiting.opened.set()
    await step
    await eventually(lambda: not client.server.metrics.calls_in_flight)
    assert text_of(await client.step(left, 0, "gate")) == "gate"
    await client.step(other, 0, "1")


async def test_leases_expire_unless_renewed(client: Client) -> None:
    kept, left = [await client.open("walk-v1", lease_seconds=1000) for _ in range(2)]  # the default is shorter
    for _ in range(2):
        await client.ask("Renew", session_ids=[kept.session_id])
        for session in (kept, left):
            client.table[session.session_id].last_call -= 700
    await eventually(lambda: left.session_id not in client.table)
    response = await client.ask("Renew", session_ids=[kept.session_id, left.session_id, "never"])
    assert list(response.missing) == [left.session_id, "never"]
    failure = await client.fails(client.step(left, 0, "Right"))
    assert (failure.code, failure.reason, failure.metadata["advice"]) == ("NOT_FOUND", "UNKNOWN_SESSION", "reopen")
    assert await client.live() == 1


async def test_a_lease_is_over_when_two_looks_find_it_so(client: Client) -> None:
    """The call that renews the session may still be unread in the socket during the first sweep."""
    opened = await client.open("walk-v1")
    session = client.table[opened.session_id]

    def look() -> int:
        return client.server.worker.reap([client.table])

    session.last_call -= 1000
    assert look() == 0
    session.last_call = time.monotonic()  # the call is read
    assert look() == 0
    session.last_call -= 1000
    assert [look(), look()] == [0, 1]


@pytest.mark.parametrize(("count", "made"), [(1, 4), (3, 1)])
async def test_opens_under_way_cannot_together_exceed_the_limit(serve: Serve, count: int, made: int) -> None:
    client = await serve(limits=ServerLimits(max_sessions=4))
    opens = [client.group("searched-v1", count, seed=seed) for seed in range(6)]
    replies = await asyncio.gather(*opens, return_exceptions=True)
    assert sum(not isinstance(reply, Exception) for reply in replies) == made
    assert await client.live() == made * count
    assert (await client.fails(client.group("searched-v1", 2))).limit == ("OVERLOADED", "max_sessions")
    if made * count < 4:
        unfindable = client.open("searched-v1", options={"findable": False})
        assert (await client.fails(unfindable)).reason == "BAD_ARGUMENT"  # and gives its place back
        await client.open("walk-v1")


async def test_forks_that_wait_for_their_turn_cannot_together_exceed_the_limit(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_sessions=3))
    session = await client.open("waiting-v1")
    step = asyncio.create_task(client.step(session, 0, "gate"))
    await entered()
    forks = [client.ask("Fork", session, epoch=1, step_index=1) for _ in range(5)]
    await client.pending(session, 6)
    Waiting.opened.set()
    replies = await asyncio.gather(*forks, return_exceptions=True)
    await step
    assert sum(isinstance(reply, pb.ForkResponse) for reply in replies) == 2
    assert await client.live() == 3


async def test_what_a_key_remembers_of_closed_sessions_are_their_ids(client: Client) -> None:
    closed, expired = [await client.group("walk-v1", 2, key=key) for key in ("closed", "expired")]
    table = client.table
    await client.close(*closed)
    for session in expired:  # perhaps because the reply was lost
        client.server.worker.drop(table, table[session.session_id])
    bytes_before = table._remembered_bytes
    table._sweep_time = 0.0
    table.forget_reservations(time.monotonic())
    assert table._remembered_bytes < bytes_before
    again = await client.group("walk-v1", 2, key="closed")
    assert [session.session_id for session in again] == [session.session_id for session in closed]
    assert not any(session.HasField("observation") for session in again)
    assert await client.group("walk-v1", 2, key="expired") == expired


async def test_sessions_whose_reply_is_too_large_are_not_made(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_message_bytes=16_000))
    session = await client.open("walk-v1")
    stream = Stream(client)
    creating: dict[str, dict[str, Any]] = {
        "Open": {"environment_id": "walk-v1", "key": "open"},
        "Fork": {"session_id": session.session_id, "epoch": 1, "key": "fork"},
        "Restore": {"snapshot": await client.snapshot(session), "key": "restore"},
    }
    for method, fields in creating.items():
        request = getattr(pb, f"{method}Request")(**fields, count=400)
        (streamed,) = await stream.ask(calls=[pb.Call(**{method.lower(): request})])
        for failure in (streamed, await client.fails(client.ask(method, **fields, count=400))):
            assert failure.limit == ("TOO_LARGE", "max_message_bytes")
    assert await client.live() == 1
    for method, fields in creating.items():
        assert len((await client.ask(method, **fields, count=5)).sessions) == 5


async def test_close_waits_for_nobody_and_what_came_before_it_is_finished(client: Client) -> None:
    session = await client.open("waiting-v1")
    step = asyncio.create_task(client.step(session, 0, "gate"))
    await entered()
    behind = asyncio.create_task(client.step(session, 1, "1"))
    await client.pending(session, 2)
    await client.close(session)
    failure = await client.fails(client.step(session, 2, "1"))
    assert (failure.code, failure.reason) == ("NOT_FOUND", "UNKNOWN_SESSION")
    assert not step.done()
    Waiting.opened.set()
    assert [text_of(await each) for each in (step, behind)] == ["gate", "gate,1"]
