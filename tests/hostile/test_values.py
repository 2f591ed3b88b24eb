"""Hand-picked values at every call: too large, too deep, not text, not numbers, not in the schema, not known."""

from __future__ import annotations

import struct
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2

from starpod.v1 import environment_pb2 as pb
from tests.hostile.conftest import MEBIBYTE, Target, reason_of
from tests.hostile.costs import field


def opening(**fields: Any) -> pb.OpenRequest:
    return pb.OpenRequest(environment_id="walk-v1", **{"seed": 1, **fields})


def with_options(**values: object) -> pb.OpenRequest:
    request = opening()
    for name, value in values.items():
        if isinstance(value, struct_pb2.Value):
            request.options.fields[name].CopyFrom(value)
        else:
            request.options[name] = value
    return request


def nested(depth: int) -> struct_pb2.Value:
    value = struct_pb2.Value(number_value=1)
    for _ in range(depth):
        outer = struct_pb2.Value()
        outer.list_value.values.append(value)
        value = outer
    return value


OPENINGS = {
    "no environment": (pb.OpenRequest(), "UNKNOWN_ENVIRONMENT"),
    "an environment with a long name": (pb.OpenRequest(environment_id="w" * 60_000), "UNKNOWN_ENVIRONMENT"),
    "an environment with an endless name": (pb.OpenRequest(environment_id="w" * (3 * MEBIBYTE)), "BAD_ARGUMENT"),
    "an environment with escapes": (pb.OpenRequest(environment_id="\x1b[2J\r\n\0walk"), "UNKNOWN_ENVIRONMENT"),
    "a long range": (opening(version=">=1.0.0," * 100_000), "BAD_ARGUMENT"),
    "a version of many digits": (opening(version="==" + "9" * 5000), "BAD_ARGUMENT"),
    "no such version": (opening(version="==9.9.9"), "UNKNOWN_VERSION"),
    "a long key": (opening(key="k" * 129), "BAD_ARGUMENT"),
    "a group beyond the limit": (opening(count=65), "BAD_ARGUMENT"),
    "a group beyond all limits": (opening(count=2**32 - 1), "BAD_ARGUMENT"),
    "a place beyond 32 bits": (opening(first_member=2**32 - 1, count=2), "BAD_ARGUMENT"),
    "a lease that is no number": (opening(lease_seconds=float("nan")), "BAD_ARGUMENT"),
    "a negative lease": (opening(lease_seconds=float("-inf")), "BAD_ARGUMENT"),
    "a picture that is not drawn": (opening(want=pb.Want(image=True)), "UNSUPPORTED"),
    "an unknown option": (with_options(start=1, stop=2), "BAD_ARGUMENT"),
    "ten thousand unknown options": (with_options(**{f"x{i}": 1 for i in range(10_000)}), "BAD_ARGUMENT"),
    "an option with a long name": (with_options(**{"x" * MEBIBYTE: 1}), "BAD_ARGUMENT"),
    "an option of another type": (with_options(start="1; drop table"), "BAD_ARGUMENT"),
    "an option out of range": (with_options(start=11), "BAD_ARGUMENT"),
    "an option that is no number": (with_options(start=float("nan")), "BAD_ARGUMENT"),
    "an infinite option": (with_options(start=float("-inf")), "BAD_ARGUMENT"),
    "an option beyond 64 bits": (with_options(start=1e300), "BAD_ARGUMENT"),
    "a nested option": (with_options(start=nested(20)), "BAD_ARGUMENT"),
    "an option without a value": (with_options(start=struct_pb2.Value()), "BAD_ARGUMENT"),
}


@pytest.mark.parametrize("name", OPENINGS)
def test_openings(target: Target, name: str) -> None:
    request, reason = OPENINGS[name]
    with target.unharmed(memory=128 * MEBIBYTE):
        assert target.fails("Open", request) == reason


def action(**kind: Any) -> list[pb.Action]:
    return [pb.Action(**kind)]


def tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> list[pb.Action]:
    return action(tensor=pb.Tensor(dtype=dtype, shape=shape, data=data))


