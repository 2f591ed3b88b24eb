"""What each call does, over a socket: order, repeats, groups, forks, snapshots, limits."""

import asyncio
import hashlib
import math
import time

import numpy as np
import pytest

from starpod.env_server.config import ServerLimits
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Serve, entered, read_status, step_request, text_of
from tests.env_server.test_stream import Stream
from tests.env_server.troublesome import Waiting
from tests.waiting import eventually


async def test_a_repeated_step_is_made_once(client: Client) -> None:
    session = await client.open("walk-v1")
    first = await client.step(session, 0, "Right")
    assert await client.step(session, 0, "Right") == first
    assert await client.step(session, 1, "Right") != first
    assert (await client.fails(client.step(session, 1, "Left"))).reason == "OUT_OF_ORDER"
    late = await client.fails(client.step(session, 0, "Right"))
    assert (late.code, late.reason) == ("FAILED_PRECONDITION", "OUT_OF_ORDER")
    assert late.metadata == {"expected_epoch": "1", "expected_step_index": "2", "advice": "give_up"}
    assert (await client.fails(client.step(session, 3, "Right"))).reason == "OUT_OF_ORDER"
    assert (await client.fails(client.step(session, 2, "Right", epoch=2))).reason == "OUT_OF_ORDER"


async def test_a_repeated_reset_is_made_once(client: Client) -> None:
    session = await client.open("walk-v1")
    request = pb.ResetRequest(session_id=session.session_id, epoch=1)  # no seed: a second draw would show
    first = await client.stub.Reset(request)
    assert first.session.epoch == 2
    assert await client.stub.Reset(request) == first
    other = pb.ResetRequest(session_id=session.session_id, epoch=1, seed=5)
    assert (await client.fails(client.stub.Reset(other))).reason == "OUT_OF_ORDER"
    await client.step(session, 0, "Right", epoch=2)
    assert (await client.fails(client.stub.Reset(request))).metadata["expected_epoch"] == "2"


async def test_reset_takes_new_options_wants_and_limits_and_keeps_them(client: Client) -> None:
    session = await client.open("walk-v1")
    reset = pb.ResetRequest(session_id=session.session_id, epoch=1, seed=1, want=pb.Want(score=True))
    reset.options.update({"start": 7})
    reset.limits.max_turns = 1
    response = await client.stub.Reset(reset)
    assert response.session.observation.score == 0.5
    assert response.limits.max_turns == 1
    assert float(text_of(response.session)[3:]) == float(text_of(session)[3:]) + 7
    last = await client.step(session, 0, "Right", epoch=2)
    assert (last.truncated, last.terminated, last.end_reason) == (True, False, pb.END_REASON_MAX_TURNS)
    assert last.observation.score == 0.5
    again = (await client.stub.Reset(pb.ResetRequest(session_id=session.session_id, epoch=2, seed=1))).session
    assert text_of(again) == text_of(response.session)


async def test_a_failed_reset_leaves_the_episode_as_it_was(client: Client) -> None:
    session = await client.open("walk-v1")
    moved = await client.step(session, 0, "Right")
    reset = pb.ResetRequest(session_id=session.session_id, epoch=1)
    reset.options.update({"start": 99, "strat": 1})
    failure = await client.fails(client.stub.Reset(reset))
    assert failure.code == "INVALID_ARGUMENT"
    assert failure.fields == ["options.start", "options.strat"]
    assert "it has: start" in failure.message
    del reset.options["strat"]
    reset.options.update({"start": 10})  # for which it has no instructions
    failure = await client.fails(client.stub.Reset(reset))
    assert (failure.reason, failure.metadata["session"]) == ("ENVIRONMENT_BUG", "intact")
    render = await client.stub.Render(pb.RenderRequest(session_id=session.session_id))
    assert render.data.decode() == text_of(moved)
    await client.step(session, 1, "Right")


