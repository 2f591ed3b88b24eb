"""Resources that a caller without a token can use: few, and none that others need."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.hostile.conftest import MEBIBYTE, SERVICE, WITNESS, Target, bearer, status_class, target_server, until
from tests.hostile.test_floods import PREFACE, SETTINGS

OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
PER_CONNECTION = 16
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def narrow() -> Iterator[Target]:
    """A server whose limits a test can reach."""
    limits = ("--max-calls-in-flight", "170", "--max-streams", "30", "--max-health-calls", "128", "--keepalive", "1")
    with target_server(*limits, "--max-connections", "400", "--max-connections-per-address", "60") as attacked:
        yield attacked


@contextlib.contextmanager
def connection(target: Target) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(target.server.address, options=OWN_CONNECTION) as channel:
        yield channel


def check(channel: grpc.Channel) -> bool:
    request = health_pb2.HealthCheckRequest()
    return bool(health_pb2_grpc.HealthStub(channel).Check(request, timeout=30, wait_for_ready=True).status == SERVING)


def first(call: Iterator[object]) -> str:
    """Return "served" or the class of the call's error, which must say when to retry.

    "unread" means REFUSED_STREAM: HTTP/2 itself refused the call, because its connection has too many calls.
    """
    try:
        next(call)
        return "served"
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)
        if status is None and "RST_STREAM with error code 7" in error.details():
            return "unread"
        assert status.details[1].Is(error_details_pb2.RetryInfo.DESCRIPTOR)
        return status_class(error)


def test_a_flood_of_watches_is_shed_with_a_clear_status(narrow: Target) -> None:
    """22,100 of them used to make every tenant read "Concurrent RPC limit exceeded"."""
    with narrow.unharmed(memory=96 * MEBIBYTE), connection(narrow) as flooded, connection(narrow) as other:
        watch = health_pb2_grpc.HealthStub(flooded).Watch
        watches = [watch(health_pb2.HealthCheckRequest()) for _ in range(400)]
        results = [first(each) for each in watches]
        assert results.count("served") == PER_CONNECTION
        assert results.count("OVERLOADED") == 400 - PER_CONNECTION
        assert check(flooded)
        assert check(other)
        assert first(health_pb2_grpc.HealthStub(other).Watch(health_pb2.HealthCheckRequest())) == "served"
        narrow.witness.look()
        for each in watches:
            each.cancel()
        until(lambda: first(watch(health_pb2.HealthCheckRequest())) == "served")


def test_watches_over_many_connections_are_bounded_per_address(narrow: Target) -> None:
    with narrow.unharmed(), contextlib.ExitStack() as stack:
        stubs = [health_pb2_grpc.HealthStub(stack.enter_context(connection(narrow))) for _ in range(4)]
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for stub in stubs for _ in range(PER_CONNECTION)]
        results = [first(each) for each in watches]
        assert results.count("served") == 128 // 4
        assert check(stack.enter_context(connection(narrow)))


def test_calls_whose_request_never_comes(narrow: Target) -> None:
    """Each used to count against gRPC's limit of all calls."""
    ended = threading.Event()

    def silence() -> Iterator[bytes]:
        ended.wait(250)
        yield from ()

    try:
        with narrow.unharmed(), connection(narrow) as stranger, connection(narrow) as villain:
            check_ = [stranger.stream_unary("/grpc.health.v1.Health/Check").future(silence()) for _ in range(60)]
            classes = [status_class(call.exception(60)) for call in check_]
            assert set(classes) <= {"OVERLOADED", "DEADLINE"}
            assert classes.count("DEADLINE") == PER_CONNECTION
            for call in [stranger.stream_unary(SERVICE + "Open").future(silence()) for _ in range(60)]:
                assert status_class(call.exception(60)) == "UNAUTHENTICATED"
            silent = [
                villain.stream_unary(SERVICE + "Open").future(silence(), metadata=narrow.metadata) for _ in range(150)
            ]
            until(lambda: sum(call.done() for call in silent) == 50)
            assert {status_class(call.exception()) for call in silent if call.done()} == {"OVERLOADED"}
            narrow.witness.look()
            assert check(stranger)
            for call in silent:
                call.cancel()
    finally:
        ended.set()


def test_requests_beyond_what_these_services_have_to_say(narrow: Target) -> None:
    large = "x" * 3 * MEBIBYTE
    with narrow.unharmed(memory=96 * MEBIBYTE), connection(narrow) as stranger:
        for _ in range(20):
            with pytest.raises(grpc.RpcError) as caught:
                health_pb2_grpc.HealthStub(stranger).Check(health_pb2.HealthCheckRequest(service=large), timeout=60)
            assert status_class(caught.value) == "BAD_ARGUMENT"
        malformed = stranger.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError) as caught:
            malformed(b"\xff\xff", timeout=60)
        assert status_class(caught.value) == "BAD_ARGUMENT"


def test_reflection_answers_as_before(narrow: Target) -> None:
    with connection(narrow) as channel:
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked))
        names = {service.name for service in answer.list_services_response.service}
    assert {"starpod.v1.EnvironmentService", "grpc.health.v1.Health"} <= names


# --- connections ---------------------------------------------------------------------------------------------------


def flood(target: Target, count: int, address: str) -> list[socket.socket]:
    """Connections from an address that speak HTTP/2 and then say nothing."""
    connections = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            made = socket.create_connection(("127.0.0.1", target.server.port), source_address=(address, 0))
            made.sendall(PREFACE + SETTINGS)
            made.setblocking(False)
            connections.append(made)
    return connections


def alive(connections: list[socket.socket]) -> int:
    count = 0
    for each in connections:
        try:
            while each.recv(4096):
                pass
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count


def test_idle_connections_of_one_address_shut_nobody_out(narrow: Target) -> None:
    """Idle connections up to the limit used to block all others for as long as they stayed open."""
    with narrow.unharmed(memory=96 * MEBIBYTE):
        idle = flood(narrow, 500, "127.0.0.2")
        with connection(narrow) as channel:
            describe = EnvironmentServiceStub(channel).Describe
            assert describe(pb.DescribeRequest(), metadata=narrow.metadata, timeout=60, wait_for_ready=True).instance_id
        until(lambda: alive(idle) <= 60)
        narrow.witness.look()
        # Unused connections are closed in the end, even if there are few.
        until(lambda: alive(idle) == 0)
        for each in idle:
            each.close()


@pytest.mark.minutes
def test_4096_idle_connections_while_others_connect(target: Target) -> None:
    with target.unharmed(memory=256 * MEBIBYTE):
        idle = flood(target, 4096, "127.0.0.2")
        for _ in range(20):
            target.witness.look()
            with connection(target) as channel:
                assert check(channel)
        until(lambda: alive(idle) <= 1024)
        for each in idle:
            each.close()


def test_a_connection_with_a_stream_stays_where_its_address_has_too_many(narrow: Target) -> None:
    ended = threading.Event()
    renew = pb.StreamRequest(calls=[pb.Call(call_id=1, renew=pb.RenewRequest())])

    def requests() -> Iterator[pb.StreamRequest]:
        yield renew
        ended.wait(250)
        yield renew

    with narrow.unharmed(memory=96 * MEBIBYTE), connection(narrow) as channel:
        idle = flood(narrow, 58, "127.0.0.1")
        stream = EnvironmentServiceStub(channel).Stream(requests(), metadata=bearer(WITNESS))
        assert next(stream).replies[0].call_id == 1
        idle += flood(narrow, 100, "127.0.0.1")
        until(lambda: alive(idle) < 60)
        ended.set()
        assert next(stream).replies[0].call_id == 1
        for each in idle:
            each.close()
