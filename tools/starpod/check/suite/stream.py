"""Stream: the calls that also exist as unary RPCs, many at the same time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import grpc

from starpod.check.actions import NONSENSE
from starpod.check.expectations import expect, expect_played, expect_same, needs
from starpod.check.grpc_connection import CheckStream, columns_of, open_stream
from starpod.check.handle import Handle, Script, Turn
from starpod.check.probe import Probe, new_key
from starpod.check.refusal import from_status
from starpod.check.requirement import must
from starpod.v1 import environment_pb2 as pb
from starpod.v1.statuses import DOMAIN

UNKNOWN_SESSION = pb.StepRequest(session_id="no-such-session", epoch=1)


@must("S-01", "Every call on a Stream gets exactly one reply, with its call_id and of its kind.")
async def check_one_reply_per_call(probe: Probe) -> None:
    key = new_key()
    async with open_stream(probe.connection) as stream:
        open_call = pb.Call(call_id=2**64 - 1, open=probe.open_request(key=key))
        open_reply = (await stream.ask(open_call))[0]
        expect(open_reply.WhichOneof("response") == "open", "an OpenResponse to an open", _kind(open_reply))
        probe.adopt(open_reply.open.sessions)
        handle = Handle(probe.connection, open_reply.open.sessions[0])
        calls = {
            0: pb.Call(call_id=0, step=handle.request()),
            7: pb.Call(call_id=7, render=pb.RenderRequest(session_id=handle.id)),
            8: pb.Call(call_id=8, renew=pb.RenewRequest(session_ids=[handle.id])),
            9: pb.Call(call_id=9, reset=handle.reset_request()),
        }
        first_calls = [calls[number] for number in (0, 7, 8)]
        replies = await stream.ask(*first_calls) + await stream.ask(calls[9])
        for call, reply in zip((*first_calls, calls[9]), replies, strict=True):
            kind = call.WhichOneof("request")
            expect(reply.WhichOneof("response") == kind, f"a {kind} reply to call {call.call_id}", _kind(reply))
        copies = await _expect_copies(probe, stream, handle)
        close_replies = await stream.ask(pb.Call(call_id=1, close=pb.CloseRequest(session_ids=[handle.id])))
        expect(close_replies[0].WhichOneof("response") == "close", "a close reply to a close", _kind(close_replies[0]))
        await stream.finish()
        call_ids = {2**64 - 1, *calls, 1, *copies}
        expect(set(stream.replies) == call_ids, f"replies to the calls {sorted(call_ids)}", sorted(stream.replies))
        repeated_ids = [call_id for call_id, replies in stream.replies.items() if len(replies) > 1]
        expect(not repeated_ids, "one reply to each call", f"several to {repeated_ids}")


async def _expect_copies(probe: Probe, stream: CheckStream, handle: Handle) -> list[int]:
    """Send Fork, Snapshot and Restore if the environment has them, and return the ids of these calls."""
    capabilities, replies = probe.spec.capabilities, []
    if capabilities.fork:
        fork = pb.ForkRequest(session_id=handle.id, epoch=handle.epoch + 1)  # the Reset raised it
        replies.append((await stream.ask(pb.Call(call_id=20, fork=fork)))[0])
        probe.adopt(replies[-1].fork.sessions)
    if capabilities.snapshot:
        replies += await stream.ask(pb.Call(call_id=21, snapshot=pb.SnapshotRequest(session_id=handle.id)))
        restore = pb.RestoreRequest(snapshot=replies[-1].snapshot.snapshot)
        expect(_kind(replies[-1]) == "snapshot", "a snapshot reply to a snapshot", _kind(replies[-1]))
        replies += await stream.ask(pb.Call(call_id=22, restore=restore))
        probe.adopt(replies[-1].restore.sessions)
    for reply in replies:
        kind = {20: "fork", 21: "snapshot", 22: "restore"}[reply.call_id]
        expect(_kind(reply) == kind, f"a {kind} reply to a {kind}", _kind(reply))
    return [reply.call_id for reply in replies]


@must("S-02", "The calls of one session on a Stream are executed in the order sent.")
async def check_call_order(probe: Probe) -> None:
    script = probe.target.script()
    handle = await probe.seeded()
    turns = enumerate(script.turns)
    async with open_stream(probe.connection) as stream:
        replies = await stream.ask(
            *(pb.Call(call_id=index, step=handle.request(turn, ahead=index)) for index, turn in turns)
        )
    fix = "queue the calls of a session"
    expect_played(script.transitions, [_transition(reply) for reply in replies], "the episode in one message", fix)


@must("S-03", "A Stream may interleave many sessions in one message.")
async def check_interleaved_sessions(probe: Probe) -> None:
    script = probe.target.script()
    handles = [await probe.seeded() for _ in range(4)]
    async with open_stream(probe.connection) as stream:
        calls = [
            pb.Call(call_id=100 * number + index, step=handle.request(turn, ahead=index))
            for index, turn in enumerate(script.turns)
            for number, handle in enumerate(handles)
        ]
        await stream.ask(*calls)
    for number in range(len(handles)):
        transitions = [_transition(stream.replies[100 * number + index][0]) for index in range(len(script.turns))]
        expect_played(script.transitions, transitions, f"the episode of session {number} of 4 in one message")


@must("S-04", "A bad call on a Stream gets an error reply; the other calls and the Stream continue.")
async def check_single_failure(probe: Probe) -> None:
    handle, other_handle = await probe.seeded(), await probe.seeded()
    async with open_stream(probe.connection) as stream:
        replies = await stream.ask(
            pb.Call(call_id=1, step=handle.request()),
            pb.Call(call_id=2, step=UNKNOWN_SESSION),
            pb.Call(call_id=3, step=other_handle.request(ahead=5)),
            pb.Call(call_id=4, step=other_handle.request()),
        )
        expected = ["step", "error", "error", "step"]
        expect(_kinds(replies) == expected, f"{expected}", [_kind(reply) for reply in replies])
        handle.index += 1
        reply = (await stream.ask(pb.Call(call_id=5, step=handle.request())))[0]
        expect(reply.WhichOneof("response") == "step", "the stream to continue", _kind(reply))


@must("S-05", "An error on a Stream has the code and the details that the unary call would have had.")
async def check_same_errors(probe: Probe) -> None:
    handle = await probe.seeded()
    requests = [
        handle.request(ahead=3),
        handle.request([pb.Action()]),
        UNKNOWN_SESSION,
    ]
    unaries = [await probe.connection.refusal(request) for request in requests]
    async with open_stream(probe.connection) as stream:
        replies = await stream.ask(*(pb.Call(call_id=number, step=request) for number, request in enumerate(requests)))
    for unary, reply in zip(unaries, replies, strict=True):
        if unary is None or reply.WhichOneof("response") != "error":
            continue  # another requirement reports this
        refusal = from_status(reply.error)
        expect(refusal.code == unary.code, f"{unary.code} as in a unary call", refusal)
        if unary.info is not None:
            got = (refusal.info.domain, refusal.reason) if refusal.info else "no ErrorInfo"
            expect(got == (DOMAIN, unary.reason), f"the ErrorInfo {unary.reason}", got, "fill Status.details")
            expect(refusal.metadata == unary.metadata, f"metadata {unary.metadata}", refusal.metadata)


@must("S-06", "After a half-close the server answers what it has received and ends the Stream with OK.")
async def check_half_close(probe: Probe) -> None:
    handles = await probe.open_many(8)
    async with open_stream(probe.connection) as stream:
        await stream.send(*(pb.Call(call_id=n, step=handle.request()) for n, handle in enumerate(handles)))
        code = await stream.finish()
        expect(len(stream.replies) == 8, "8 replies after the half-close", len(stream.replies), "drain before the end")
        expect(code == grpc.StatusCode.OK, "the stream to end with OK", code.name)


@must("S-07", "Cancelling a Stream leaves its sessions alive, and its calls are finished and cached.")
async def check_cancellation(probe: Probe) -> None:
    async def cancel(turn: Turn) -> None:
        async with open_stream(probe.connection) as stream:
            call = pb.Call(call_id=1, step=handle.request(turn))
            await (stream.send(call) if handle.index % 2 else stream.ask(call))
        await asyncio.sleep(0.02)  # time for the server to notice

    probe.target.script()
    handle = await probe.seeded()
    await probe.expect_script(
        handle, "the episode among cancelled streams", "do not tie sessions to a stream", before=cancel
    )


@must("S-08", "The same Step again, on the same Stream, on another or as a unary call, has the same reply.")
async def check_repeated_step(probe: Probe) -> None:
    script = probe.target.script()
    handle = await probe.seeded()
    transitions = []
    async with open_stream(probe.connection) as stream, open_stream(probe.second_connection()) as other_stream:
        for number, turn in enumerate(script.turns):
            request = handle.request(turn)
            calls = [pb.Call(call_id=10 * number + copy, step=request) for copy in range(2)]
            replies = [*await stream.ask(*calls), *await other_stream.ask(calls[0])]
            transitions.append(await handle.step(turn))
            for reply in replies:
                expect_same(transitions[-1], _transition(reply), f"the reply of each copy of turn {number}")
    expect_played(script.transitions, transitions, "the episode of Steps sent four times")


@must("S-09", "A call on a Stream past its timeout_ms is finished and cached: asking again has its reply.")
async def check_timeout(probe: Probe) -> None:
    probe.target.script()
    handle = await probe.seeded()
    late_count = 0

    async def hurry(turn: Turn) -> None:
        nonlocal late_count
        (reply,) = await stream.ask(pb.Call(call_id=handle.index, timeout_ms=1, step=handle.request(turn)))
        if reply.WhichOneof("response") == "error":
            refusal = from_status(reply.error)
            expect(refusal.code == "DEADLINE_EXCEEDED", "the reply or DEADLINE_EXCEEDED", refusal)
            late_count += 1

    async with open_stream(probe.connection) as stream:
        await probe.expect_script(handle, "the episode with calls past their timeout", before=hurry)
    needs(late_count, "the server answers within the shortest timeout, 1 ms")


@must("S-10", "A call without a request gets an error reply, and an empty message none.")
async def check_empty_requests(probe: Probe) -> None:
    handle = await probe.seeded()
    async with open_stream(probe.connection) as stream:
        await stream.send()
        replies = await stream.ask(pb.Call(call_id=1), pb.Call(call_id=2, step=handle.request()))
        kinds = _kinds(replies)
        expect(kinds == ["error", "step"], "an error and a step reply", kinds)
        code = await stream.finish()
        expect(sorted(stream.replies) == [1, 2], "replies to the calls 1 and 2 only", sorted(stream.replies))
        expect(code == grpc.StatusCode.OK, "the stream to end with OK", code.name)


@must(
    "S-11",
    "A row of StepColumns does the same as a Step with its fields; action_counts assigns the actions to the rows.",
)
async def check_columns(probe: Probe) -> None:
    _needs_columns(probe)
    script = probe.target.script()
    handle = await probe.seeded()
    needs(_plays_texts(script), "the environment's actions are not texts")
    fix = "treat a row as the corresponding Step"
    async with open_stream(probe.connection) as stream:
        requests = {index: handle.request(turn, ahead=index) for index, turn in enumerate(script.turns)}
        transitions = [_transition(reply) for reply in await stream.ask(steps=columns_of(requests))]
        expect_played(script.transitions, transitions, "the episode in columns", fix)
        other_handle = await probe.seeded()
        for number, turn in enumerate(script.turns):
            if len(turn) == 1:
                row = columns_of({100 + number: other_handle.request(turn)})
                row.ClearField("action_counts")
                reply = (await stream.ask(steps=row))[0]
                expected = script.transitions[number : number + 1]
                expect_played(expected, [_transition(reply)], "a row without action_counts", fix)
                other_handle.index += 1
            else:
                await other_handle.step(turn)


@must(
    "S-12",
    "Rows of several sub-actions, of state keys and of ends come back with all that the Step's reply has.",
)
async def check_full_rows(probe: Probe) -> None:
    _needs_columns(probe)
    probe.target.script()
    choices = probe.actions.choices((await probe.open(want=probe.actions.want(), seed=1)).sessions[0].observation)
    actions = [action for action in choices if action.HasField("text")][:2]
    needs(actions, "the environment's actions are not texts")
    limits = pb.LimitOverrides(max_turns=2, max_actions=0, max_actions_per_turn=0)
    pairs = []
    for want in (pb.Want(), pb.Want(state_key=probe.spec.capabilities.state_key)):
        pairs.append([await probe.seeded(want=want, limits=limits) for _ in range(2)])
    async with open_stream(probe.connection) as stream:
        for number, turn in enumerate(([], probe.actions.turn(*actions, pb.Action(text=NONSENSE)))):
            requests = {10 * number + index: columned.request(turn) for index, (columned, _) in enumerate(pairs)}
            replies = await stream.ask(steps=columns_of(requests))
            for reply, (columned, unary) in zip(replies, pairs, strict=True):
                what = f"a Step of {len(turn)} sub-actions, in columns as in a unary call"
                expect_played([await unary.step(turn)], [_transition(reply)], what)
                columned.index += 1


@must("S-13", "A bad row of StepColumns fails alone, with an error Reply.")
async def check_bad_row(probe: Probe) -> None:
    _needs_columns(probe)
    handle, other_handle = await probe.seeded(), await probe.seeded()
    steps = columns_of({1: handle.request(), 2: UNKNOWN_SESSION, 3: other_handle.request(ahead=4)})
    async with open_stream(probe.connection) as stream:
        kinds = _kinds(await stream.ask(steps=steps))
        expect(kinds == ["step", "error", "error"], "step, error, error", kinds)


@must(
    "S-14",
    "StepColumns of unequal lengths are refused, by errors to their rows or by ending the Stream, and step no session.",
)
async def check_ragged_columns(probe: Probe) -> None:
    _needs_columns(probe)
    handle = await probe.seeded()
    base_fields: dict[str, Any] = {
        "call_ids": [1, 2],
        "session_ids": [handle.id] * 2,
        "epochs": [handle.epoch] * 2,
        "step_indices": [0, 1],
    }
    cases: dict[str, dict[str, Any]] = {
        "one session id for two rows": {**base_fields, "session_ids": [handle.id], "action_counts": [0, 0]},
        "one action count for two rows": {**base_fields, "action_counts": [0]},
        "counts of two actions, and one action": {**base_fields, "action_counts": [1, 1], "actions": ["x"]},
        "two rows without counts, and one action": {**base_fields, "actions": ["x"]},
    }
    for what, fields in cases.items():
        async with open_stream(probe.connection) as stream:
            await stream.send(steps=pb.StepColumns(**fields))
            code = await stream.finish()
        kinds = {call_id: _kinds(replies) for call_id, replies in stream.replies.items()}
        is_refused = code == grpc.StatusCode.INVALID_ARGUMENT or kinds == {1: ["error"], 2: ["error"]}
        expect(is_refused, f"an error to each row, or INVALID_ARGUMENT, for {what}", f"{code.name} and replies {kinds}")
    fix = "check the lengths before the first row is played"
    refusal = await probe.connection.refusal(handle.request(probe.actions.choices(handle.session.observation)[:1]))
    expect(refusal is None, "the session at step 0 as before", refusal, fix)


@must(
    "S-15",
    "StreamResponse.timing is finite and not negative, and its environment_ms is at most total_ms.",
)
async def check_timing(probe: Probe) -> None:
    handles = await probe.open_many(2)
    async with open_stream(probe.connection) as stream:
        await stream.ask(*(pb.Call(call_id=call_id, step=handle.request()) for call_id, handle in enumerate(handles)))
        if probe.server.capabilities.step_columns:
            actions = [pb.Action(text="look")]
            rows = {call_id: handle.request(actions, ahead=1) for call_id, handle in enumerate(handles, 10)}
            await stream.ask(steps=columns_of(rows))
        needs(stream.timings, "the server sends no timing")
        for times in stream.timings:
            is_sound = 0 <= times.environment_ms <= times.total_ms * (1 + 1e-6) + 1e-3 and times.total_ms < math.inf
            fix = "sum both over the calls that the message answers"
            expect(is_sound, "0 <= environment_ms <= total_ms", f"{times.environment_ms} and {times.total_ms}", fix)


@must(
    "S-16",
    "Rows of one session in one StepColumns are executed in order, each as if it came alone.",
)
async def check_rows_of_one_session(probe: Probe) -> None:
    _needs_columns(probe)
    script, handle, other_handle = probe.target.script(), await probe.seeded(), await probe.seeded()
    needs(len(script.turns) > 1 and _plays_texts(script), "the environment has no two turns of texts")
    first, second = handle.request(script.turns[0]), handle.request(script.turns[1], ahead=1)
    rows = (first, first, other_handle.request(script.turns[0]), second, second, first)
    async with open_stream(probe.connection) as stream:
        replies = await stream.ask(steps=columns_of(dict(enumerate(rows))))
    fix = "let a row wait for all earlier rows of its session"
    kinds = _kinds(replies)
    expect(kinds == [*["step"] * 5, "error"], "five steps, and an error to the first one again", kinds, fix)
    expected = [script.transitions[turn] for turn in (0, 0, 0, 1, 1)]
    expect_played(expected, [_transition(reply) for reply in replies[:5]], "rows of one session", fix)


@must(
    "S-17",
    "A row of ResetColumns gets the same answer as a Reset with the same fields, repeated in either form. Errors are "
    "Replies.",
)
async def check_reset_rows(probe: Probe) -> None:
    needs(probe.server.capabilities.reset_columns, "the server does not declare reset_columns")
    want = pb.Want(state_key=probe.spec.capabilities.state_key)
    handle, other_handle = await probe.seeded(want=want), await probe.seeded(want=want)
    columns = pb.ResetColumns(
        call_ids=[3, 4],
        session_ids=[handle.id, UNKNOWN_SESSION.session_id],
        epochs=[handle.epoch, 1],
        seeds=[2, 2],
        dynamics_seeds=[3, 3],
    )
    seeds = {"seed": 2, "dynamics_seed": 3}
    async with open_stream(probe.connection) as stream:
        replies = await stream.ask_resets(columns)
        expect(_kinds(replies) == ["reset", "error"], "a reset, and an error for an unknown session", _kinds(replies))
        columns.call_ids[:] = [5, 6]
        again = (await stream.ask_resets(columns))[0]
    expect_same(_keep_columns(replies[0].reset), _keep_columns(again.reset), "the same reply to the same row again")
    repeated: pb.ResetResponse = await probe.connection.call(handle.reset_request(**seeds))
    expect_same(
        _keep_columns(replies[0].reset), _keep_columns(repeated), "the same reply to the same Reset, which is no row"
    )
    if probe.spec.capabilities.deterministic:
        reply: pb.ResetResponse = await probe.connection.call(other_handle.reset_request(**seeds))
        expect_same(_keep_columns(reply), _keep_columns(replies[0].reset), "a Reset in columns as in a unary call")


def _keep_columns(response: pb.ResetResponse) -> pb.ResetResponse:
    """Return only the fields of a reply that a row of StartColumns also has."""
    session = response.session
    start = pb.Session(seed=session.seed, dynamics_seed=session.dynamics_seed, observation=session.observation)
    return pb.ResetResponse(session=start, instructions=response.instructions)


@must("S-18", "Every message that asks for it is acknowledged once, whether or not it holds calls.")
async def check_acknowledgements(probe: Probe) -> None:
    needs(probe.server.capabilities.acknowledgements, "the server does not declare acknowledgements")
    handle = await probe.seeded()
    async with open_stream(probe.connection) as stream:
        await stream.ask_acknowledged(pb.Call(call_id=1, step=handle.request()), pb.Call(call_id=2))
        await stream.ask_acknowledged()
        await stream.ask(pb.Call(call_id=3, renew=pb.RenewRequest(session_ids=[handle.id])))
        await stream.finish()
    expect(stream.acknowledged == 2, "two acknowledgements for two messages that asked", stream.acknowledged)


def _needs_columns(probe: Probe) -> None:
    needs(probe.server.capabilities.step_columns, "the server does not declare step_columns")


def _transition(reply: pb.Reply) -> pb.Transition:
    expect(reply.WhichOneof("response") == "step", f"a step reply to call {reply.call_id}", _kind(reply))
    return reply.step.transition


def _kinds(replies: Iterable[pb.Reply]) -> list[str]:
    return [reply.WhichOneof("response") or "nothing" for reply in replies]


def _plays_texts(script: Script) -> bool:
    return all(action.HasField("text") for turn in script.turns for action in turn)


def _kind(reply: pb.Reply) -> str:
    kind = reply.WhichOneof("response") or "nothing"
    return f"{kind} ({from_status(reply.error)})" if kind == "error" else kind
