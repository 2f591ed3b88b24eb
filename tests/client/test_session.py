"""A session runs one call at a time, in the order in which they were made, even if waiting calls are cancelled."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from starpod.client import JSON, BadArgument, Fleet, Limits, Session, ToolCall, Transition
from starpod.client.observation import as_actions
from tests.client.fake_server import FakeServer
from tests.client.test_fleet import seen, undisturbed
from tests.waiting import eventually

# A call that is made while another one is in flight, and how many passes of the event loop later it is cancelled.
CALLS = st.lists(
    st.tuples(st.sampled_from(["step", "reset", "render", "many", "wrong"]), st.none() | st.integers(0, 12)),
    min_size=1,
    max_size=8,
)


@given(calls=CALLS, closed_at=st.none() | st.integers(0, 8))
def test_every_call_ends_and_the_session_is_free_then(
    calls: list[tuple[str, int | None]], closed_at: int | None
) -> None:
    async def run() -> None:
        async with FakeServer() as server, Fleet(server.address) as fleet:
            (session,) = await fleet.open("walk-v1", seed=3, limits=Limits(max_turns=100))

            async def make(kind: str) -> Any:
                match kind:
                    case "step":
                        return await session.step("left")
                    case "reset":
                        return await session.reset(seed=4)
                    case "many":
                        return await fleet.step_many([session], ["right"])
                    case "wrong":
                        return await session.reset(seed=-1)
                return await (session.close() if kind == "close" else session.render())

            kinds = [kind for kind, _ in calls]
            if closed_at is not None:
                kinds.insert(closed_at, "close")
            tasks = [asyncio.create_task(make(kind)) for kind in kinds]
            for moment in range(13):
                for task, (_, cancelled_at) in zip(tasks, calls, strict=False):
                    if cancelled_at == moment:
                        task.cancel()
                await asyncio.sleep(0)
            async with asyncio.timeout(60):
                results = await asyncio.gather(*tasks, return_exceptions=True)
                wrong = [result for kind, result in zip(kinds, results, strict=True) if kind == "wrong"]
                assert all(isinstance(result, ValueError | asyncio.CancelledError) for result in wrong)
                if session.closed:
                    with pytest.raises(RuntimeError, match="closed"):
                        await session.step("left")
                else:
                    await session.step("left")
            assert not session.state.busy

    asyncio.run(run())


async def test_calls_that_wait_when_a_session_is_closed_are_told_so() -> None:
    async with FakeServer() as server, Fleet(server.address) as fleet:
        server.delay = lambda kind: 0.05
        (session,) = await fleet.open("walk-v1", seed=3)
        calls = [session.step("left"), session.close(), session.step("left"), session.render(), session.reset()]
        async with asyncio.timeout(60):
            first, closed, *rest = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, Transition)
    assert closed is None
    assert all(isinstance(result, RuntimeError) for result in rest), rest


async def test_closing_does_not_wait_for_a_call_that_nobody_waits_for() -> None:
    """The session is closed on the server as soon as the abandoned call is finished."""
    async with FakeServer() as server, Fleet(server.address) as fleet:
        session, other = await fleet.open("walk-v1", seed=3, count=2)
        server.delay = lambda kind: 3600 if kind == "step" else 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await session.step("left")
        async with asyncio.timeout(60):
            await fleet.close_sessions([session, other])
    assert other.closed


async def test_a_session_is_closed_even_if_closing_another_with_it_is_cancelled() -> None:
    async with FakeServer() as server, Fleet(server.address, health_seconds=0.02) as fleet:
        session, busy = await fleet.open("walk-v1", seed=3, count=2)
        server.delay = lambda kind: 3600 if kind == "step" else 0
        step = asyncio.create_task(busy.step("left"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(fleet.close_sessions([session, busy]))
        await eventually(lambda: session.closed)
        closing.cancel()
        await eventually(lambda: len(server.sessions) == 1)
        step.cancel()


async def test_a_call_that_is_cancelled_when_its_turn_has_come_lets_the_next_one_in(session: Session) -> None:
    async def step_and_cancel() -> None:
        await session.step("left")
        second.cancel()

    first = asyncio.create_task(step_and_cancel())
    second = asyncio.create_task(session.step("never"))
    third = asyncio.create_task(session.step("right"))
    async with asyncio.timeout(60):
        await asyncio.wait([first, second])
        assert second.cancelled()
        assert seen(await third) == (await undisturbed(3, ["left", "right"]))[1]


async def test_a_call_that_waits_is_not_overtaken(fleet: Fleet) -> None:
    (session,) = await fleet.open("walk-v1", seed=3, limits=Limits(max_turns=1_000))
    stop = False

    async def play() -> None:
        while not stop:
            await session.step("left")

    player = asyncio.create_task(play())
    await asyncio.sleep(0)
    for _ in range(5):
        before = session.step_index
        await session.render()
        assert session.step_index <= before + 2
    stop = True
    await player


async def test_a_call_on_a_free_session_goes_before_those_that_are_made_after_it(session: Session) -> None:
    start = await session.render()
    frame, _ = await asyncio.gather(session.render(), session.step("left"))
    assert frame == start != await session.render()


async def test_what_is_no_turn_is_refused_before_any_is_played() -> None:
    async with FakeServer() as server, Fleet(server.address) as fleet:
        sessions = await fleet.open("walk-v1", seed=3, count=2)
        for wrong in (5, None, [5], {"text": "left"}, b"left"):
            with pytest.raises(TypeError, match=r"An action is a str, .*, not"):
                await fleet.step_many(sessions, ["left", wrong])  # type: ignore[list-item]
            with pytest.raises(TypeError, match="An action is"):
                await sessions[0].step(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="-1"):
            await fleet.reset_many(sessions, [5, -1])
        with pytest.raises(BadArgument, match="JSON"):
            await fleet.reset_many(sessions, options={"length": object()})
        transitions = await fleet.step_many(sessions, ["left", "left"])
        assert seen(transitions[0]) == (await undisturbed(3, ["left"]))[0]
    assert server.turns_played == 2


async def test_a_closed_session_costs_the_others_nothing(fleet: Fleet) -> None:
    sessions = await fleet.open("walk-v1", seed=3, count=3)
    await sessions[1].close()
    results = await fleet.step_many(sessions, ["left"] * 3, return_exceptions=True)
    assert [type(result) for result in results] == [Transition, RuntimeError, Transition]
    with pytest.raises(RuntimeError, match="closed"):
        await fleet.step_many(sessions, [["left"]] * 3)
    assert [session.step_index for session in sessions] == [2, 0, 2]
    with pytest.raises(RuntimeError, match="closed"):
        await fleet.reset_many(sessions, [5, 6, 7])
    assert [sessions[0].observation.text, sessions[2].observation.text] == ["at 5", "at 7"]


def test_a_turn_keeps_what_was_done_whatever_the_caller_writes_into_it_later() -> None:
    array, arguments, value = np.zeros(2), {"path": ["a"]}, [{"b": 1}]
    tensor, call, json = as_actions([array, ToolCall("open", arguments), JSON(value)])
    array[0] = 1
    arguments["path"].append("z")
    value[0]["b"] = 2
    assert isinstance(tensor, np.ndarray)
    assert tensor.tolist() == [0, 0]
    assert call == ToolCall("open", {"path": ["a"]})
    assert json == JSON([{"b": 1}])
    assert as_actions(array)[0] is not array
