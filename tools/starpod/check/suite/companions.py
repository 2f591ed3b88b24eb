"""Health, reflection, tokens and trace context."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import grpc

from starpod.check.expectations import Unmet, expect, expect_informed, expect_played, needs
from starpod.check.grpc_connection import SERVICE, over_grpc
from starpod.check.probe import Probe
from starpod.check.refusal import from_error
from starpod.check.requirement import must, should
from starpod.client.server_timing import find_server_timing, parse_server_timing
from starpod.v1 import environment_pb2 as pb

LIST_SERVICES = b"\x3a\x00"
"""A serialized ServerReflectionRequest with an empty list_services, so that the check needs no other package."""
CAPABILITY_OF = {"Fork": "fork", "Snapshot": "snapshot", "Restore": "snapshot"}
"""Capability that each optional method belongs to. A server without the capability may lack the method."""
PING_SECONDS, SILENT_SECONDS = 10.0, 75.0


@must(
    "C-93",
    "grpc.health.v1 answers SERVING for the empty service name and for every environment id, NOT_FOUND for others.",
)
async def check_health(probe: Probe) -> None:
    for service in ("", probe.spec.id):
        try:
            serving = await probe.connection.serving(service)
        except grpc.aio.AioRpcError as error:
            got, fix = str(from_error(error)), "serve grpc.health.v1"
            raise Unmet(f"SERVING for the service {service!r}", got, fix) from error
        expect(serving, f"SERVING for the service {service!r}", "another status")
    try:
        await probe.connection.serving("no_such_environment-v1")
    except grpc.aio.AioRpcError as error:
        expect(error.code() == grpc.StatusCode.NOT_FOUND, "NOT_FOUND for an unknown service", from_error(error))
    else:
        raise Unmet("NOT_FOUND for an unknown service", "a status")


@should("C-94", "Server reflection lists starpod.v1.EnvironmentService.")
async def check_reflection(probe: Probe) -> None:
    connection, reasons = over_grpc(probe.connection), []
    for version in ("v1", "v1alpha"):
        path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        call = connection.channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)(
            iter([LIST_SERVICES]), timeout=connection.seconds, metadata=connection.metadata
        )
        try:
            async for reply in call:
                if SERVICE.encode() in reply:
                    return
                reasons.append(f"{version} lists others")
        except grpc.aio.AioRpcError as error:
            reasons.append(f"{version}: {from_error(error)}")
    raise Unmet(f"reflection to list {SERVICE}", "; ".join(reasons), "enable server reflection")


@must("C-95", "A server that requires a bearer token refuses calls without it, or with another, as UNAUTHENTICATED.")
async def check_token(probe: Probe) -> None:
    needs(probe.connection.metadata, "no token was given")
    token = probe.connection.metadata[0][1].removeprefix("Bearer ")
    absent_capabilities = {name for name in ("fork", "snapshot") if not _any_environment_has(probe, name)}
    methods = [method for method in probe.connection.methods if CAPABILITY_OF.get(method) not in absent_capabilities]
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", token),)):
        for method in methods:
            try:
                await probe.connection.call(getattr(pb, f"{method}Request")(), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                _expect_unauthenticated(error, f"{method} with {metadata or 'no token'}")
            else:
                fix = "check `authorization: Bearer TOKEN` before every call"
                raise Unmet(f"UNAUTHENTICATED from {method} with {metadata or 'no token'}", "OK", fix)
        if probe.server.capabilities.stream:
            await _expect_no_stream(probe, metadata)


async def _expect_no_stream(probe: Probe, metadata: Sequence[tuple[str, str]]) -> None:
    """Expect a Stream without the right token to be refused.

    Most servers refuse the Stream before any call is sent, and writing to a Stream that has just ended would hide its
    status. Each try therefore waits before it sends a call: 1 s in the first try, then 2 s, then 4 s.
    """
    expected, got = f"UNAUTHENTICATED from Stream with {metadata or 'no token'}", ""
    for seconds in (1.0, 2.0, 4.0):
        stream = over_grpc(probe.connection).stub.Stream(metadata=tuple(metadata), timeout=probe.connection.seconds)
        reading = asyncio.ensure_future(stream.read())
        try:
            await asyncio.wait({reading}, timeout=seconds)
            if not reading.done():
                await stream.write(pb.StreamRequest(calls=[pb.Call(call_id=1, renew=pb.RenewRequest())]))
            reply = await reading
        except asyncio.InvalidStateError:
            got = "its end"
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.INTERNAL:
                _expect_unauthenticated(error, f"Stream with {metadata or 'no token'}")
                return
            got = str(from_error(error))
        else:
            raise Unmet(expected, str(reply).strip() or "its end")
        finally:
            reading.cancel()
            stream.cancel()
    raise Unmet(expected, got)


def _any_environment_has(probe: Probe, capability: str) -> bool:
    return any(getattr(spec.capabilities, capability) for spec in probe.server.environments)


def _expect_unauthenticated(error: grpc.aio.AioRpcError, what: str) -> None:
    refusal = from_error(error)
    expect(refusal.code == "UNAUTHENTICATED", f"UNAUTHENTICATED from {what}", refusal)
    expect_informed(refusal, "UNAUTHENTICATED", f"UNAUTHENTICATED from {what}")


@must("C-96", "Trace context, well-formed or not, changes no reply.")
async def check_trace_context(probe: Probe) -> None:
    script = probe.target.script()
    for parent in ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "nonsense"):
        handle = await probe.seeded()
        metadata = (*probe.connection.metadata, ("traceparent", parent), ("tracestate", "a=b"))
        transitions = []
        for turn in script.turns:
            try:
                reply = await probe.connection.call(handle.request(turn), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise Unmet(f"a Step to be served with traceparent {parent!r}", str(from_error(error))) from error
            transitions.append(reply.transition)
            handle.index += 1
        expect_played(script.transitions, transitions, f"the episode with traceparent {parent!r}")


@must(
    "C-97",
    "A server-timing trailer has the form of the header; its durations are not negative and none is above total.",
)
async def check_timing_trailer(probe: Probe) -> None:
    handle = await probe.seeded()
    has_timing = False
    for request in (handle.request(), handle.request(ahead=5)):
        text = find_server_timing(await probe.connection.trailer(request))
        if not text:
            continue
        has_timing = True
        try:
            durations = parse_server_timing(text)
        except ValueError as error:
            raise Unmet("environment;dur=0.2, queue;dur=0.1, total;dur=0.3", f"{text!r}: {error}") from error
        total = durations.get("total", math.inf) + 1e-3  # the durations are rounded
        parts = {name: durations.get(name, 0.0) for name in ("environment", "queue")}
        expect(max(parts.values()) <= total, "environment and queue within total", repr(text), "count from the arrival")
    needs(has_timing, "the server sends no server-timing")


@must(
    "C-98",
    "The server accepts a ping every 10 seconds on an idle connection with an open Stream.",
    slow=SILENT_SECONDS,
)
async def check_pings(probe: Probe) -> None:
    needs(probe.server.capabilities.stream, "the server does not declare stream")
    pings = (("grpc.keepalive_time_ms", int(1000 * PING_SECONDS)), ("grpc.http2.max_pings_without_data", 0))
    connection = over_grpc(probe.second_connection(options=pings))
    stream = connection.stub.Stream(metadata=connection.metadata)
    try:
        await stream.write(pb.StreamRequest())
        reply = await asyncio.wait_for(stream.read(), SILENT_SECONDS)
    except TimeoutError:
        return
    except grpc.aio.AioRpcError as error:
        expected = f"a silent Stream to live with a ping every {PING_SECONDS:g} s"
        fix = "allow them in the server: grpc.http2.min_ping_interval_without_data_ms = 5000"
        raise Unmet(expected, str(from_error(error)), fix) from error
    finally:
        stream.cancel()
    raise Unmet("silence on a Stream without calls", str(reply).strip() or "its end")
