"""Tokens and quotas: wrong, expired and withdrawn tokens, limits per token, and TLS downgrades."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import trustme

from starpod.env_server.episodes.errors import CallError
from starpod.env_server.operation.config import ServerConfig, ServerTLS
from starpod.env_server.operation.tenants import Quota, Tenant
from starpod.env_server.registry import Registry
from starpod.env_server.server.server import EnvironmentServer
from starpod.env_server.transports import auth
from starpod.env_server.transports.auth import Authenticator, TokenFileError
from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, Failure, Serve, failure_of, read_status
from tests.env_server.conftest import serve as serve
from tests.env_server.troublesome import ALL
from tests.hostile.conftest import MEBIBYTE, Target, bearer, status_class


def opening(**fields: object) -> pb.OpenRequest:
    return pb.OpenRequest(environment_id="walk-v1", **{"seed": 1, **fields})  # type: ignore[arg-type]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(2400):
        if await condition():
            return
        await asyncio.sleep(0.025)
    raise AssertionError("it never came to that")


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer(""),
        bearer("x"),
        bearer("villain-token-012345678"),
        bearer("villain-token-0123456789 "[::-1]),
        bearer("VILLAIN-TOKEN-0123456789"),
        (("authorization", "Basic dmlsbGFpbg=="),),
        (("authorization", "villain-token-0123456789"),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer " + "x" * 4000),),
        (("authorization", "Bearer \x7e'\" OR 1=1 --"),),
        (("authorization-bin", b"Bearer villain-token-0123456789"),),
    ],
    ids=str,
)
def test_wrong_tokens(target: Target, metadata: tuple[tuple[str, str], ...]) -> None:
    with target.unharmed():
        for call in (
            lambda: target.stub.Describe(pb.DescribeRequest(), metadata=metadata),
            lambda: target.stub.Open(opening(), metadata=metadata),
            lambda: target.raw("Step")(b"\xff", metadata=metadata),
            lambda: list(target.stub.Stream(iter([pb.StreamRequest()]), metadata=metadata)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert status_class(caught.value) == "UNAUTHENTICATED"
            assert "villain" not in str(caught.value.details())


def test_a_stranger_cannot_make_the_server_read_what_he_sends(target: Target) -> None:
    """A hundred times the largest message, refused by its headers: what comes is no more than windows hold."""
    body = pb.OpenRequest(environment_id="x" * (4 * MEBIBYTE - 100)).SerializeToString()
    with target.unharmed(memory=160 * MEBIBYTE):
        calls = [target.channel.unary_unary("/starpod.v1.EnvironmentService/Open").future(body) for _ in range(100)]
        for call in calls:
            assert status_class(call.exception()) == "UNAUTHENTICATED"


async def test_an_expired_token_ends_calls_and_streams(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    (tmp_path / "tokens").write_text(
        f"short-lived expires={soon.isoformat()}\nlong-lived name=other\nold expires=2020-01-01\n"
    )
    client = await serve(token_file=tmp_path / "tokens")
    assert (await client.fails(client.stub.Open(opening(), metadata=bearer("old")))).reason == "UNAUTHENTICATED"
    await client.stub.Open(opening(), metadata=bearer("short-lived"))
    stream = client.stub.Stream(metadata=bearer("short-lived"))
    await stream.write(pb.StreamRequest(calls=[pb.Call(call_id=1, renew=pb.RenewRequest())]))
    assert (await stream.read()).replies[0].call_id == 1

    monkeypatch.setattr(auth, "time", SimpleNamespace(time=lambda: time.time() + 3601))
    describe = client.stub.Describe(pb.DescribeRequest(), metadata=bearer("short-lived"))
    assert (await client.fails(describe)).reason == "UNAUTHENTICATED"
    await stream.write(pb.StreamRequest(calls=[pb.Call(call_id=2, renew=pb.RenewRequest())]))
    assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
    await client.stub.Describe(pb.DescribeRequest(), metadata=bearer("long-lived"))


async def test_tokens_change_while_the_server_runs(serve: Serve, tmp_path: Path) -> None:
    """A tenant with a name keeps his sessions under his next token; a withdrawn token ends calls and streams."""
    tokens = tmp_path / "tokens"
    tokens.write_text("first-token name=team\nother-token\n")
    client = await serve(token_file=tokens)
    session = (await client.stub.Open(opening(), metadata=bearer("first-token"))).sessions[0]
    other = (await client.stub.Open(opening(), metadata=bearer("other-token"))).sessions[0]
    stream = client.stub.Stream(metadata=bearer("first-token"))
    renewal = pb.RenewRequest(session_ids=[session.session_id])
    await stream.write(pb.StreamRequest(calls=[pb.Call(call_id=1, renew=renewal)]))
    assert (await stream.read()).replies[0].call_id == 1  # it was let in before the tokens change
    tokens.write_text("second-token name=team sessions=1\nother-token\n")

    async def renewed(token: str, session: pb.Session) -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            call = client.stub.Renew(pb.RenewRequest(session_ids=[session.session_id]), metadata=bearer(token))
            return not (await call).missing
        return False

    await until(lambda: renewed("second-token", session))
    assert await renewed("other-token", other)
    assert not await renewed("first-token", session)
    await stream.write(pb.StreamRequest())
    assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
    refused = await client.fails(client.stub.Open(opening(), metadata=bearer("second-token")))
    assert refused.metadata["limit"] == "token_sessions"  # the session from before counts
    # A file that cannot be used changes nothing, least of all to no tokens at all.
    for broken in ("", "a b=c\n", "x sessions=-1\n"):
        tokens.write_text(broken)
        client.server._authenticator.reload()
        assert await renewed("second-token", session)
        assert (await client.fails(client.stub.Open(opening()))).reason == "UNAUTHENTICATED"
    tokens.unlink()
    client.server._authenticator.reload()
    assert await renewed("second-token", session)


async def test_sessions_of_a_token_are_bounded(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("small name=small sessions=3\nlarge\n")
    client = await serve(token_file=tmp_path / "tokens", quota=Quota(sessions=5))
    small = (await client.stub.Open(opening(count=2), metadata=bearer("small"))).sessions

    async def refused(call: Awaitable[object]) -> None:
        failure = await client.fails(call)
        assert (failure.code, failure.reason, failure.metadata["limit"], failure.metadata["advice"]) == (
            "RESOURCE_EXHAUSTED",
            "OVERLOADED",
            "token_sessions",
            "retry",
        )
        assert failure.retry_after

    snapshot = await client.stub.Snapshot(pb.SnapshotRequest(session_id=small[0].session_id), metadata=bearer("small"))
    place = {"session_id": small[0].session_id, "epoch": 1}
    await refused(client.stub.Open(opening(count=2), metadata=bearer("small")))
    await refused(client.stub.Fork(pb.ForkRequest(**place, count=2), metadata=bearer("small")))  # type: ignore[arg-type]
    await refused(client.stub.Restore(pb.RestoreRequest(snapshot=snapshot.snapshot, count=2), metadata=bearer("small")))
    await client.stub.Open(opening(count=5), metadata=bearer("large"))
    await refused(client.stub.Open(opening(), metadata=bearer("large")))
    # One that is closed, and one that never came to be, make room again.
    failed = client.stub.Open(
        pb.OpenRequest(environment_id="searched-v1", options={"findable": False}), metadata=bearer("small")
    )
    assert (await client.fails(failed)).reason == "BAD_ARGUMENT"
    await client.stub.Close(pb.CloseRequest(session_ids=[small[0].session_id]), metadata=bearer("small"))
    await client.stub.Open(opening(count=2), metadata=bearer("small"))
    text = "\n".join(str(family) for family in client.server.metrics.collect() if "tenant" in family.name)
    assert re.search(r"'tenant': 'small', 'limit': 'token_sessions'\}, value=3", text)
    assert re.search(r"starpod_tenant_sessions', labels=\{'tenant': 'small'\}, value=3", text)
    assert re.search(r"starpod_tenant_sessions', labels=\{'tenant': 'unnamed'\}, value=5", text)
    assert "large" not in text  # an unnamed token is nowhere


async def test_calls_per_second_of_a_token_are_bounded(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("slow calls-per-second=40\nfast\n")
    client = await serve(token_file=tmp_path / "tokens")
    session = (await client.stub.Open(opening(), metadata=bearer("slow"))).sessions[0]
    renewal = pb.RenewRequest(session_ids=[session.session_id])

    async def until_refused() -> Failure:
        for _ in range(1000):
            try:
                await client.stub.Renew(renewal, metadata=bearer("slow"))
            except grpc.aio.AioRpcError as error:
                return failure_of(error)
        raise AssertionError("never refused")

    failure = await until_refused()
    assert (failure.reason, failure.metadata["limit"]) == ("OVERLOADED", "token_calls_per_second")
    assert failure.retry_after is not None
    assert 0 < failure.retry_after <= 0.2
    for _ in range(50):
        await client.stub.Renew(renewal, metadata=bearer("fast"))
    # On a stream each call of a batch is refused by itself; who waits as told is served.
    calls = [pb.Call(call_id=number, renew=renewal) for number in range(3)]
    stream = client.stub.Stream(metadata=bearer("slow"))
    answered = 0
    for _ in range(30):
        await stream.write(pb.StreamRequest(calls=calls))
        replies = (await stream.read()).replies
        if replies[0].HasField("error"):
            refusals = [read_status(reply.error) for reply in replies]
            assert [refusal.metadata["limit"] for refusal in refusals] == ["token_calls_per_second"] * 3
            await asyncio.sleep(refusals[0].retry_after or 0)
        else:
            answered += 1
    assert answered
    stream.cancel()


async def test_streams_of_a_token_and_of_a_server_are_bounded(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("small streams=2\nlarge\n")
    client = await serve(token_file=tmp_path / "tokens")
    held = [client.stub.Stream(metadata=bearer("small")) for _ in range(2)]
    for stream in held:
        await stream.write(pb.StreamRequest(calls=[pb.Call(call_id=1)]))
        await stream.read()
    refused = client.stub.Stream(metadata=bearer("small"))
    assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "all 2 streams of this token are connected" in await refused.details()
    other = client.stub.Stream(metadata=bearer("large"))
    await other.write(pb.StreamRequest(calls=[pb.Call(call_id=1)]))
    await other.read()
    held[0].cancel()

    async def room() -> bool:
        stream = client.stub.Stream(metadata=bearer("small"))
        await stream.done_writing()
        return await stream.code() is grpc.StatusCode.OK

    await until(room)


def test_a_tenants_rate_is_what_it_says() -> None:
    """Whatever the pattern, no more than the rate times the time, one second's worth and one batch."""
    tenant = Tenant("t", quota=Quota(calls_per_second=1000))
    started, taken = time.monotonic(), 0
    while taken < 1000 or time.monotonic() - started < 0.2:
        with contextlib.suppress(CallError):
            tenant.take_calls(7)
            taken += 7
    assert taken <= 1000 + 1000 * (time.monotonic() - started) + 7
    assert taken >= 1000


