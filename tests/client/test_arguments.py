"""Errors for wrong arguments say what to write instead, and the repr of each public object can be read."""

import asyncio
from typing import Any

import pytest

from starpod.client import (
    BadArgument,
    Fleet,
    Image,
    Limits,
    Observation,
    SyncFleet,
    Transition,
    UnknownEnvironment,
    Want,
)
from starpod.v1 import environment_pb2 as pb
from tests.client.fake_server import FakeServer
from tests.support import ServerProcess
from tests.tools.check.refused import Refused

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (640).to_bytes(4, "big") + (480).to_bytes(4, "big") + bytes(5000)


async def test_a_short_name_opens_the_highest_of_its_family() -> None:
    async with FakeServer() as server, Fleet(server.address) as fleet:
        (session,) = await fleet.open("walk", seed=3)
        assert session.environment_id == "walk-v1"
        assert session.id in server.sessions
        await session.step("left")
        server.sessions.clear()
        await session.step("left")
        assert session.recoveries == 1 and session.id in server.sessions
        with pytest.raises(UnknownEnvironment, match="did you mean walk-v1"):
            await fleet.open("wal")


@pytest.mark.parametrize(
    ("wrong", "kind", "hint"),
    [
        ({"count": 0}, ValueError, "count=0: write how many"),
        ({"count": -1}, ValueError, "count=-1: write how many"),
        ({"seed": "a"}, TypeError, "seed='a': a seed is a whole number"),
        ({"seed": -1}, ValueError, "seed=-1: a seed is a whole number"),
        ({"dynamics_seed": 1.5}, TypeError, "dynamics_seed=1.5: a seed is a whole number"),
        ({"options": {"a": [2**53]}}, BadArgument, "9007199254740992 would be rounded"),
    ],
)
async def test_arguments_that_open_cannot_take_are_reported_before_they_are_sent(
    wrong: Any, kind: type[Exception], hint: str
) -> None:
    async with FakeServer() as server, Fleet(server.address) as fleet:
        with pytest.raises(kind, match=hint):
            await fleet.open("walk-v1", **wrong)
        (session,) = await fleet.open("walk-v1", seed=3)
        if "count" in wrong:
            with pytest.raises(kind, match=hint):
                await session.fork(**wrong)
        else:
            with pytest.raises(kind, match=hint):
                await session.reset(**wrong)
        if "seed" in wrong:
            with pytest.raises(kind, match=hint):
                await fleet.reset_many([session], [wrong["seed"]])
        await session.step("left")
        assert server.calls["open"] == 1


def test_limits_are_whole_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_turns=-1: .* 0 lifts"):
        Limits(max_turns=-1)
    assert repr(Limits(max_turns=0, max_actions=3)) == (
        "Limits(max_turns=0 (no limit), max_actions_per_turn=None, max_actions=3)"
    )
    with pytest.raises(TypeError, match="max_actions='9': write a whole number"):
        Limits(max_actions="9")  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["http", "grpc", "https"])
def test_an_address_is_no_url(scheme: str) -> None:
    with pytest.raises(ValueError, match=r"write '127\.0\.0\.1:50051', without") as error:
        Fleet(f"{scheme}://127.0.0.1:50051/")
    assert ("tls=TLS()" in str(error.value)) is (scheme == "https")


def test_a_picture_is_shown_by_its_size() -> None:
    observation = Observation(("two\nlines <b>", Image(PNG)), valid_actions=("left",), score=0.5, state_key=b"\x01\x02")
    assert repr(observation) == (
        f"Observation('two\\nlines <b>', Image(image/png, 640x480, {len(PNG)} bytes), valid_actions=('left',),"
        " score=0.5, state_key=0102)"
    )
    page = observation._repr_html_()
    assert page.startswith('<pre>two\nlines &lt;b&gt;</pre><img src="data:image/png;base64,iVBORw0KGgo')
    assert repr(Image(b"jpeg", "image/jpeg")) == "Image(image/jpeg, 4 bytes)"
    assert '"' not in Image(b"", '"><script>')._repr_html_().split('src="')[1].split(";base64")[0]


@pytest.mark.parametrize("columns", [True, False])
async def test_a_transition_shows_which_actions_were_invalid_and_how_it_ended(columns: bool) -> None:
    async with FakeServer(columns=columns) as server, Fleet(server.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3, limits=Limits(max_turns=2))
        first = await session.step(["left", "bad", "right"])
        assert first.actions == ("left", "bad", "right")
        assert f"reward={first.reward}, invalid: 'bad')" in repr(first)
        (last,) = await fleet.step_many([session], ["left"])
        assert repr(last).endswith(f"reward={last.reward}, TERMINAL, success=True)")
        assert "TERMINAL" in last._repr_html_() and "<pre>at " in last._repr_html_()


async def test_a_transition_of_an_unknown_turn_shows_which_place_was_invalid() -> None:
    message = pb.Transition(reward=1.0, outcomes=[pb.Outcome(valid=True), pb.Outcome()])
    assert repr(Transition.from_proto(message)) == "Transition(Observation(), reward=1.0, invalid: 1)"


async def test_a_picture_in_a_transition_is_a_picture_in_a_notebook(server: ServerProcess) -> None:
    async with Fleet(server.address) as fleet:
        (session,) = await fleet.open("frozen_lake", seed=1, want=Want(image=True))
        transition = await session.step(["Left", "Jump"])
        assert "invalid: 'Jump'" in repr(transition) and "bytes)" in repr(transition)
        assert len(repr(transition)) < 300
        assert '<img src="data:image/png;base64,' in transition._repr_html_()


async def test_a_session_shows_its_observation_and_its_place(server: ServerProcess) -> None:
    async with Fleet(server.address) as fleet:
        (session,) = await fleet.open("bandit", seed=1)
        assert "<pre>Arms: " in session._repr_html_() and "bandit-v1, seed 1, turn 1" in session._repr_html_()
        await session.step("x")
        assert "over: MAX_TURNS" in session._repr_html_()


async def test_a_blocking_session_shows_a_picture_where_one_is_drawn(
    server: ServerProcess, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(address: str, name: str) -> list[str]:
        with SyncFleet(address) as fleet:
            (session,) = fleet.open(name, seed=1)
            shown = session._repr_html_()
            session.close()
            return [shown, session._repr_html_()]

    async def refuse(request: pb.RenderRequest) -> pb.RenderResponse:
        raise Refused("UNSUPPORTED", "draws no pictures", capability="render")

    monkeypatch.setattr(fake, "render", refuse)
    drawn, closed = await asyncio.to_thread(show, server.address, "frozen_lake")
    assert '<img src="data:image/png;base64,' in drawn and "<img" not in closed
    told, _ = await asyncio.to_thread(show, fake.address, "walk")
    assert "<pre>at 1" in told and "<img" not in told
