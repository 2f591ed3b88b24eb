"""Servers tell where the time of a call went: in a trailer, and in the messages of the Stream."""

import asyncio
import re
from typing import Any

import grpc
import pytest

from starpod.v1 import environment_pb2 as pb
from tests.env_server.conftest import Client, entered, step_request
from tests.env_server.test_stream import columns
from tests.env_server.troublesome import Waiting

FORM = re.compile(r"environment;dur=([\d.]+), queue;dur=([\d.]+), total;dur=([\d.]+)")


async def timed(call: Any) -> tuple[float, float, float]:
    """Milliseconds in the environment, in the queue and in all, as the trailer of a unary call tells them."""
    try:
        await call
        trailer = dict(await call.trailing_metadata())
    except grpc.aio.AioRpcError as error:
        trailer = dict(error.trailing_metadata())  # type: ignore[arg-type]
    match = FORM.fullmatch(str(trailer["server-timing"]))
    assert match, trailer
    environment, queue, total = map(float, match.groups())
    assert environment + queue <= total + 1e-3
    return environment, queue, total


async def test_the_environments_own_time_is_told_apart(client: Client) -> None:
    session = await client.open("waiting-v1")
    environment, queue, total = await timed(client.stub.Step(step_request(session, 0, "40")))
    assert environment >= 40
    assert total >= environment + queue - 1e-3


async def test_a_call_that_waits_for_another_one_has_queued(client: Client) -> None:
    session = await client.open("waiting-v1")
    first = asyncio.create_task(client.step(session, 0, "gate"))
    await entered()
    second = client.stub.Step(step_request(session, 1, "0"))
    await client.pending(session, 2)
    await asyncio.sleep(0.05)
    Waiting.opened.set()
    _, queue, total = await timed(second)
    await first
    assert 50 <= queue <= total


@pytest.mark.parametrize("environment", ["walk-v1", "waiting-v1", "fragile-v1"])
async def test_every_class_tells(client: Client, environment: str) -> None:
    call = client.stub.Open(pb.OpenRequest(environment_id=environment, seed=1))
    assert (await timed(call))[0] > 0


async def test_a_call_that_is_refused_or_repeated_costs_the_environment_nothing(client: Client) -> None:
    session = await client.open("walk-v1")
    assert (await timed(client.stub.Step(step_request(session, 5, "Left"))))[0] == 0
    assert (await timed(client.stub.Step(step_request(session, 0, "Left"))))[0] > 0
    assert (await timed(client.stub.Step(step_request(session, 0, "Left"))))[0] == 0


async def test_columns_tell_sums_over_their_rows(client: Client) -> None:
    sessions = [await client.open("walk-v1") for _ in range(20)]
    stream = client.stub.Stream()
    await stream.write(columns((row, session, 0, ("Right",)) for row, session in enumerate(sessions)))
    response = await stream.read()
    assert len(response.transitions.call_ids) == 20
    assert 0 < response.timing.environment_ms <= response.timing.total_ms
    stream.cancel()


async def test_calls_that_finish_later_tell_too(client: Client) -> None:
    session = await client.open("waiting-v1")
    stream = client.stub.Stream()
    await stream.write(columns([(1, session, 0, ("40",))]))
    response = await stream.read()
    assert len(response.replies) == 1
    assert 40 <= response.timing.environment_ms <= response.timing.total_ms
    stream.cancel()