ACTIONS = {
    "too many": [pb.Action(text="x")] * 1025,
    "JSON nested within Python's limit": action(json="[" * 500 + "]" * 500),
    "JSON nested beyond it": action(json="[" * 500_000),
    "JSON's maps nested": action(json='{"a":' * 200 + "1" + "}" * 200),
    "JSON that is not a number": action(json="NaN"),
    "JSON that is infinite": action(json="[-Infinity]"),
    "JSON that becomes infinite": action(json="[1e999]"),
    "JSON with endless digits": action(json="9" * 100_000),
    "half a surrogate pair": action(json='["\\ud800"]'),
    "half a surrogate pair as a key": action(json='{"\\udfff": 1}'),
    "a tensor larger than memory": tensor("float64", (2**62, 2**62), b""),
    "an empty tensor larger than memory": tensor("float64", (2**62, 0, 2**62), b""),
    "a tensor of a hundred dimensions": tensor("int8", (1,) * 100, b"\0"),
    "a tensor that is cut": tensor("float64", (2,), b"\0" * 15),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_that_are_malformed_change_nothing(target: Target, name: str) -> None:
    session = target.open("anything-v1")
    with target.unharmed(memory=128 * MEBIBYTE):
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=ACTIONS[name])
        assert target.fails("Step", step) == "BAD_ARGUMENT"
    step = pb.StepRequest(session_id=session.session_id, epoch=1, step_index=0, actions=action(text="on"))
    assert target.stub.Step(step, metadata=target.metadata).next_step_index == 1
    target.close(session.session_id)


@pytest.mark.parametrize(
    "actions",
    [
        tensor("float64", (3,), struct.pack("<3d", float("nan"), float("inf"), -0.0)),
        tensor("int64", (2,), struct.pack("<2q", -(2**63), 2**63 - 1)),
        tensor("uint64", (1,), struct.pack("<Q", 2**64 - 1)),
        action(json=f"[{-(2**63)}, {2**64}, {10**400}]"),
        action(json="[" * 99 + "]" * 99),
        action(text="\0\x1b]0;x\x07\u202e\U0010ffff"),
        action(text="x" * (MEBIBYTE)),
    ],
    ids=["NaN", "int64", "uint64", "integers", "depth", "controls", "long"],
)
def test_odd_values_that_are_allowed_come_back_as_they_were(target: Target, actions: list[pb.Action]) -> None:
    session = target.open("anything-v1")
    with target.unharmed():
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=actions)
        first = target.stub.Step(step, metadata=target.metadata)
        assert target.stub.Step(step, metadata=target.metadata) == first  # a repetition is recognised
        (part,) = first.transition.observation.parts
        assert getattr(part, part.WhichOneof("kind")) == getattr(actions[0], actions[0].WhichOneof("kind"))
        target.close(session.session_id)


@pytest.mark.parametrize("environment", ["frozen_lake-v1", "sokoban-v1", "countdown-v1", "sudoku-v1", "bandit-v1"])
@pytest.mark.parametrize("text", ["(" * 50_000, "9" * 50_000, "9**9**9**9", "\x1b[2J\0", "<answer>" * 10_000])
def test_what_a_model_may_write_is_an_outcome(target: Target, environment: str, text: str) -> None:
    with target.unharmed():
        session = target.open(environment)
        step = pb.StepRequest(session_id=session.session_id, epoch=1, actions=action(text=text))
        transition = target.stub.Step(step, metadata=target.metadata, timeout=60).transition
        assert not transition.success
        # A tower of powers is an expression; its value is never worked out.
        assert transition.outcomes[0].valid == ((environment, text) == ("countdown-v1", "9**9**9**9"))
        target.close(session.session_id)


def test_a_struct_nested_beyond_what_protobuf_reads(target: Target) -> None:
    """Made by hand: no library would write it."""
    value = b"\x11" + struct.pack("<d", 1.0)
    for _ in range(5000):
        inner = field(1, value)  # ListValue.values
        value = field(6, inner)  # Value.list_value
    entry = field(1, b"start") + field(2, value)
    with target.unharmed():
        with pytest.raises(grpc.RpcError) as caught:
            target.raw("Open")(field(1, b"walk-v1") + field(3, field(1, entry)), metadata=target.metadata)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_unknown_enum_values_and_odd_forks(target: Target) -> None:
    session = target.open()
    place = {"session_id": session.session_id, "epoch": 1}
    with target.unharmed():
        for fork, reason in (
            (pb.ForkRequest(**place, randomness=99), "BAD_ARGUMENT"),  # type: ignore[arg-type]
            (pb.ForkRequest(**place, count=2, dynamics_seeds=[1], randomness="FORK_RANDOMNESS_RESEED"), "BAD_ARGUMENT"),
            (pb.ForkRequest(**place, dynamics_seeds=[1] * 100_000), "BAD_ARGUMENT"),
            (pb.ForkRequest(**place, step_index=2**32 - 1), "OUT_OF_ORDER"),
            (pb.ForkRequest(**place, count=2**32 - 1), "BAD_ARGUMENT"),
            (pb.ForkRequest(**place, first_member=2**32 - 1, count=2), "BAD_ARGUMENT"),
        ):
            assert target.fails("Fork", fork) == reason
    target.close(session.session_id)


