"""A server as a whole: who may call it, what it reports about itself, and how it shuts down."""

import asyncio
import json
import logging
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from starpod.env_server.operation.config import HTTP, ServerConfig, ServerTLS
from starpod.env_server.registry import Registry
from starpod.env_server.server.listening import ServerError
from starpod.env_server.server.logs import JSONFormatter, TextFormatter
from starpod.env_server.server.server import EnvironmentServer
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.env_server.conftest import Client, Serve, Stream
from tests.env_server.troublesome import ALL
from tests.hostile.conftest import bearer
from tests.support import held_port
from tests.waiting import eventually


async def status(channel: grpc.aio.Channel, service: str = "walk-v1") -> str:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


async def test_health_per_environment_and_while_draining(serve: Serve) -> None:
    client = await serve(drain_seconds=60)
    services = ["", "starpod.v1.EnvironmentService", "walk-v1", "fragile-v1"]
    assert [await status(client.channel, service) for service in services] == ["SERVING"] * 4
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await status(client.channel, "nothing-v1")
    session = await client.open("walk-v1")
    draining = asyncio.create_task(client.server.drain())
    await eventually(lambda: client.server.worker.draining)
    assert [await status(client.channel, service) for service in services] == ["NOT_SERVING"] * 4
    assert (await client.ask("Describe")).draining
    failure = await client.fails(client.open("walk-v1"))
    assert (failure.code, failure.reason, failure.metadata["advice"]) == ("UNAVAILABLE", "DRAINING", "reopen")
    await client.step(session, 0, "Right")
    assert not draining.done()
    await client.close(session)
    await asyncio.wait_for(draining, 30)


async def test_drain_hands_sessions_back_when_its_time_is_up(serve: Serve) -> None:
    client = await serve(drain_seconds=0.2)
    await client.open("walk-v1")
    await asyncio.wait_for(client.server.drain(), 30)


async def test_drain_does_not_wait_for_lost_sessions(serve: Serve) -> None:
    client = await serve(drain_seconds=600)
    await client.fails(client.step(await client.open("walk-v1"), 0, "bug"))
    assert await client.live() == 1
    await asyncio.wait_for(client.server.drain(), 30)


async def test_reflection_shows_the_contract(client: Client) -> None:
    def services() -> list[str]:
        with grpc.insecure_channel(client.server.address) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert {"starpod.v1.EnvironmentService", "grpc.health.v1.Health"} <= set(await asyncio.to_thread(services))


async def test_tokens_keep_strangers_out_and_tenants_apart(serve: Serve, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# two tenants\nalpha-token\n\nbeta-token\n")
    client = await serve(token_file=tokens)
    request = pb.OpenRequest(environment_id="walk-v1", key="same")
    for metadata in ((), bearer("alpha"), bearer(""), (("authorization", "alpha-token"),)):
        for call in (
            client.stub.Open(request, metadata=metadata),
            client.stub.Describe(pb.DescribeRequest(), metadata=metadata),
            client.stub.Stream(metadata=metadata).read(),
        ):
            failure = await client.fails(call)
            assert (failure.code, failure.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
    alpha, beta = [
        (await client.stub.Open(request, metadata=bearer(f"{name}-token"))).sessions[0].session_id
        for name in ("alpha", "beta")
    ]
    assert alpha != beta
    step = pb.StepRequest(session_id=alpha, epoch=1, step_index=0, actions=[pb.Action(text="Right")])
    stranger = await client.fails(client.stub.Step(step, metadata=bearer("beta-token")))
    assert stranger.reason == "UNKNOWN_SESSION"
    await client.stub.Close(pb.CloseRequest(session_ids=[alpha]), metadata=bearer("beta-token"))
    await client.stub.Step(step, metadata=bearer("alpha-token"))


async def test_tls_and_mtls_and_a_health_port_that_needs_no_certificate(serve: Serve, tmp_path: Path) -> None:
    ca, stranger_ca = trustme.CA(), trustme.CA()
    both, authority = tmp_path / "both", tmp_path / "ca"
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(both))
    ca.cert_pem.write_to_path(str(authority))
    tls = await serve(tls=ServerTLS(both, both))
    with held_port() as port:
        mtls = await serve(tls=ServerTLS(both, both, client_ca=authority), health_port=port)

    async def describe(client: Client, issuer: trustme.CA | None) -> str:
        key = chain = None
        if issuer:
            own = issuer.issue_cert("client")
            key, chain = own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes()
        credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes(), key, chain)
        async with grpc.aio.secure_channel(client.server.address, credentials) as channel:
            try:
                return (await EnvironmentServiceStub(channel).Describe(pb.DescribeRequest(), timeout=30)).server_name
            except grpc.aio.AioRpcError as error:
                return error.code().name

    assert [await describe(tls, None), await describe(mtls, ca)] == ["starpod"] * 2
    assert [await describe(mtls, None), await describe(mtls, stranger_ca)] == ["UNAVAILABLE"] * 2
    with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
        await tls.stub.Describe(pb.DescribeRequest(), timeout=30)  # without TLS
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await status(channel) == "SERVING"
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):  # health, and nothing else
            await EnvironmentServiceStub(channel).Describe(pb.DescribeRequest())
        await mtls.server.drain()
        assert await status(channel) == "NOT_SERVING"