async def test_options_that_only_the_search_can_refuse_are_a_bad_argument(client: Client) -> None:
    failure = await client.fails(client.open("searched-v1", options={"findable": False}))
    assert (failure.code, failure.fields) == ("INVALID_ARGUMENT", ["options"])
    assert "nothing can be found; set findable" in failure.message
    assert (await client.stub.Describe(pb.DescribeRequest())).live_sessions == 0


async def test_steps_after_the_end_are_refused_but_the_last_reply_stays(client: Client) -> None:
    session = await client.open("walk-v1")
    end = await client.step(session, 0, "Right", "stop", "Right")
    assert end.terminated and end.success and end.end_reason == pb.END_REASON_TERMINAL
    assert [outcome.executed for outcome in end.outcomes] == [True, True, False]
    assert await client.step(session, 0, "Right", "stop", "Right") == end
    failure = await client.fails(client.step(session, 1, "Right"))
    assert (failure.reason, failure.metadata["expected_step_index"]) == ("EPISODE_OVER", "1")


async def test_names_match_whatever_their_case_and_unknown_ones_count_against_no_limit(client: Client) -> None:
    session = await client.open("walk-v1", limits=pb.LimitOverrides(max_actions_per_turn=2, max_actions=3))
    turn = await client.step(session, 0, " rIGHT ", "jump", "LEFT", "Right")
    assert [(o.executed, o.valid, o.effective) for o in turn.outcomes] == [
        (True, True, True),
        (False, False, False),
        (True, True, False),
        (False, True, False),
    ]
    end = await client.step(session, 1, "Left", "Left")
    assert end.end_reason == pb.END_REASON_MAX_ACTIONS and end.truncated and not end.success
    assert [outcome.executed for outcome in end.outcomes] == [True, False]


async def test_info_reward_parts_and_criteria_survive_the_wire(client: Client) -> None:
    session = await client.open("walk-v1")
    turn = await client.step(session, 0, "report", "report")
    assert turn.reward == 1.0
    assert dict(turn.reward_parts) == {"a": 0.5, "b": 0.5}
    assert dict(turn.criteria) == {"reported": True}
    assert turn.info["list"][1]["two"] == 2.0
    assert turn.info["none"] is None


@pytest.mark.parametrize(
    "action",
    [
        pb.Action(text="hello"),
        pb.Action(json='{"a": [1, null]}'),
        pb.Action(tool_call=pb.ToolCall(name="search", arguments_json='{"q": "x"}')),
        pb.Action(tensor=pb.Tensor(dtype="float32", shape=[2, 1], data=np.array([1, 2], "<f4").tobytes())),
    ],
    ids=lambda action: action.WhichOneof("kind"),
)
async def test_every_kind_of_action_reaches_the_environment(client: Client, action: pb.Action) -> None:
    session = await client.open("anything-v1")
    request = pb.StepRequest(session_id=session.session_id, epoch=1, step_index=0, actions=[action])
    (part,) = (await client.stub.Step(request)).transition.observation.parts
    match action.WhichOneof("kind"):
        case "text":
            assert part.text == action.text
        case "tensor":
            assert part.tensor == action.tensor
        case "json":
            assert part.json == action.json
        case _:
            assert part.json == '{"name": "search", "arguments": {"q": "x"}}'
    assert (await client.stub.Step(request)).transition.observation.parts[0] == part


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
    request = pb.StepRequest(session_id=session.session_id, epoch=1, step_index=0, actions=[action])
    failure = await client.fails(client.stub.Step(request))
    assert (failure.code, failure.fields) == ("INVALID_ARGUMENT", [field])
    await client.step(session, 0, "still alive")