def test_endless_lists_of_ids(target: Target) -> None:
    with target.unharmed():
        for method, request in (
            ("Renew", pb.RenewRequest(session_ids=[""] * 500_000)),
            ("Close", pb.CloseRequest(session_ids=[""] * 500_000)),
        ):
            assert target.fails(method, request) == "BAD_ARGUMENT"


def test_ids_that_are_guessed_or_of_another_tenant(target: Target) -> None:
    theirs = target.witness.session_id
    with target.unharmed():
        for session_id in (theirs, theirs[:-1], theirs + "A", theirs.swapcase(), "", "\0", "../" + theirs):
            place = {"session_id": session_id, "epoch": 1}
            for method, request in (
                ("Step", pb.StepRequest(**place)),
                ("Reset", pb.ResetRequest(**place)),
                ("Fork", pb.ForkRequest(**place)),
                ("Render", pb.RenderRequest(session_id=session_id)),
                ("Snapshot", pb.SnapshotRequest(session_id=session_id)),
            ):
                assert target.fails(method, request) == "UNKNOWN_SESSION"
            renewed = target.stub.Renew(pb.RenewRequest(session_ids=[session_id]), metadata=target.metadata)
            assert list(renewed.missing) == [session_id]
            target.close(session_id)


def test_keys_are_the_tenants_own(target: Target) -> None:
    """Two tenants may use one key for different sessions."""
    mine = target.stub.Open(opening(key="shared"), metadata=target.metadata).sessions[0]
    assert target.fails("Open", opening(key="shared", count=2)) == "KEY_REUSED"
    theirs = target.stub.Open(opening(key="shared", count=2), metadata=target.witness._metadata).sessions
    assert mine.session_id not in {session.session_id for session in theirs}
    target.close(mine.session_id)


def stream(target: Target, *requests: pb.StreamRequest) -> tuple[dict[int, list[str]], list[int]]:
    """The reasons by call id, and the ids of the calls that succeeded."""
    failed: dict[int, list[str]] = {}
    succeeded: list[int] = []
    for response in target.stub.Stream(iter(requests), metadata=target.metadata, timeout=60):
        succeeded += response.transitions.call_ids
        for reply in response.replies:
            if reply.HasField("error"):
                failed.setdefault(reply.call_id, []).append(reason_of(reply.error))
            else:
                succeeded.append(reply.call_id)
    return failed, succeeded


def test_a_stream_of_bytes_that_are_no_message(target: Target) -> None:
    with target.unharmed():
        replies = target.raw_stream()(iter([b"", b"\xff" * 20]), metadata=target.metadata)
        with pytest.raises(grpc.RpcError) as caught:
            list(replies)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_message_of_more_calls_than_anybody_makes(target: Target) -> None:
    with target.unharmed(memory=256 * MEBIBYTE):
        with pytest.raises(grpc.RpcError) as caught:
            stream(target, pb.StreamRequest(calls=[pb.Call()] * 65_537))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        # As many as are taken are answered.
        failed, _ = stream(target, pb.StreamRequest(calls=[pb.Call()] * 3000))
        assert failed == {0: ["BAD_ARGUMENT"] * 3000}


def test_observations_that_do_not_fit_one_message_come_in_several(target: Target) -> None:
    """Eight observations of a MiB, asked for at once, where a message holds four."""
    sessions = [target.open("anything-v1").session_id for _ in range(8)]
    columns = pb.StepColumns(
        call_ids=range(8), session_ids=sessions, epochs=[1] * 8, step_indices=[0] * 8, actions=["x" * 400_000] * 8
    )
    with target.unharmed(memory=160 * MEBIBYTE):
        failed, succeeded = stream(target, pb.StreamRequest(steps=columns))
        assert (failed, sorted(succeeded)) == ({}, list(range(8)))
        # Each asked for again: the replies of repeated steps come as calls.
        again = [
            pb.Call(call_id=place, render=pb.RenderRequest(session_id=session))
            for place, session in enumerate(sessions)
        ]
        failed, succeeded = stream(target, pb.StreamRequest(calls=again * 4))
        assert (failed, sorted(succeeded)) == ({}, sorted(list(range(8)) * 4))
    target.close(*sessions)
