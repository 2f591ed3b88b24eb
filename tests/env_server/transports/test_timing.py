"""Servers tell where the time of a call went: in a trailer, and in the messages of the Stream."""

import asyncio
import re
from typing import Any

import grpc
import pytest

from tests.env_server.conftest import Client, Stream, entered, step_request
from tests.env_server.troublesome import Waiting

FORM = re.compile(r"environment;dur=([\d.]+), queue;dur=([\d.]+), total;dur=([\d.]+)")


async def timed(call: Any) -> tuple[float, float]:
    """Return the milliseconds in the environment and in the queue, from the trailer of a unary call."""
    try:
        await call
        trailer = dict(await call.trailing_metadata())
    except grpc.aio.AioRpcError as error:
        trailer = dict(error.trailing_metadata())  # type: ignore[arg-type]
    match = FORM.fullmatch(str(trailer["server-timing"]))
    assert match, trailer
    environment, queue, total = map(float, match.groups())
    assert environment + queue <= total + 1e-3
    return environment, queue


async def test_waiting_for_another_call_and_for_the_environment_are_distinguished(client: Client) -> None:
    session = await client.open("waiting-v1")
    first = asyncio.create_task(client.step(session, 0, "gate"))
    await entered()
    second = client.stub.Step(step_request(session, 1, "40"))
    await client.pending(session, 2)
    await asyncio.sleep(0.05)
    Waiting.opened.set()
    environment, queue = await timed(second)
    await first
    assert environment >= 40 and queue >= 50


@pytest.mark.parametrize("environment", ["walk-v1", "waiting-v1", "fragile-v1"])
async def test_every_class_tells(client: Client, environment: str) -> None:
    assert (await timed(client.ask("Open", environment_id=environment, seed=1)))[0] > 0


async def test_a_call_that_is_refused_or_repeated_costs_the_environment_nothing(client: Client) -> None:
    session = await client.open("walk-v1")
    played, again, refused = [
        (await timed(client.stub.Step(step_request(session, index, "Left"))))[0] for index in (0, 0, 5)
    ]
    assert played > again == refused == 0


async def test_messages_of_a_stream_report_sums_over_their_calls(client: Client) -> None:
    stream, quick = Stream(client), await client.group("walk-v1", 20)
    await stream.ask(*((session, 0, "Right") for session in quick))
    await stream.ask((await client.open("waiting-v1"), 0, "40"))
    rows, later = stream.timings
    assert 0 < rows.environment_ms <= rows.total_ms
    assert 40 <= later.environment_ms <= later.total_ms