async def test_a_group_shares_the_start_and_not_the_luck(client: Client) -> None:
    response = await client.stub.Open(pb.OpenRequest(environment_id="walk-v1", seed=9, count=4))
    assert [session.member for session in response.sessions] == [0, 1, 2, 3]
    assert len({text_of(session) for session in response.sessions}) == 1
    luck = [text_of(await client.step(session, 0, "Right")) for session in response.sessions]
    assert len(set(luck)) == 4
    third = response.sessions[2]
    again = await client.open("walk-v1", seed=third.seed, dynamics_seed=third.dynamics_seed)
    assert text_of(await client.step(again, 0, "Right")) == luck[2]
    same = await client.stub.Open(pb.OpenRequest(environment_id="walk-v1", seed=9, dynamics_seed=3, count=2))
    assert len({text_of(await client.step(session, 0, "Right")) for session in same.sessions}) == 1


async def test_a_member_opened_again_alone_keeps_its_luck_through_resets(client: Client) -> None:
    group = (await client.stub.Open(pb.OpenRequest(environment_id="walk-v1", seed=9, count=4))).sessions
    alone = await client.open("walk-v1", seed=9, first_member=2)
    assert (alone.member, alone.dynamics_seed) == (2, group[2].dynamics_seed)
    resets = [
        (await client.stub.Reset(pb.ResetRequest(session_id=session.session_id, epoch=1, seed=10))).session
        for session in (group[2], alone)
    ]
    assert resets[0].dynamics_seed == resets[1].dynamics_seed != alone.dynamics_seed
    fork = pb.ForkRequest(session_id=alone.session_id, epoch=2, step_index=0, randomness=pb.FORK_RANDOMNESS_RESEED)
    fork.count = 3
    copies = (await client.stub.Fork(fork)).sessions
    fork.count, fork.first_member = 1, 2
    (again,) = (await client.stub.Fork(fork)).sessions
    assert (again.member, again.dynamics_seed) == (2, copies[2].dynamics_seed)


async def test_a_group_with_a_slow_reset_equals_its_members_opened_alone(client: Client) -> None:
    response = await client.stub.Open(pb.OpenRequest(environment_id="searched-v1", seed=4, count=3))
    for session in response.sessions:
        alone = await client.open("searched-v1", seed=4, dynamics_seed=session.dynamics_seed)
        assert text_of(alone) == text_of(session)
        for index in range(3):
            assert await client.step(alone, index, "draw") == await client.step(session, index, "draw")


async def test_without_a_seed_the_server_draws_and_tells_one(client: Client) -> None:
    drawn = [(await client.stub.Open(pb.OpenRequest(environment_id="walk-v1"))).sessions[0] for _ in range(2)]
    assert drawn[0].seed != drawn[1].seed
    again = await client.open("walk-v1", seed=drawn[0].seed, dynamics_seed=drawn[0].dynamics_seed)
    assert text_of(again) == text_of(drawn[0])


async def test_a_key_opens_once_even_when_asked_at_the_same_time(client: Client) -> None:
    request = pb.OpenRequest(environment_id="searched-v1", count=2, key="run-1/group-7")
    replies = await asyncio.gather(*[client.stub.Open(request) for _ in range(5)])
    assert all(reply == replies[0] for reply in replies)
    assert (await client.stub.Describe(pb.DescribeRequest())).live_sessions == 2
    request.count = 3
    assert (await client.fails(client.stub.Open(request))).reason == "KEY_REUSED"
    bad = pb.OpenRequest(environment_id="no-v1", key="k")
    assert (await client.fails(client.stub.Open(bad))).reason == "UNKNOWN_ENVIRONMENT"
    bad.environment_id = "walk-v1"  # a failed call left the key free
    await client.stub.Open(bad)