@pytest.mark.parametrize("option", ["port", "health_port", "metrics_port", "http"])
async def test_a_port_in_use_stops_the_start(client: Client, option: str) -> None:
    port = client.server.port
    config: dict[str, Any] = {"port": 0, option: HTTP(port) if option == "http" else port}
    server = EnvironmentServer(Registry(ALL), ServerConfig(**config))
    named = option.replace("_", "-")
    with pytest.raises(ServerError, match=f"^port {port} of 127.0.0.1 is in use; choose another --{named}$"):
        await server.start()
    await server.stop()


async def test_missing_tls_files_stop_the_start(tmp_path: Path) -> None:
    tls = ServerTLS(tmp_path / "no", tmp_path / "none")
    for problem in (r"cannot read the TLS file .*/none: No such file", "must be PEM"):
        with pytest.raises(ServerError, match=problem):
            await EnvironmentServer(Registry(ALL), ServerConfig(port=0, tls=tls)).start()
        (tmp_path / "none").write_text("no key")
        (tmp_path / "no").write_text("no certificate")


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True)])
def test_tokens_in_the_clear_are_warned_of(
    host: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokens").write_text("0123456789abcdef")
    EnvironmentServer(Registry(ALL), ServerConfig(host=host, token_file=tmp_path / "tokens"))
    assert ("tokens are sent unencrypted" in caplog.text) == warned


async def test_metrics_count_what_happened(serve: Serve) -> None:
    with held_port() as port:
        client = await serve(metrics_port=port)
    families = {family.name: family for family in client.server.metrics.collect()}
    for name in ("live_sessions", "sessions_opened", "sessions_reaped", "sessions_lost"):  # all begin with zero
        values = {sample.labels["environment"]: sample.value for sample in families[f"starpod_{name}"].samples}
        assert values == dict.fromkeys(client.server.worker.registry.ids, 0)
    session, gone, broken = [await client.open("walk-v1") for _ in range(3)]
    for index in range(3):
        await client.step(session, index, "Right")
    await Stream(client).ask(*((session, index, "Right") for index in range(3, 43)))
    await client.fails(client.step(gone, 9, "Right"))
    await client.fails(client.step(broken, 0, "bug"))
    client.table[gone.session_id].last_call -= 1000
    await eventually(lambda: gone.session_id not in client.table)
    url = f"http://127.0.0.1:{port}/metrics"
    text = (await asyncio.to_thread(lambda: urllib.request.urlopen(url).read())).decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    walk = '{environment="walk-v1"}'
    assert float(values[f"starpod_step_seconds_sum{walk}"]) > 0
    expected = {
        f"starpod_step_seconds_count{walk}": 43,
        f"starpod_sessions_opened_total{walk}": 3,
        f"starpod_sessions_reaped_total{walk}": 1,
        f"starpod_sessions_lost_total{walk}": 1,
        'starpod_errors_total{method="Step",reason="OUT_OF_ORDER"}': 1,
        'starpod_errors_total{method="Step",reason="ENVIRONMENT_BUG"}': 1,
        "starpod_streams": 1,
        "starpod_calls_in_flight": 0,
    }
    assert {name: float(values[name]) for name in expected} == expected


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that arrive."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    async def Export(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802 - named as in the proto
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [(span.name, span.trace_id.hex()) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_continue_the_callers_trace(serve: Serve) -> None:
    collector, backend = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, backend)
    port = backend.add_insecure_port("127.0.0.1:0")
    await backend.start()
    client = await serve(otlp_endpoint=f"127.0.0.1:{port}")
    trace = "0af7651916cd43dd8448eb211c80319c"
    metadata = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
    await client.stub.Describe(pb.DescribeRequest(), metadata=metadata)
    await asyncio.to_thread(client.server._tracer.close)
    await backend.stop(None)
    assert collector.spans == [("starpod.v1.EnvironmentService/Describe", trace)]


def test_logs_are_lines_or_objects() -> None:
    record = logging.makeLogRecord({"msg": "session %s", "args": ("lost",), "levelname": "WARNING", "session": "abc"})
    entry = json.loads(JSONFormatter().format(record))
    assert (entry["level"], entry["message"], entry["session"]) == ("warning", "session lost", "abc")
    assert TextFormatter().format(record).endswith("WARNING session lost  [session=abc]")
