"""Malformed and oversized requests, and what errors carry."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
from google.protobuf.message import Message

from starpod.check.connection import method_of
from starpod.check.expectations import Unmet, expect, expect_informed, needs
from starpod.check.handle import Handle
from starpod.check.probe import UNLIMITED, Probe, new_key
from starpod.check.refusal import Refusal, from_error
from starpod.check.requirement import must
from starpod.v1 import environment_pb2 as pb

LARGEST = 256 * 2**20


@must("C-83", "Any call on an unknown session is NOT_FOUND (or, with an empty id, INVALID_ARGUMENT).")
async def check_unknown_session(probe: Probe) -> None:
    for session_id in ("no-such-session", "\u2603" * 1000, ""):
        requests: list[Message] = [
            pb.StepRequest(session_id=session_id, epoch=1),
            pb.ResetRequest(session_id=session_id, epoch=1),
            pb.RenderRequest(session_id=session_id),
        ]
        if probe.spec.capabilities.fork:
            requests.append(pb.ForkRequest(session_id=session_id, epoch=1))
        if probe.spec.capabilities.snapshot:
            requests.append(pb.SnapshotRequest(session_id=session_id))
        codes = ("NOT_FOUND",) if session_id == "no-such-session" else ("NOT_FOUND", "INVALID_ARGUMENT")
        for request in requests:
            await probe.expect_refusal(f"{method_of(request)} in the session {session_id[:16]!r}", request, *codes)


@must("C-84", "An action of no kind is INVALID_ARGUMENT and changes nothing.")
async def check_action_without_kind(probe: Probe) -> None:
    handle = await probe.seeded()
    choice = probe.actions.choices(handle.session.observation)[0]
    for actions in ([pb.Action()], [choice, pb.Action()]):
        await probe.expect_refusal("an action without a kind", handle.request(actions), "INVALID_ARGUMENT")
    if probe.target.repeats:
        await probe.expect_script(
            handle, "the episode after a malformed Step", "check all actions before playing the first one"
        )


@must("C-85", "More sub-actions than max_step_actions are INVALID_ARGUMENT and change nothing.")
async def check_too_many_actions(probe: Probe) -> None:
    limit = probe.server.limits.max_step_actions
    needs(0 < limit <= 1_000_000, "the server limits the sub-actions of a Step to none that could be sent")
    handle = await probe.seeded()
    request = handle.request([pb.Action(text="x")] * (limit + 1))
    await probe.expect_refusal(f"{limit + 1} sub-actions", request, "INVALID_ARGUMENT")
    await handle.step()


@must(
    "C-86",
    "A message above max_message_bytes is RESOURCE_EXHAUSTED, and harms neither session nor server.",
)
async def check_oversized_message(probe: Probe) -> None:
    limit = probe.server.limits.max_message_bytes
    needs(0 < limit <= LARGEST, "the server takes messages too large to try")
    handle = await probe.seeded()
    request = handle.request([pb.Action(text="x" * limit)])
    await probe.expect_refusal(f"a message of over {limit} bytes", request, "RESOURCE_EXHAUSTED")
    await handle.step()


@must("C-87", "Unknown fields are ignored.")
async def check_unknown_fields(probe: Probe) -> None:
    handle = await probe.seeded()
    for request in (pb.DescribeRequest(), handle.request(), pb.RenewRequest(session_ids=[handle.id])):
        try:
            await probe.connection.send_unknown_field(request)
        except grpc.aio.AioRpcError as error:
            raise Unmet(
                f"{method_of(request)} with a field of the future to be served", str(from_error(error))
            ) from error


@must("C-88", "Bytes that are not a message are refused, and harm neither session nor server.")
async def check_garbage(probe: Probe) -> None:
    handle = await probe.seeded()
    for method in ("Open", "Step", "Describe"):
        try:
            await probe.connection.send_garbage(method)
        except grpc.aio.AioRpcError as error:
            timed_out = error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            expect(not timed_out, f"garbage for {method} to be refused", from_error(error))
        else:
            raise Unmet(f"garbage for {method} to be refused", "OK")
    await handle.step()


@must(
    "C-89",
    "Every error carries google.rpc.ErrorInfo with the domain starpod.v1, and the reason and advice of the table.",
)
async def check_error_info(probe: Probe) -> None:
    handle = await probe.seeded(limits=pb.LimitOverrides(max_turns=1))
    key = new_key()
    await probe.create(probe.open_request(seed=1, key=key))
    cases: list[tuple[str, Message]] = [
        ("UNKNOWN_ENVIRONMENT", probe.open_request(environment_id="no_such_environment-v1", version="")),
        ("UNKNOWN_VERSION", probe.open_request(version=">=999.0.0")),
        ("BAD_ARGUMENT", _unknown_option(probe)),
        ("BAD_ARGUMENT", handle.request([pb.Action()])),
        ("KEY_REUSED", probe.open_request(seed=2, key=key)),
        ("UNKNOWN_SESSION", pb.StepRequest(session_id="no-such-session", epoch=1)),
        ("OUT_OF_ORDER", handle.request(ahead=2)),
    ]
    for reason, request in cases:
        await _expect_error_info(probe, reason, request)
    for want in _unsupported_wants(probe):
        refusal = await _expect_error_info(probe, "UNSUPPORTED", probe.open_request(want=want))
        expect(bool(refusal.metadata.get("capability")), "metadata `capability` with UNSUPPORTED", "none")
    await handle.step()
    await _expect_error_info(probe, "EPISODE_OVER", handle.request())


@must("C-90", "INVALID_ARGUMENT carries google.rpc.BadRequest, which names the field or the option.")
async def check_bad_request(probe: Probe) -> None:
    handle = await probe.seeded()
    cases: dict[str, Message] = {
        "no_such_option": _unknown_option(probe),
        "key": probe.open_request(key="k" * 129),
        "actions": handle.request([pb.Action()]),
    }
    for field, request in cases.items():
        refusal = await probe.connection.refusal(request)
        if refusal is None or refusal.code != "INVALID_ARGUMENT":
            continue  # another requirement reports this
        expected = f"a BadRequest whose field names {field!r}"
        expect(any(field in violation for violation in refusal.violations), expected, refusal.violations or "none")


@must(
    "C-91",
    "UNKNOWN_ENVIRONMENT has the nearest ids and UNKNOWN_VERSION the available versions in its metadata.",
)
async def check_error_metadata(probe: Probe) -> None:
    mistyped_id = probe.spec.id.replace("-v", "_-v")
    cases = {
        "nearest": (probe.open_request(environment_id=mistyped_id, version=""), probe.spec.id),
        "available": (probe.open_request(version=">=999.0.0"), probe.spec.version),
    }
    for key, (request, expected) in cases.items():
        refusal = await probe.connection.refusal(request)
        if refusal is None or refusal.code != "NOT_FOUND":
            continue  # another requirement reports this
        value = refusal.metadata.get(key, "")
        expect(expected in value.split(","), f"metadata {key!r} with {expected}", repr(value), f"send metadata {key}")


@must(
    "C-92",
    "At max_sessions Open is RESOURCE_EXHAUSTED with RetryInfo and the limit's name, and succeeds once a "
    "session was closed.",
    alone=True,
)
async def check_session_limit(probe: Probe) -> None:
    limit = probe.server.limits.max_sessions
    needs(0 < limit <= 256, "the server allows too many sessions to fill it")
    refusal = None
    handles: list[Handle] = []
    for _ in range(limit + 1):
        try:
            reply: pb.OpenResponse = await probe.connection.call_once(probe.open_request(limits=UNLIMITED))
        except grpc.aio.AioRpcError as error:
            refusal = from_error(error)
            break
        probe.adopt(reply.sessions)
        handles.append(Handle(probe.connection, reply.sessions[0]))
    expect(refusal is not None, f"a refusal beyond {limit} sessions", "OK", "enforce max_sessions")
    assert refusal is not None
    expect(refusal.code == "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED", refusal)
    expect_informed(refusal, "OVERLOADED", "a refusal beyond max_sessions")
    expect(refusal.retry_seconds is not None, "a RetryInfo", "none", "say when to try again")
    expect(bool(refusal.metadata.get("limit")), "the limit's name in metadata `limit`", "none")
    expect(len(handles) > 0, "room for one session while no other test runs", "none")
    await probe.connection.call(pb.CloseRequest(session_ids=[handles[0].id]))
    next_reply: pb.OpenResponse = await probe.connection.call(probe.open_request())
    probe.adopt(next_reply.sessions)


def _unknown_option(probe: Probe) -> pb.OpenRequest:
    return probe.open_request(options=probe.target.options_message(no_such_option=1))


def _unsupported_wants(probe: Probe) -> Iterator[pb.Want]:
    """Yield each Want that this environment cannot meet."""
    can = probe.spec.capabilities
    for name in ("valid_actions", "state_key", "expert_action", "score"):
        if not getattr(can, name):
            yield pb.Want(**{name: True})
    if "png" not in probe.spec.render_modes:
        yield pb.Want(image=True)


async def _expect_error_info(probe: Probe, reason: str, request: Message) -> Refusal:
    refusal = await probe.connection.refusal(request)
    expected = f"an error {reason} of {method_of(request)}"
    expect(refusal is not None, expected, "OK")
    assert refusal is not None
    expect_informed(refusal, reason, expected)
    return refusal