@pytest.mark.parametrize("environment", ["walk-v1", "fragile-v1"])
async def test_forks_keep_or_reseed_their_luck(client: Client, environment: str) -> None:
    action = "Right" if environment == "walk-v1" else "fine"
    session = await client.open(environment)
    await client.step(session, 0, action)

    def fork(**fields: object) -> pb.ForkRequest:
        return pb.ForkRequest(session_id=session.session_id, epoch=1, step_index=1, **fields)  # type: ignore[arg-type]

    kept = (await client.stub.Fork(fork(count=2, key="kept"))).sessions
    assert [(copy.step_index, copy.epoch) for copy in kept] == [(1, 1), (1, 1)]
    reseeded = (await client.stub.Fork(fork(count=2, randomness=pb.FORK_RANDOMNESS_RESEED))).sessions
    seeds = [copy.dynamics_seed for copy in reseeded]
    same = (await client.stub.Fork(fork(count=2, randomness=pb.FORK_RANDOMNESS_RESEED, dynamics_seeds=seeds))).sessions
    assert {text_of(copy) for copy in (*kept, *reseeded)} == {text_of(kept[0])}
    results = [await client.step(copy, 1, action) for copy in (*kept, *reseeded, *same)]
    original = await client.step(session, 1, action)
    assert original == results[0] == results[1]
    assert len({text_of(result) for result in (original, *results[2:4])}) == 3
    assert results[2:4] == results[4:6]
    stale = await client.fails(client.stub.Fork(fork()))
    assert (stale.reason, stale.metadata["expected_step_index"]) == ("OUT_OF_ORDER", "2")


@pytest.mark.parametrize("environment", ["walk-v1", "fragile-v1", "searched-v1"])
async def test_a_snapshot_goes_on_elsewhere(client: Client, serve: Serve, environment: str) -> None:
    action = {"walk-v1": "Right", "fragile-v1": "fine", "searched-v1": "draw"}[environment]
    session = await client.open(environment)
    await client.step(session, 0, action)
    taken = await client.stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id))
    assert (taken.epoch, taken.step_index) == (1, 1)
    other = await serve()
    restored = (await other.stub.Restore(pb.RestoreRequest(snapshot=taken.snapshot, count=2))).sessions
    expected = [await client.step(session, index, action) for index in (1, 2)]
    for copy in restored:
        assert copy.step_index == 1
        assert [await other.step(copy, index, action) for index in (1, 2)] == expected


async def test_snapshots_are_checked(client: Client) -> None:
    session = await client.open("walk-v1", version="1.0.0")
    snapshot = (await client.stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id))).snapshot
    assert snapshot.environment_version == "1.0.0"

    async def restore_fails(**changes: object) -> str:
        changed = pb.SessionSnapshot()
        changed.CopyFrom(snapshot)
        for name, value in changes.items():
            setattr(changed, name, value)
        return (await client.fails(client.stub.Restore(pb.RestoreRequest(snapshot=changed)))).reason

    assert await restore_fails(state=snapshot.state[:-1]) == "BAD_ARGUMENT"
    assert await restore_fails(environment_version="1.1.0") == "BAD_ARGUMENT"
    newer = await client.open("walk-v1")
    taken = (await client.stub.Snapshot(pb.SnapshotRequest(session_id=newer.session_id))).snapshot
    assert taken.environment_version == "1.1.0"
    for forged in (b"", b"\x80", b"\xc1", b"not a state"):
        digest = hashlib.sha256(b"walk-v1\x001.0.0\x00" + forged).digest()
        assert await restore_fails(state=forged, digest=digest) == "BAD_ARGUMENT"
    digest = hashlib.sha256(b"walk-v1\x000.9.0\x00" + snapshot.state).digest()
    assert await restore_fails(environment_version="0.9.0", digest=digest) == "INCOMPATIBLE_SNAPSHOT"


async def test_versions_live_side_by_side(client: Client) -> None:
    specs = (await client.stub.Describe(pb.DescribeRequest(environment_id="walk-v1"))).environments
    assert [spec.version for spec in specs] == ["1.1.0", "1.0.0"]
    for wanted, got in (("", "1.1.0"), ("<1.1", "1.0.0"), ("1.0.0", "1.0.0"), (">=1.0,<2", "1.1.0")):
        response = await client.stub.Open(pb.OpenRequest(environment_id="walk-v1", version=wanted))
        assert response.environment_version == got
    missing = await client.fails(client.open("walk-v1", version=">=2"))
    assert (missing.code, missing.metadata["available"]) == ("NOT_FOUND", "1.1.0,1.0.0")
    assert (await client.fails(client.open("walk-v1", version="~1"))).fields == ["version"]
    unknown = await client.fails(client.open("wlak-v1"))
    assert unknown.metadata["nearest"].split(",")[0] == "walk-v1"


