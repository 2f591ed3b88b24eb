"""Hostile HTTP: what is no request, too much of one, or one that never ends; and the work per byte of a body."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from starpod.env_server.operation.config import HTTP, ServerConfig, ServerLimits
from starpod.env_server.registry import Registry
from starpod.env_server.server.server import EnvironmentServer
from starpod.env_server.transports import admission
from tests.env_server.troublesome import Walk
from tests.hostile.conftest import (
    KEPT_MIB,
    MEASUREMENTS,
    MEBIBYTE,
    VILLAIN,
    Target,
    http_url,
    kept_memory,
    memory_of,
    units_allowed,
    units_worked,
    until,
)
from tests.support import ServerProcess

OPEN = "/v1/sessions:open"
JSON = "content-type: application/json"
TOKEN = f"authorization: Bearer {VILLAIN}"


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def request(path: str, *headers: str, verb: str = "POST", host: str = "127.0.0.1", body: bytes = b"") -> bytes:
    lines = [f"{verb} {path} HTTP/1.1", f"host: {host}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answer(url: str, data: bytes) -> tuple[int, bytes]:
    """The status and the rest of what comes for these bytes; 0 if the connection is closed without a word."""
    with socket.create_connection(address_of(url), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        received = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65_536):
                received += chunk
                head, blank, body = received.partition(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                if blank and lengths and len(body) >= int(lengths[0].partition(b":")[2]):
                    break
    return (int(received.split()[1]), received) if received else (0, b"")


def sized(body: bytes, *headers: str, path: str = OPEN) -> bytes:
    return request(path, JSON, TOKEN, f"content-length: {len(body)}", *headers, body=body)


DEEP, WIDE = b"[" * 100_000 + b"]" * 100_000, b'{"a":[' + b"1," * 30_000 + b"1]}"
REFUSED: dict[str, tuple[int, bytes]] = {
    "no token": (401, request(OPEN, JSON, "content-length: 2", body=b"{}")),
    "no content type": (415, request(OPEN, TOKEN, "content-length: 2", body=b"{}")),
    "a form, as any page may send": (
        415,
        request(OPEN, TOKEN, "content-type: text/plain", "content-length: 2", body=b"{}"),
    ),
    **{
        header: (415, sized(b"{}", header))
        for header in (
            "content-encoding: gzip",
            "content-encoding: identity, br",
            "content-encoding: deflate\r\ncontent-encoding: identity",
            "content-type: application/json; charset=latin-1",
            'content-type: application/json; charset="utf-16"; charset=utf-8',
        )
    },
    "no length": (411, request(OPEN, JSON, TOKEN)),
    "chunks": (411, request(OPEN, JSON, TOKEN, "transfer-encoding: chunked", body=b"1\r\n{\r\n" * 20_000)),
    "a length beyond the limit, and no body": (413, request(OPEN, JSON, TOKEN, f"content-length: {10**12}")),
    "a body beyond the limit": (413, sized(b" " * (5 * MEBIBYTE))),
    "options beyond the limit": (400, sized(b'{"environment_id":"' + b"x" * MEBIBYTE + b'"}')),
    "a length that is none": (400, request(OPEN, JSON, TOKEN, "content-length: -5")),
    "a length of 4,302 digits": (400, request(OPEN, JSON, TOKEN, f"content-length: {2:04302}", body=b"{}")),
    "two lengths": (400, request(OPEN, JSON, TOKEN, "content-length: 2", "content-length: 3", body=b"{}x")),
    "a length and chunks": (
        400,
        request(OPEN, JSON, TOKEN, "content-length: 4", "transfer-encoding: chunked", body=b"0\r\n\r\n"),
    ),
    "nesting": (400, sized(b'{"options":{"a":' + DEEP + b"}}")),
    "nesting of objects": (400, sized(b'{"options":' * 20_000 + b"{}" + b"}" * 20_000)),
    "many values": (400, sized(b'{"options":' + WIDE + b"}")),
    "many actions": (400, sized(b'{"actions":[' + b"{}," * 30_000 + b"{}]}", path="/v1/sessions/x:step")),
    "a number of many digits": (400, sized(b'{"seed":' + b"9" * 60_000 + b"}")),
    "no JSON": (400, sized(b"\xff\xfe{}")),
    "a list": (400, sized(b"[1]")),
    "an unfinished string": (400, sized(b'{"environment_id":"' + b"," * 20_000 + b'\\"' * 20_000)),
    "the name of another site": (421, request(OPEN, JSON, TOKEN, "content-length: 2", host="evil.example", body=b"{}")),
    "its name with a port": (421, request("/v1/environments", TOKEN, verb="GET", host="evil.example:80")),
    "another path": (404, request("/v1/../etc/passwd", TOKEN, verb="GET")),
    "another verb": (405, request(OPEN, TOKEN, verb="DELETE")),
    "no HTTP": (400, b"\x16\x03\x01\x00\xa5\x01\x00\x00" * 100),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(target: Target, name: str) -> None:
    status, data = REFUSED[name]
    with target.unharmed():
        got, reply = answer(target.url, data)
        assert got == status, reply[:2000]
        assert b"Traceback" not in reply


def test_names_of_this_server(target: Target) -> None:
    for host in ("127.0.0.1:1", "localhost:99", "LOCALHOST", "[::1]:8080", "10.1.2.3"):
        assert answer(target.url, request("/v1/health", verb="GET", host=host))[0] == 200


def test_headers_without_an_end(target: Target) -> None:
    with target.unharmed():
        assert answer(target.url, b"GET / HTTP/1.1\r\n" + b"x: yyyyyyyyyyyyyyyy\r\n" * 100_000)[0] in (0, 400)
        assert answer(target.url, b"GET /" + b"a" * MEBIBYTE)[0] in (0, 400)


def test_a_caller_who_stops_in_the_middle_of_a_body(target: Target) -> None:
    with target.unharmed():
        for _ in range(50):
            with socket.create_connection(address_of(target.url)) as connection:
                connection.sendall(request(OPEN, JSON, TOKEN, f"content-length: {MEBIBYTE}", body=b"{" * 1000))


def test_callers_who_hang_up_before_their_responses_are_no_bug(target: Target) -> None:
    """Uvicorn reports a disconnection only to the last of several requests of a connection."""
    said = len(target.server.log)
    calls = b'{"calls":[{"call_id":1,"open":{"environment_id":"walk-v1"}}]}'
    with target.unharmed():
        for _ in range(20):
            for each in (sized(b'{"environment_id":"walk-v1"}'), sized(calls, path="/v1/sessions:stream")):
                with socket.create_connection(address_of(target.url)) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    connection.sendall(each * 20)
        until(lambda: answer(target.url, request("/v1/health", verb="GET"))[0] == 200)
    assert "Traceback" not in target.server.log[said:]


async def test_hang_ups_are_counted_apart_from_errors() -> None:
    async with own_server() as server:
        for body in (b"{", b""):
            _, writer = await asyncio.open_connection(*address_of(server.http_address))
            writer.write(request(OPEN, JSON, "content-length: 100", body=body))
            writer.close()
        async with asyncio.timeout(60):
            while server.metrics.hang_ups["http"] < 2:
                await asyncio.sleep(0.01)
        assert [
            sample for family in server.metrics.collect() if "errors" in family.name for sample in family.samples
        ] == []


async def test_strangers_are_bounded_over_http_too() -> None:
    """A request that never ends holds the one place that there is."""
    async with own_server(limits=ServerLimits(max_health_calls=1)) as server:
        reader, writer = await asyncio.open_connection(*address_of(server.http_address))
        writer.write(request("/nothing", JSON, "content-length: 100", body=b"{"))
        assert (await reader.read(12)).endswith(b"404")
        async with httpx.AsyncClient(base_url=server.http_address, trust_env=False) as caller:
            for path in ("/docs", "/openapi.json", "/v1/health", "/nothing"):
                response = await caller.get(path)
                assert response.status_code == 429, path
                assert response.json()["details"][0]["metadata"]["limit"] == "max_health_calls"
            writer.close()
            async with asyncio.timeout(60):
                while (await caller.get("/docs")).status_code != 200:
                    await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def own_server(**settings: Any) -> Any:
    config = ServerConfig(port=0, http=HTTP(0), **settings)
    server = EnvironmentServer(Registry((Walk,)), config)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def closed(url: str, data: bytes) -> bytes:
    """Return the bytes that the server sends before it closes the connection."""
    reader, writer = await asyncio.open_connection(*address_of(url))
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_headers_and_bodies_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_BODY_SECONDS", 0.2)
    async with own_server(handshake_seconds=0.2) as server:
        await closed(f"http://{server.address}", b"PRI")  # gRPC's port; a TimeoutError if it stays open
        assert await closed(server.http_address, b"") == b""
        assert await closed(server.http_address, b"POST /v1/sessions:open HTTP/1.1\r\nhost: localhost\r\n") == b""
    async with own_server() as server:
        slow = await closed(server.http_address, request(OPEN, JSON, "content-length: 100", body=b"{"))
        assert slow.startswith(b"HTTP/1.1 504") and b"DEADLINE" in slow


async def test_connections_and_open_calls_are_bounded() -> None:
    limits = ServerLimits(max_connections=4, max_calls_in_flight=1, max_streams=1)
    async with own_server(limits=limits) as server:
        waiting = request(OPEN, JSON, "content-length: 100", body=b"{")
        held = [await asyncio.open_connection(*address_of(server.http_address)) for _ in range(3)]
        for _, writer in held[:2]:
            writer.write(waiting)
        async with httpx.AsyncClient(base_url=server.http_address, trust_env=False) as caller:
            async with asyncio.timeout(60):
                while (response := await caller.post(OPEN, json={"environment_id": "walk-v1"})).status_code != 429:
                    await asyncio.sleep(0.05)
        assert response.json()["details"][0]["metadata"]["limit"] == "max_calls_in_flight"
        held += [await asyncio.open_connection(*address_of(server.http_address)) for _ in range(3)]
        ended = [asyncio.create_task(reader.read(1)) for reader, _ in held]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert done
        for task, (_, writer) in zip(ended, held, strict=True):
            task.cancel()
            writer.close()


# --- work per byte ---------------------------------------------------------------------------------------------------

UNITS = (
    '"options":{"a":[%s1]}|1,',
    '"options":{"a":[%s{}]}|{},',
    '"options":{"a":[%s""]}|"",',
    '"options":{"a":[%s[]]}|[[[[]]]],',
    '"options":{%s"z":1}|"k#":1,',
    '"options":{"%s":{"a":[1,1,1,1,1,1]}}|k',
    '"options":{"a":"%s"}|\\u00e9',
    '"options":{"a":"%s"}|,',
    '"options":{"a":"%s|\\"',
    '"actions":[%s{}]|{},',
    '"actions":[%s{"text":"a"}]|{"text":"a"},',
    '"actions":[{"text":"%s"}]|é',
    '"actions":[{"json":"[%s1]"}]|1,',
    '"actions":[{"json":"[%s[]]"}]|[],',
    '"actions":[{"tensor":{"shape":[%s1]}}]|1,',
    '"actions":[{"tensor":{"data":"%s"}}]|AAAA',
    '"session_ids":[%s""]|"",',
    '"dynamics_seeds":[%s1]|1,',
    '"snapshot":{"state":"%s"}|AAAA',
    '"unknown":[%s1]|1,',
    '"unknown":%s1|[',
    '"calls":[%s{}]|{},',
    '"calls":[%s{"open":{}}]|{"open":{}},',
    '"steps":{"call_ids":[%s1]}|1,',
    '"steps":{"session_ids":[%s""]}|"",',
)
SIZES = (1_000, 60_000, 1_500_000)
PATHS = ("open", "restore", "close", "stream", "{}:step", "{}:reset", "{}:fork")


def bodies(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Yield path, template and body of about `size` bytes, for each template and path that takes it."""
    for template in UNITS:
        text, _, unit = template.rpartition("|")
        many = "".join(f'"k{n}":1,' for n in range(size // 8)) if "#" in unit else unit * (size // len(unit))
        field = text[1:].partition('"')[0]
        known = {"options": ("open", "{}:reset"), "actions": ("{}:step",), "session_ids": ("close",)}
        known |= {"dynamics_seeds": ("{}:fork",), "snapshot": ("restore",), "calls": ("stream",), "steps": ("stream",)}
        for path in known.get(field, PATHS):
            head = '"environment_id":"frozen_lake-v1",' if path == "open" else '"epoch":1,'
            yield path, template, ("{" + head + text.replace("%s", many) + "}").encode()


def test_no_body_costs_more_than_its_bytes_and_calls_allow(attacked: ServerProcess) -> None:
    """The bound of docs/operations.md, as for gRPC."""
    headers = {"authorization": f"Bearer {VILLAIN}", "content-type": "application/json"}
    before, worst, said = 0, (0.0, "", ""), len(attacked.log)
    with httpx.Client(base_url=http_url(attacked), headers=headers, trust_env=False, timeout=300) as caller:

        def excess(path: str, body: bytes) -> float:
            opened = caller.post(OPEN, content=b'{"environment_id":"anything-v1","seed":1}').json()
            closing = [opened["sessions"][0]["session_id"]]
            url = f"/v1/sessions/{path.format(*closing)}" if ":" in path else f"/v1/sessions:{path}"
            reply, units = units_worked(attacked.pid, lambda: caller.post(url, content=body))
            calls = 1 + (body.count(b"{}") + body.count(b",") if path == "stream" and reply.is_success else 0)
            if path == "open" and reply.is_success:
                closing += [each["session_id"] for each in reply.json()["sessions"]]
            caller.post("/v1/sessions:close", content=json.dumps({"session_ids": closing}))
            return units / units_allowed(len(body), calls)

        for size in SIZES:
            for path, template, body in bodies(size):
                measured = (excess(path, body) for _ in range(MEASUREMENTS))
                worst = max(worst, (next((each for each in measured if each <= 1), math.inf), path, template))
            before = before or memory_of(attacked.pid)  # what is loaded once has been
    kept = kept_memory(attacked.pid, before)
    assert worst[0] <= 1, worst
    assert kept <= KEPT_MIB, f"{kept:.0f} MiB more"
    assert attacked.process.poll() is None
    assert "server bug" not in attacked.log[said:], attacked.log[said:][-3000:]
