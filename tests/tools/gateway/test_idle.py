"""Idle connections: kept longer than clients' pools use them, and closed where nobody makes a request."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from starpod.serving import http
from starpod.serving.http import IDLE_SECONDS, listening

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
PART = GET[:-2]
"""A head to which more lines may be added."""
LONGEST_POOL_SECONDS = 60
"""Of the clients' pools that we know, the one that keeps idle connections longest."""


async def answer(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(2)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def test_a_client_closes_before_the_gateway_does() -> None:
    assert IDLE_SECONDS > LONGEST_POOL_SECONDS


@pytest.mark.parametrize(
    ("first", "dripped"),
    [(b"", False), (PART, False), (PART, True), (GET, False), (GET + PART, True)],
    ids=["nothing", "part", "drips", "request", "drips later"],
)
async def test_nobody_holds_a_connection_without_a_request(
    first: bytes, dripped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_answered = first.startswith(GET)
    monkeypatch.setattr(http, "IDLE_SECONDS", 1.0 if is_answered else 0.1)
    async with listening(answer) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(first)
        read = bytearray()

        async def follow() -> None:
            with suppress(ConnectionResetError):  # what is written to a closed connection may reset it
                while data := await reader.read(1_000):
                    read.extend(data)

        following = asyncio.create_task(follow())
        while dripped and not following.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)
        await following
        assert read.partition(b"\r\n")[0] == (b"HTTP/1.1 200 OK" if is_answered else b"")
        writer.close()


async def test_a_request_that_takes_longer_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 1.0)
    async with listening(answer) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(GET.replace(b"/ ", b"/slow "))
        assert (await reader.read()).endswith(b"ok")
        writer.close()