async def test_wants_that_nobody_can_meet_are_refused(client: Client) -> None:
    failure = await client.fails(client.open("walk-v1", want=pb.Want(expert_action=True)))
    assert (failure.code, failure.metadata["capability"]) == ("UNIMPLEMENTED", "expert_action")
    assert (await client.fails(client.open("walk-v1", want=pb.Want(image=True)))).metadata["capability"] == "image"
    session = await client.open("walk-v1", want=pb.Want(valid_actions=True, state_key=True))
    assert [action.text for action in session.observation.valid_actions][:2] == ["Left", "Right"]
    assert len(session.observation.state_key) == 16


async def test_render_modes(client: Client) -> None:
    session = await client.open("walk-v1")
    html = await client.stub.Render(pb.RenderRequest(session_id=session.session_id, mode="html"))
    assert html.mime == "text/html; charset=utf-8" and html.data.startswith(b"<b>")
    failure = await client.fails(client.stub.Render(pb.RenderRequest(session_id=session.session_id, mode="png")))
    assert failure.fields == ["mode"] and "text, html" in failure.message


@pytest.mark.parametrize("action", ["bug", "nan"])
async def test_a_bug_costs_its_own_session_only(client: Client, action: str) -> None:
    session, other = await client.open("walk-v1"), await client.open("walk-v1")
    failure = await client.fails(client.step(session, 0, action))
    assert (failure.code, failure.reason, failure.metadata["session"]) == ("INTERNAL", "ENVIRONMENT_BUG", "lost")
    gone = await client.fails(client.step(session, 0, "Right"))
    assert (gone.code, gone.reason, gone.metadata["advice"]) == ("DATA_LOSS", "SESSION_LOST", "reopen")
    await client.step(other, 0, "Right")


async def test_calls_on_one_session_keep_their_order(client: Client) -> None:
    session = await client.open("waiting-v1")
    steps = []
    for index, action in enumerate(("gate", "20", "10", "0")):
        steps.append(asyncio.create_task(client.step(session, index, action)))
        await client.pending(session, index + 1)  # gRPC promises no order of calls that are made at once
    Waiting.opened.set()
    turns = await asyncio.gather(*steps)
    assert text_of(turns[-1]) == "gate,20,10,0"


async def test_a_call_past_its_deadline_is_finished_and_cached(client: Client) -> None:
    session = await client.open("waiting-v1")
    with pytest.raises(Exception, match="DEADLINE_EXCEEDED"):
        await client.step(session, 0, "gate", timeout=0.05)
    Waiting.opened.set()
    turn = await client.step(session, 0, "gate")
    assert text_of(turn) == "gate"
    assert text_of(await client.step(session, 1, "1")) == "gate,1"


async def test_limits_answer_with_what_was_met_and_when_to_come_back(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_sessions=2, max_group=2, max_snapshot_bytes=64, max_step_actions=3))
    session = await client.open("walk-v1")
    full = await client.fails(client.open("walk-v1", count=2))
    assert (full.code, full.metadata["limit"], full.metadata["advice"]) == (
        "RESOURCE_EXHAUSTED",
        "max_sessions",
        "retry",
    )
    assert full.retry_after and full.retry_after > 0
    assert (await client.fails(client.open("walk-v1", count=3))).fields == ["count"]
    large = await client.fails(client.stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id)))
    assert (large.reason, large.metadata["limit"]) == ("TOO_LARGE", "max_snapshot_bytes")
    assert (await client.fails(client.step(session, 0, *["Left"] * 4))).fields == ["actions"]
    await client.open("walk-v1")
    await client.stub.Close(pb.CloseRequest(session_ids=[session.session_id]))
    await client.open("walk-v1")


