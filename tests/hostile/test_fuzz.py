"""Generated messages at every call: any answer is documented, nobody else notices, and the server has no bug."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from starpod.v1 import environment_pb2 as pb
from tests.hostile.conftest import VILLAIN, Target, bearer, reason_of, status_class
from tests.hostile.messages import Fields, messages

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["EnvironmentService"].methods}
UNARY = sorted(set(METHODS) - {"Stream"})
ENVIRONMENTS = ("walk-v1", "anything-v1", "searched-v1", "frozen_lake-v1", "countdown-v1", "sudoku-v1", "bandit-v1")
thorough = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def fuzzed(target: Target) -> tuple[Target, Fields]:
    """A server, and values that lead past the first check: the villain's own sessions, and one of the witness."""
    sessions = [target.open(name, lease_seconds=80_000) for name in ("walk-v1", "anything-v1", "frozen_lake-v1")]
    snapshot = target.stub.Snapshot(
        pb.SnapshotRequest(session_id=sessions[0].session_id), metadata=target.metadata
    ).snapshot
    return target, leading_fields([session.session_id for session in sessions], snapshot, target.witness.session_id)


def leading_fields(own: list[str], snapshot: pb.SessionSnapshot, stranger: str) -> Fields:
    session_id = st.sampled_from([*own, *own, *own, stranger, "", "x" * 64, "\0"])
    snapshots = messages(pb.SessionSnapshot.DESCRIPTOR, {"environment_id": st.just("walk-v1")})
    numbers = st.sampled_from([0, 0, 1, 1, 2, 3, 2**31, 2**32 - 2, 2**32 - 1])
    return {
        "session_id": session_id,
        "session_ids": st.sampled_from([stranger, "", "nobody"]),
        "environment_id": st.sampled_from([*ENVIRONMENTS, "", "Walk-v1", "walk", "no-v1" * 50]),
        "version": st.sampled_from(["", "1.1.0", ">=1.0.0", "=" * 300, ">=99999999999999999999", "x"]),
        "count": st.sampled_from([0, 0, 1, 2, 65, 2**32 - 1]),
        "first_member": numbers,
        "epoch": numbers,
        "epochs": numbers,
        "step_index": numbers,
        "step_indices": numbers,
        "mode": st.sampled_from(["", "text", "html", "png", "gif"]),
        "RestoreRequest.snapshot": st.one_of(st.just(snapshot), snapshots),
        "text": st.sampled_from(["Left", "stop", "report", "nan", "", "Up", "<answer>1+1</answer>", "9" * 5000, "\0"]),
        "dtype": st.sampled_from(["float64", "int8", "object", "", "bool"]),
        "timeout_ms": st.sampled_from([0, 1, 2**32 - 1]),
        "call_id": st.sampled_from([0, 1, 1, 2**64 - 1]),
    }


def attack(target: Target, method: str, request: Message) -> None:
    with target.unharmed():
        try:
            response = getattr(target.stub, method)(request, metadata=bearer(VILLAIN), timeout=60)
        except grpc.RpcError as error:
            status_class(error)
        else:
            clean_up(target, getattr(response, "sessions", ()) if method != "Reset" else ())


def clean_up(target: Target, sessions: Any) -> None:
    target.close(*(session.session_id for session in sessions))


def test_calls_with_generated_messages(fuzzed: tuple[Target, Fields]) -> None:
    target, fields = fuzzed
    calls = st.one_of(*(st.tuples(st.just(name), messages(METHODS[name].input_type, fields)) for name in UNARY))

    @thorough
    @given(calls)
    def run(call: tuple[str, Message]) -> None:
        attack(target, *call)

    run()


def test_streams_of_generated_messages(fuzzed: tuple[Target, Fields]) -> None:
    target, fields = fuzzed

    @thorough
    @given(st.lists(messages(pb.StreamRequest.DESCRIPTOR, fields), max_size=3))
    def run(requests: list[pb.StreamRequest]) -> None:
        with target.unharmed():
            expected = sorted(
                call_id
                for request in requests
                for call_id in (
                    *(call.call_id for call in request.calls),
                    *request.steps.call_ids,
                    *request.resets.call_ids,
                )
            )
            answered: list[int] = []
            for response in target.stub.Stream(iter(requests), metadata=bearer(VILLAIN), timeout=60):
                answered += [*response.transitions.call_ids, *response.starts.call_ids]
                for reply in response.replies:
                    answered.append(reply.call_id)
                    if reply.HasField("error"):
                        reason_of(reply.error)
                    for verb in ("open", "fork", "restore"):
                        clean_up(target, getattr(reply, verb).sessions)
            assert sorted(answered) == expected  # exactly one reply each, also where ids are used twice

    run()


SAMPLE = pb.StepRequest(session_id="x", epoch=1, actions=[pb.Action(text="Left")]).SerializeToString()
BODIES = st.one_of(
    st.binary(max_size=200),
    st.integers(0, len(SAMPLE)).map(lambda end: SAMPLE[:end]),
    st.sampled_from(
        [
            b"\x0a\x02\xff\xfe",  # no UTF-8
            b"\x0a\x04\xed\xa0\x80x",  # half of a surrogate pair
            b"\x0a\xff\xff\xff\xff\x0f",  # a length beyond the end
            b"\xff" * 50,  # a number without an end
            b"\x08" * 11,
            b"\x0c",  # the end of a group that never began
            b"\x0b" * 5000,
            b"\x00",
        ]
    ),
)


def test_bytes_that_are_hardly_a_message(target: Target) -> None:
    """Bytes that are no message of the method's type are an invalid argument."""

    @thorough
    @given(st.sampled_from(UNARY), BODIES)
    def run(method: str, body: bytes) -> None:
        try:
            GetMessageClass(METHODS[method].input_type).FromString(body)
            malformed = False
        except DecodeError:
            malformed = True
        with target.unharmed():
            try:
                response = target.raw(method)(body, metadata=bearer(VILLAIN), timeout=60)
            except grpc.RpcError as error:
                reason = status_class(error)
                assert reason == "BAD_ARGUMENT" or not malformed
            else:
                assert not malformed
                if method in ("Open", "Fork", "Restore"):
                    clean_up(target, pb.OpenResponse.FromString(response).sessions)

    run()