@pytest.mark.parametrize(("before", "debt"), [("", 0), ("calls-per-second=1000", 99)])
def test_a_rate_that_a_reload_brings_starts_without_a_debt_of_calls(tmp_path: Path, before: str, debt: int) -> None:
    """100,000 calls owe nothing where they had no limit, and 99 seconds at any rate after one of 1,000 per second."""
    (tmp_path / "tokens").write_text(f"secret {before}\n")
    authenticator = Authenticator(tmp_path / "tokens")
    tenant = authenticator.identify(bearer("secret")).tenant
    tenant.take_calls()
    tenant.charge(99_999)
    (tmp_path / "tokens").write_text("secret calls-per-second=2\n")
    authenticator.reload()
    try:
        tenant.take_calls()
        wait = 0.0
    except CallError as refused:
        wait = refused.retry_after or 0.0
    assert debt / 2 <= wait <= debt


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("secret-token sessions=x", "bad setting 'sessions'"),
        ("secret-token sessions=-1", "0 (no limit) or more"),
        ("secret-token calls-per-second=nan", "0 (no limit) or more"),
        ("secret-token calls-per-second=inf", "0 (no limit) or more"),
        ("secret-token expires=tomorrow", "bad setting 'expires'"),
        ("secret-token secret-token", "use name="),
        ("secret-token name=", "use name="),
        ("secret-token\nsecret-token name=b", "the same token as in an earlier line"),
        ("secret-token name=a sessions=1\nb name=a sessions=2", "has other limits in an earlier line"),
        ("# none\n", "holds no token"),
    ],
)
def test_token_files_that_cannot_be_used_say_so_without_the_token(tmp_path: Path, line: str, problem: str) -> None:
    (tmp_path / "tokens").write_text(line)
    with pytest.raises(TokenFileError, match=re.escape(problem)) as caught:
        Authenticator(tmp_path / "tokens")
    assert "token secret" not in str(caught.value)
    assert not re.search(r"'secret-token'?$", str(caught.value))