async def test_calls_in_flight_are_bounded(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_calls_in_flight=2))
    sessions = [await client.open("waiting-v1") for _ in range(3)]
    steps = [asyncio.create_task(client.step(session, 0, "gate")) for session in sessions]
    (refused,), others = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
    assert "RESOURCE_EXHAUSTED" in str(refused.exception())
    Waiting.opened.set()
    await asyncio.gather(*others)
    await client.step(sessions[steps.index(refused)], 0, "1")


@pytest.mark.parametrize("lease", [-1.0, math.nan])
async def test_a_lease_is_a_number_of_seconds(client: Client, lease: float) -> None:
    assert (await client.fails(client.open("walk-v1", lease_seconds=lease))).fields == ["lease_seconds"]


async def test_leases_expire_unless_renewed(client: Client) -> None:
    kept, left = [await client.open("walk-v1", lease_seconds=1000) for _ in range(2)]  # the default is shorter
    for _ in range(2):
        await client.stub.Renew(pb.RenewRequest(session_ids=[kept.session_id]))
        for session in (kept, left):
            client.table[session.session_id].touched -= 700
    await eventually(lambda: left.session_id not in client.table)
    response = await client.stub.Renew(pb.RenewRequest(session_ids=[kept.session_id, left.session_id, "never"]))
    assert list(response.missing) == [left.session_id, "never"]
    failure = await client.fails(client.step(left, 0, "Right"))
    assert (failure.code, failure.reason, failure.metadata["advice"]) == ("NOT_FOUND", "UNKNOWN_SESSION", "reopen")
    assert (await client.stub.Describe(pb.DescribeRequest())).live_sessions == 1


async def test_a_lease_is_over_when_two_looks_find_it_so(client: Client) -> None:
    """At the first, the call that keeps the session may lie unread in the socket."""
    opened = await client.open("walk-v1")
    session = client.table[opened.session_id]

    def look() -> int:
        return client.server.worker.reap([client.table])

    session.touched -= 1000
    assert look() == 0
    session.touched = time.monotonic()  # the call is read
    assert look() == 0
    session.touched -= 1000
    assert [look(), look()] == [0, 1]


async def test_close_is_harmless_to_repeat(client: Client) -> None:
    session = await client.open("fragile-v1")
    for _ in range(2):
        await client.stub.Close(pb.CloseRequest(session_ids=[session.session_id, "never"]))
    assert (await client.fails(client.step(session, 0, "fine"))).reason == "UNKNOWN_SESSION"


async def test_opens_under_way_cannot_together_exceed_the_limit(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_sessions=4))
    opens = [client.open("searched-v1", seed=seed) for seed in range(10)]
    replies = await asyncio.gather(*opens, return_exceptions=True)
    assert sum(isinstance(reply, pb.Session) for reply in replies) == 4
    assert (await client.stub.Describe(pb.DescribeRequest())).live_sessions == 4


async def test_groups_in_the_making_cannot_together_exceed_the_limit(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_sessions=4))
    opens = [client.open("searched-v1", seed=seed, count=3) for seed in range(3)]
    replies = await asyncio.gather(*opens, return_exceptions=True)
    assert sum(isinstance(reply, pb.Session) for reply in replies) == 1
    assert (await client.stub.Describe(pb.DescribeRequest())).live_sessions == 3
    assert (await client.fails(client.open("searched-v1", count=2))).metadata["limit"] == "max_sessions"
    unfindable = client.open("searched-v1", options={"findable": False})
    assert (await client.fails(unfindable)).reason == "BAD_ARGUMENT"  # and gives its place back
    await client.open("walk-v1")


async def test_forks_that_wait_for_their_turn_cannot_together_exceed_the_limit(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_sessions=3))
    session = await client.open("waiting-v1")
    step = asyncio.create_task(client.step(session, 0, "gate"))
    await entered()
    fork = pb.ForkRequest(session_id=session.session_id, epoch=1, step_index=1)
    forks = [client.stub.Fork(fork) for _ in range(5)]
    await client.pending(session, 6)
    Waiting.opened.set()
    replies = await asyncio.gather(*forks, return_exceptions=True)
    await step
    assert sum(isinstance(reply, pb.ForkResponse) for reply in replies) == 2
    assert (await client.stub.Describe(pb.DescribeRequest())).live_sessions == 3


