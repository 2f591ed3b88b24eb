"""What goes with the service: health, reflection, tokens, trace context."""

from __future__ import annotations

import math

import grpc

from starpod.client.check.link import SERVICE
from starpod.client.check.probe import Probe
from starpod.client.check.refusal import from_error
from starpod.client.check.requirement import NotShown, Unmet, expect, must, should
from starpod.client.server_timing import find_server_timing, parse_server_timing
from starpod.v1 import environment_pb2 as pb

SERVING = b"\x08\x01"
"""A grpc.health.v1.HealthCheckResponse, written by hand so that the check needs no health package."""
LIST_SERVICES = b"\x3a\x00"
"""A ServerReflectionRequest with an empty list_services, likewise."""


@must(
    "C-93",
    "grpc.health.v1 answers SERVING for the empty service name and for every environment id, NOT_FOUND for others.",
)
async def health(probe: Probe) -> None:
    for service in ("", probe.spec.id):
        try:
            reply = await _health(probe, service)
        except grpc.aio.AioRpcError as error:
            raise Unmet(
                f"SERVING for the service {service!r}", str(from_error(error)), "serve grpc.health.v1"
            ) from error
        expect(reply == SERVING, f"SERVING for the service {service!r}", reply)
    try:
        reply = await _health(probe, "no_such_environment-v1")
    except grpc.aio.AioRpcError as error:
        expect(error.code() == grpc.StatusCode.NOT_FOUND, "NOT_FOUND for an unknown service", from_error(error))
    else:
        raise Unmet("NOT_FOUND for an unknown service", str(reply))


@should("C-94", "Server reflection lists starpod.v1.EnvironmentService.")
async def reflection(probe: Probe) -> None:
    reasons = []
    for version in ("v1", "v1alpha"):
        path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        call = probe.link.channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)(
            iter([LIST_SERVICES]), timeout=probe.link.seconds, metadata=probe.link.metadata
        )
        try:
            async for reply in call:
                if SERVICE.encode() in reply:
                    return
                reasons.append(f"{version} lists others")
        except grpc.aio.AioRpcError as error:
            reasons.append(f"{version}: {from_error(error)}")
    raise Unmet(f"reflection to list {SERVICE}", "; ".join(reasons), "enable server reflection")


@must("C-95", "A server that wants a bearer token refuses a call without it, or with another, as UNAUTHENTICATED.")
async def token(probe: Probe) -> None:
    if not probe.link.access.token:
        raise NotShown("no token was given")
    for metadata in ((), (("authorization", "Bearer wrong"),), (("authorization", probe.link.access.token),)):
        try:
            await probe.link.raw(f"/{SERVICE}/Describe", b"", metadata=metadata)
        except grpc.aio.AioRpcError as error:
            fine = error.code() == grpc.StatusCode.UNAUTHENTICATED
            expect(fine, f"UNAUTHENTICATED with {metadata or 'no token'}", from_error(error))
        else:
            raise Unmet(f"UNAUTHENTICATED with {metadata or 'no token'}", "OK", "check `authorization: Bearer TOKEN`")


@must("C-96", "Trace context in the metadata, well-formed or not, changes no reply.")
async def trace_context(probe: Probe) -> None:
    request = pb.DescribeRequest(environment_id=probe.spec.id).SerializeToString()
    for parent in ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "nonsense"):
        metadata = (*probe.link.metadata, ("traceparent", parent), ("tracestate", "a=b"))
        try:
            await probe.link.raw(f"/{SERVICE}/Describe", request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise Unmet(f"Describe to be served with traceparent {parent!r}", str(from_error(error))) from error


@must(
    "C-97",
    "A server-timing trailer, where there is one, has the form of the header; its durations are not negative and none"
    " is above total.",
)
async def timing_trailer(probe: Probe) -> None:
    handle = await probe.seeded()
    shown = False
    for request in (handle.request(), handle.request(ahead=5)):
        text = find_server_timing(await probe.link.trailer("Step", request))
        if not text:
            continue
        shown = True
        try:
            durations = parse_server_timing(text)
        except ValueError as error:
            raise Unmet("environment;dur=0.2, queue;dur=0.1, total;dur=0.3", f"{text!r}: {error}") from error
        total = durations.get("total", math.inf) + 1e-3  # they are rounded
        own = {name: durations.get(name, 0.0) for name in ("environment", "queue")}
        expect(max(own.values()) <= total, "environment and queue within total", repr(text), "count from the arrival")
    if not shown:
        raise NotShown("the server sends no server-timing")


async def _health(probe: Probe, service: str) -> bytes:
    name = service.encode()
    return await probe.link.raw("/grpc.health.v1.Health/Check", b"\x0a" + bytes([len(name)]) + name if name else b"")