def test_a_token_file_that_is_no_text_or_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"\xff\xfe\0")
    for name, problem in (("tokens", "is not text"), ("missing", "cannot read")):
        with pytest.raises(TokenFileError, match=problem):
            Authenticator(tmp_path / name)


# --- TLS ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def tls_server(tmp_path: Path) -> AsyncIterator[tuple[EnvironmentServer, trustme.CA]]:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    for blob in issued.cert_chain_pems:
        blob.write_to_path(tmp_path / "chain.pem", append=True)
    tls = ServerTLS(tmp_path / "chain.pem", tmp_path / "key.pem")
    server = EnvironmentServer(Registry(ALL), ServerConfig(port=0, tls=tls))
    await server.start()
    yield server, authority
    await server.stop(0)


async def test_plaintext_on_a_tls_port(tls_server: tuple[EnvironmentServer, trustme.CA]) -> None:
    server, authority = tls_server
    async with grpc.aio.insecure_channel(server.address) as channel:
        client = Client(server, channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.stub.Describe(pb.DescribeRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 100, b"\0" * 1000):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(garbage)
        with contextlib.suppress(ConnectionError):
            assert b"grpc" not in await asyncio.wait_for(reader.read(1000), 60)
        writer.close()
    async with secure_channel(server, authority) as channel:
        assert (await Client(server, channel).stub.Describe(pb.DescribeRequest())).instance_id


def secure_channel(server: EnvironmentServer, authority: trustme.CA) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(server.address, grpc.ssl_channel_credentials(authority.cert_pem.bytes()))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2])
async def test_old_versions_of_tls(tls_server: tuple[EnvironmentServer, trustme.CA], version: ssl.TLSVersion) -> None:
    server, authority = tls_server

    def shake_hands() -> str | None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(context)
        context.set_alpn_protocols(["h2"])
        context.minimum_version = context.maximum_version = version
        context.set_ciphers("ALL:@SECLEVEL=0")  # else our own side would refuse
        with socket.create_connection(("127.0.0.1", server.port), 60) as plain:
            return context.wrap_socket(plain, server_hostname="127.0.0.1").version()

    if version is ssl.TLSVersion.TLSv1_2:
        assert await asyncio.to_thread(shake_hands) == "TLSv1.2"
    else:
        with pytest.raises((ssl.SSLError, ConnectionError), match=r"(?i)protocol.version|alert|reset|closed|eof"):
            await asyncio.to_thread(shake_hands)