async def test_a_call_that_its_caller_gave_up_is_in_flight_until_it_is_done(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_calls_in_flight=1))
    left, other = await client.open("waiting-v1"), await client.open("walk-v1")
    call = client.stub.Step(step_request(left, 0, "gate"))
    await entered()
    call.cancel()
    await client.stub.Describe(pb.DescribeRequest())  # comes after the news that the caller is gone
    assert (await client.fails(client.step(other, 0, "Right"))).metadata["limit"] == "max_calls_in_flight"
    Waiting.opened.set()
    await eventually(lambda: not client.server.metrics.calls_in_flight)
    assert text_of(await client.step(left, 0, "gate")) == "gate"


async def test_sessions_whose_reply_is_too_large_are_not_made(serve: Serve) -> None:
    client = await serve(limits=ServerLimits(max_message_bytes=16_000))
    session = await client.open("walk-v1")
    snapshot = (await client.stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id))).snapshot
    stream = Stream(client)
    calls = [
        pb.OpenRequest(environment_id="walk-v1", count=400, key="open"),
        pb.ForkRequest(session_id=session.session_id, epoch=1, count=400, key="fork"),
        pb.RestoreRequest(snapshot=snapshot, count=400, key="restore"),
    ]
    for place, (method, request) in enumerate(zip(("Open", "Fork", "Restore"), calls, strict=True)):
        failure = await client.fails(getattr(client.stub, method)(request))
        assert (failure.reason, failure.metadata["limit"]) == ("TOO_LARGE", "max_message_bytes")
        await stream.send(pb.StreamRequest(calls=[pb.Call(call_id=place, **{method.lower(): request})]))
        await stream.until(place + 1)
        assert read_status(stream.replies[place]).reason == "TOO_LARGE"
    assert (await client.stub.Describe(pb.DescribeRequest())).live_sessions == 1
    for method, request in zip(("Open", "Fork", "Restore"), calls, strict=True):
        request.count = 5
        assert len((await getattr(client.stub, method)(request)).sessions) == 5


async def test_close_waits_for_nobody_and_what_came_before_it_is_finished(client: Client) -> None:
    session = await client.open("waiting-v1")
    step = asyncio.create_task(client.step(session, 0, "gate"))
    await entered()
    behind = asyncio.create_task(client.step(session, 1, "1"))
    await client.pending(session, 2)
    await client.stub.Close(pb.CloseRequest(session_ids=[session.session_id]))
    failure = await client.fails(client.step(session, 2, "1"))
    assert (failure.code, failure.reason) == ("NOT_FOUND", "UNKNOWN_SESSION")
    assert not step.done()
    Waiting.opened.set()
    assert text_of(await step) == "gate"
    assert text_of(await behind) == "gate,1"


async def test_renew_names_lost_sessions_as_missing(client: Client) -> None:
    lost, live = await client.open("walk-v1"), await client.open("walk-v1")
    await client.fails(client.step(lost, 0, "bug"))
    request = pb.RenewRequest(session_ids=[lost.session_id, live.session_id])
    assert list((await client.stub.Renew(request)).missing) == [lost.session_id]


async def test_unknown_fields_are_ignored(client: Client) -> None:
    data = pb.OpenRequest(environment_id="walk-v1", seed=1).SerializeToString() + b"\xfa\x3f\x03new"
    open_raw = client.channel.unary_unary(
        "/starpod.v1.EnvironmentService/Open",
        request_serializer=bytes,
        response_deserializer=pb.OpenResponse.FromString,
    )
    response = await open_raw(data)
    assert text_of(response.sessions[0]) == text_of(await client.open("walk-v1"))
