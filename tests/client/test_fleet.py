"""The fleet against servers that keep the contract and misbehave on the way: nothing is lost, nothing is done twice."""

import asyncio
import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from starpod.client import (
    BadArgument,
    DeadlineExceeded,
    EpisodeOver,
    Fleet,
    Limits,
    Overloaded,
    ReplayDiverged,
    Session,
    SessionLost,
    Snapshot,
    TooLarge,
    Transition,
    Unauthenticated,
    UnknownEnvironment,
    UnknownVersion,
    Unreachable,
    Want,
)
from starpod.client.nearest import explain_options
from starpod.v1 import environment_pb2 as pb
from tests.client.fake_server import FakeServer, every_way, overloaded, session_lost
from tests.tools.check.refused import Refused
from tests.waiting import eventually

TURNS: list[Any] = ["left", ["right", "left"], "bad", ["left"], [], "right"]


async def play(session: Session, turns: Sequence[Any] = TURNS) -> list[tuple[Any, ...]]:
    return [seen(await session.step(turn)) for turn in turns]


def seen(transition: Transition) -> tuple[Any, ...]:
    return (
        transition.observation.text,
        transition.reward,
        transition.outcomes,
        transition.end_reason,
        transition.success,
        transition.terminated,
        transition.truncated,
    )


async def undisturbed(seed: int, turns: Sequence[Any] = TURNS, **options: Any) -> list[tuple[Any, ...]]:
    async with FakeServer() as server, Fleet(server.address, recovery=False) as fleet:
        (session,) = await fleet.open("walk-v1", seed=seed, **options)
        return await play(session, turns)


def give_patience(fleet: Fleet, seconds: float) -> None:
    """Shorten the fleet's timeout only now, because opening its sessions may have taken longer on a busy machine."""
    fleet.recovery.patience = seconds
    for replica in fleet.replicas:
        replica.patience = seconds


# --- the calls -------------------------------------------------------------------------------------------------------


@every_way
async def test_every_way_gives_the_same_episode(session: Session) -> None:
    assert await play(session) == await undisturbed(3)
    assert session.step_index == len(TURNS)
    assert session.seed == 3


@every_way
async def test_the_end_of_an_episode(fleet: Fleet) -> None:
    (session,) = await fleet.open("walk-v1", seed=3, limits=Limits(max_turns=2))
    assert not (await session.step("left")).done
    last = await session.step("left")
    assert last.terminated
    assert last.success is True
    assert session.done
    with pytest.raises(EpisodeOver):
        await session.step("left")
    observation = await session.reset(seed=4)
    assert observation.text == "at 4"
    assert not session.done
    await session.step("left")


async def test_step_many_over_several_servers_and_sessions_at_once() -> None:
    async with FakeServer() as one, FakeServer(stream=False) as two, Fleet([one.address, two.address]) as fleet:
        sessions = [session for seed in range(40) for session in await fleet.open("walk-v1", seed=seed)]
        assert {len(replica.sessions) for replica in fleet.replicas} == {20}
        first = await fleet.step_many(sessions, ["left"] * 40)
        second = await fleet.step_many(sessions, [["left", "right"]] * 40)
        for seed in (0, 17, 39):
            expected = await undisturbed(seed, ["left", ["left", "right"]])
            assert [seen(first[seed]), seen(second[seed])] == expected


@every_way
async def test_an_error_in_step_many_costs_its_own_session_only(fleet: Fleet) -> None:
    sessions = await fleet.open("walk-v1", seed=3, count=3, limits=Limits(max_turns=1))
    await sessions[1].step("left")
    results = await fleet.step_many(sessions, ["left"] * 3, return_exceptions=True)
    assert isinstance(results[1], EpisodeOver)
    assert [isinstance(result, Transition) for result in results] == [True, False, True]
    with pytest.raises(EpisodeOver):
        await fleet.step_many(sessions, ["left"] * 3)
    with pytest.raises(ValueError, match="3 sessions and 2 turns"):
        await fleet.step_many(sessions, ["left"] * 2)


@every_way
async def test_a_session_twice_in_one_step_many_plays_two_turns_in_order(fleet: Fleet, session: Session) -> None:
    transitions = await fleet.step_many([session, session], ["left", "right"])
    assert [seen(transition) for transition in transitions] == await undisturbed(3, ["left", "right"])


@every_way
async def test_calls_on_one_session_run_in_the_order_in_which_they_were_made(fake: FakeServer) -> None:
    fake.delay = lambda kind: random.random() * 0.01
    async with Fleet(fake.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3)
        *transitions, frame, copies = await asyncio.gather(
            *(session.step(turn) for turn in TURNS), session.render(), session.fork(2)
        )
        assert [seen(transition) for transition in transitions] == await undisturbed(3)
        assert frame == transitions[-1].observation.text
        assert [copy.observation.text for copy in copies] == [frame, frame]


@every_way
async def test_step_many_waits_for_a_session_in_use_and_sends_all_the_others(fake: FakeServer) -> None:
    fake.delay = lambda kind: 0.05
    async with Fleet(fake.address) as fleet:
        sessions = [session for _ in range(5) for session in await fleet.open("walk-v1", seed=3)]
        turn = asyncio.ensure_future(sessions[2].step("left"))
        await asyncio.sleep(0.01)
        transitions = await fleet.step_many(sessions, ["right"] * 5)
        await turn
        alone, after = await undisturbed(3, ["right"]), await undisturbed(3, ["left", "right"])
        assert [seen(each) for each in transitions] == [*alone * 2, after[1], *alone * 2]


@every_way
async def test_reset_many(fleet: Fleet) -> None:
    sessions = await fleet.open("walk-v1", seed=3, count=4)
    await fleet.step_many(sessions[:3], ["left"] * 3)
    turn = asyncio.ensure_future(sessions[3].step("left"))
    await asyncio.sleep(0)
    observations = await fleet.reset_many(sessions, [5, 6, 7, 8])
    assert (await turn).observation.text != observations[3].text
    assert [observation.text for observation in observations] == ["at 5", "at 6", "at 7", "at 8"]
    assert [session.seed for session in sessions] == [5, 6, 7, 8]
    assert len(await fleet.reset_many(sessions)) == 4
    with pytest.raises(BadArgument, match="did you mean length"):
        await fleet.reset_many(sessions, options={"lenght": 3})
    await fleet.step_many(sessions, ["left"] * 4)  # the refused reset left the episodes as they were
    with pytest.raises(ValueError, match="4 sessions and 1 seeds"):
        await fleet.reset_many(sessions, [5])


async def test_resets_of_a_lost_server_are_made_on_another() -> None:
    async with FakeServer() as one, FakeServer() as two, Fleet([one.address, two.address], grace=0.05) as fleet:
        sessions = [session for seed in range(8) for session in await fleet.open("walk-v1", seed=seed)]
        await fleet.step_many(sessions, ["left"] * 8)
        await one.stop()
        observations = await fleet.reset_many(sessions, list(range(10, 18)))
        assert [observation.text for observation in observations] == [f"at {seed}" for seed in range(10, 18)]
        assert {session.address for session in sessions} == {two.address}
        played = await asyncio.gather(*(play(session, TURNS) for session in sessions))
        assert played == [await undisturbed(seed) for seed in range(10, 18)]


@every_way
async def test_state_keys_are_shown_to_those_who_want_them(fleet: Fleet) -> None:
    (without,) = await fleet.open("walk-v1", seed=3)
    (with_key,) = await fleet.open("walk-v1", seed=3, want=Want(state_key=True))
    assert (await without.step("left")).observation.state_key == b""
    assert len((await with_key.step("left")).observation.state_key) == 16


async def test_an_environment_without_state_keys_is_never_asked_for_them(fake: FakeServer) -> None:
    def refuse(kind: str, request: Any) -> None:
        if request is not None and "want" in request.DESCRIPTOR.fields_by_name and request.want.state_key:
            raise Refused("UNSUPPORTED", "state_key is not supported")

    fake.state_keys, fake.before = False, refuse
    async with Fleet(fake.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3, want=Want(score=True))
        await session.step("left", want=Want(score=True))
        await session.reset(want=Want(score=True))


@pytest.mark.parametrize("call", ["step", "reset"])
@every_way
async def test_a_cancelled_call_is_finished_and_the_next_one_is_in_order(
    fake: FakeServer, session: Session, call: str
) -> None:
    fake.delay = lambda kind: 0.1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.step("left") if call == "step" else session.reset(seed=9), 0.02)
    fake.delay = lambda kind: 0.0
    expected = await (undisturbed(3, ["left", "right"]) if call == "step" else undisturbed(9, ["right"]))
    assert seen(await session.step("right")) == expected[-1]


@every_way
async def test_closing_the_fleet_closes_its_sessions(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starpod.client.fleet.CLOSE_SECONDS", 60.0)
    async with Fleet(fake.address) as fleet:
        sessions = await fleet.open("walk-v1", seed=3, count=5)
        await sessions[0].close()
        assert len(fake.sessions) == 4
        with pytest.raises(RuntimeError, match="closed"):
            await sessions[0].step("left")
    assert not fake.sessions


@every_way
async def test_closing_the_fleet_ends_calls_in_flight(fake: FakeServer) -> None:
    fake.lose = lambda kind: kind in ("step", "render")
    fleet = Fleet(fake.address)
    await fleet.start()
    step, render, many = await fleet.open("walk-v1", seed=3, count=3)
    calls = [
        asyncio.create_task(call) for call in (step.step("left"), render.render(), fleet.step_many([many], ["left"]))
    ]
    await asyncio.sleep(0.05)
    await fleet.close()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, Unreachable) for result in results), results


async def test_leases_of_idle_sessions_are_renewed(fake: FakeServer, fleet: Fleet) -> None:
    sessions = await fleet.open("walk-v1", seed=3)
    fleet.pool.upkeep.renew_within(0.1)
    await eventually(lambda: fake.calls.get("renew", 0) >= 2)
    # A session that the program has let go of is left to its lease.
    sessions.clear()
    gc.collect()
    await eventually(lambda: not fleet.replicas[0].queue.pending)
    renewed = fake.calls["renew"]
    await asyncio.sleep(0.3)
    assert fake.calls["renew"] == renewed


# --- errors ----------------------------------------------------------------------------------------------------------


@every_way
async def test_mistyped_names_get_the_nearest_ones(fleet: Fleet) -> None:
    with pytest.raises(UnknownEnvironment, match="did you mean walk-v1") as unknown:
        await fleet.open("wlak-v1")
    assert unknown.value.nearest == ["walk-v1"]
    with pytest.raises(UnknownVersion) as version:
        await fleet.open("walk-v1", version=">=2")
    assert version.value.available == ["1.2.0"]
    with pytest.raises(BadArgument, match="not a version range"):
        await fleet.open("walk-v1", version="newest")
    with pytest.raises(BadArgument, match=r"no option 'lenght': did you mean length") as option:
        await fleet.open("walk-v1", options={"lenght": 3})
    assert option.value.options_schema is not None
    assert "length" in option.value.options_schema["properties"]
    (session,) = await fleet.open("walk-v1", seed=1)
    with pytest.raises(BadArgument, match="did you mean length"):
        await session.reset(options={"lenght": 3})
    with pytest.raises(BadArgument, match="JSON"):
        await fleet.open("walk-v1", options={"length": object()})


def test_an_error_that_is_not_about_options_lists_none() -> None:
    error = BadArgument("count: is too many", violations=[("count", "is too many")])
    assert explain_options(error, pb.EnvironmentSpec(id="walk-v1"), {"length": 3}) is error


@every_way
async def test_an_overloaded_server_is_asked_again_later(fake: FakeServer) -> None:
    refusals = dict.fromkeys(("open", "step", "reset", "fork"), 3)

    def before(kind: str, _: Any) -> None:
        if refusals.get(kind):
            refusals[kind] -= 1
            raise overloaded()

    fake.before = before
    async with Fleet(fake.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=1)
        await session.reset(seed=3)
        await session.fork()
        assert await play(session) == await undisturbed(3)
    assert not any(refusals.values())


@every_way
async def test_patience_ends(fake: FakeServer, fleet: Fleet, session: Session) -> None:
    give_patience(fleet, 1.0)

    def before(kind: str, _: Any) -> None:
        raise overloaded()

    fake.before = before
    with pytest.raises(Overloaded):
        await session.step("left")
    with pytest.raises((Overloaded, DeadlineExceeded)):  # the latter where the last call is cut off
        await session.render()
    give_patience(fleet, 60.0)
    fake.before = lambda kind, request: None
    assert await play(session) == await undisturbed(3)


async def test_too_large_a_turn_is_refused_before_it_breaks_the_stream() -> None:
    server = FakeServer()
    server.limits.max_message_bytes = 4096
    async with server, Fleet(server.address) as fleet:
        sessions = await fleet.open("walk-v1", seed=3, count=64)
        with pytest.raises(TooLarge, match=r"4096.*--max-message-bytes"):
            await sessions[0].step("x" * 5000)
        long = await fleet.step_many(sessions, ["y" * 1000] * 64)
        assert len(long) == 64
        assert fleet.replicas[0].reconnects == 1


async def test_tokens(tmp_path: Path) -> None:
    async with FakeServer() as server:
        server.token = "secret"
        with pytest.raises(Unauthenticated):
            await Fleet(server.address).start()
        async with Fleet(server.address, token="secret"):
            pass
        file = tmp_path / "token"
        file.write_text("secret\n")
        async with Fleet(server.address, token=file):
            pass


async def test_nobody_there() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        await Fleet("127.0.0.1:1").start()


# --- lost, doubled and late replies ----------------------------------------------------------------------------------


@every_way
async def test_lost_replies_are_asked_for_again(fake: FakeServer) -> None:
    chance = random.Random(1)
    fake.lose = lambda kind: chance.random() < 0.3
    fake.delay = lambda kind: chance.choice([0.0, 0.0, 0.03])
    async with Fleet(fake.address, timeout=0.05, health_seconds=600.0, grace=60.0) as fleet:
        (session,) = await fleet.open("walk-v1", seed=1)
        await session.reset(seed=3)
        copies = await session.fork(2)
        assert await play(session) == await undisturbed(3)
        fake.lose = lambda kind: False
    assert len(copies) == 2
    assert fake.turns_played == len(TURNS)


async def test_a_call_asked_again_may_be_answered_in_a_row() -> None:
    async with FakeServer() as server, Fleet(server.address, timeout=0.1) as fleet:
        server.answers_in_columns = True
        hidden, shown = [
            (await fleet.open("walk-v1", seed=3, want=Want(state_key=wanted)))[0] for wanted in (False, True)
        ]
        lost = [True, True]
        server.lose = lambda kind: kind == "step" and bool(lost) and lost.pop()
        first, second = await asyncio.gather(hidden.step("left"), shown.step("left"))
        assert [seen(first)] == [seen(second)] == await undisturbed(3, ["left"])
        assert (len(first.observation.state_key), len(second.observation.state_key)) == (0, 16)


@every_way
async def test_a_server_that_never_answers_runs_into_the_patience(fake: FakeServer) -> None:
    """A server that answers health checks but not the turn."""
    async with Fleet(fake.address, timeout=0.05, grace=60.0) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3)
        give_patience(fleet, 0.3)
        fake.lose = lambda kind: kind == "step"
        with pytest.raises(DeadlineExceeded):
            await session.step("left")
        give_patience(fleet, 60.0)
        fake.lose = lambda kind: False
        assert seen(await session.step("left")) == (await undisturbed(3, ["left"]))[0]


# --- broken connections and lost servers -----------------------------------------------------------------------------


@every_way
async def test_a_cut_connection_is_mended_and_nothing_is_done_twice(fake: FakeServer) -> None:
    async with Fleet(fake.address, grace=60.0) as fleet:
        sessions = await fleet.open("walk-v1", seed=3, count=4)
        fake.delay = lambda kind: 0.05
        steps = [asyncio.create_task(play(session, ["left", "right"])) for session in sessions]
        await asyncio.sleep(0.02)
        await fake.restart(forget=False)
        await asyncio.gather(*steps)
        assert fleet.recoveries == 0
        assert fake.turns_played == 8


@pytest.mark.parametrize("lost", ["server", "session"])
@every_way
async def test_what_is_lost_comes_back(fake: FakeServer, fleet: Fleet, session: Session, lost: str) -> None:
    first = await play(session, TURNS[:3])
    if lost == "server":
        await fake.restart()
    else:
        fake.sessions.clear()
    assert first + await play(session, TURNS[3:]) == await undisturbed(3)
    assert session.recoveries == fleet.recoveries == 1
    assert fake.calls["open"] == 2


async def test_sessions_of_a_lost_server_move_to_another() -> None:
    async with FakeServer() as one, FakeServer() as two, Fleet([one.address, two.address], grace=0.05) as fleet:
        sessions = [session for seed in range(8) for session in await fleet.open("walk-v1", seed=seed)]
        first = await asyncio.gather(*(play(session, TURNS[:3]) for session in sessions))
        await one.stop()
        rest = await asyncio.gather(*(play(session, TURNS[3:]) for session in sessions))
        for seed, episode in enumerate(zip(first, rest, strict=True)):
            assert [*episode[0], *episode[1]] == await undisturbed(seed)
        assert {session.address for session in sessions} == {two.address}
        assert fleet.recoveries == 4


@every_way
async def test_an_action_that_always_kills_its_session_is_not_tried_for_ever(fake: FakeServer) -> None:
    def before(kind: str, request: Any) -> None:
        if kind == "step":
            fake.sessions.clear()
            raise session_lost()

    async with Fleet(fake.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3)
        fake.before = before
        with pytest.raises(SessionLost):
            await session.step("left")
    assert fake.calls["step"] <= 5


@every_way
async def test_nor_is_one_that_takes_its_server_down_each_time(fake: FakeServer) -> None:
    deaths: list[asyncio.Task[None]] = []

    def before(kind: str, request: Any) -> None:
        if kind == "step":
            deaths.append(asyncio.get_running_loop().create_task(fake.restart()))

    async with Fleet(fake.address, grace=0.05) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3)
        fake.before, fake.lose = before, lambda kind: kind == "step"
        with pytest.raises(SessionLost, match="crash its server") as lost:
            await session.step("left")
        assert lost.value.advice == "give_up"
        await asyncio.gather(*deaths)
        # Others find it alive.
        fake.before, fake.lose = lambda *_: None, lambda _: False
        (other,) = await fleet.open("walk-v1", seed=3)
        assert seen(await other.step("left")) == (await undisturbed(3, ["left"]))[0]


async def test_another_environment_under_the_same_name_is_noticed(fake: FakeServer, session: Session) -> None:
    await play(session, TURNS[:3])
    fake.noise = 1
    await fake.restart()
    with pytest.raises(ReplayDiverged) as diverged:
        await session.step("left")
    assert diverged.value.step == 1
    assert diverged.value.expected_key != diverged.value.found_key
    await eventually(lambda: not fake.sessions)  # the stand-in was closed


@pytest.mark.parametrize(
    ("deterministic", "settings", "said"),
    [(True, {"recovery": False}, "recovery is off"), (False, {"checkpoints": False}, "not deterministic")],
)
async def test_what_cannot_be_recovered_is_reported_as_lost(
    deterministic: bool, settings: dict[str, Any], said: str
) -> None:
    async with FakeServer(deterministic=deterministic) as server, Fleet(server.address, **settings) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3)
        await session.step("left")
        await server.restart()
        with pytest.raises(SessionLost, match=said):
            await session.step("left")


async def test_a_nondeterministic_environment_continues_from_its_last_snapshot() -> None:
    async with FakeServer(deterministic=False) as server, Fleet(server.address) as fleet:
        (session,) = await fleet.open("walk-v1", seed=3)
        for _ in range(3):
            before = (await session.step("left")).observation.text
            await server.restart()
            assert await session.render() == before
        assert session.recoveries == 3
        assert session.step_index == 3
        await session.reset(seed=5)
        await server.restart()
        assert await session.render() == "at 5"


async def test_a_moved_member_of_a_group_keeps_its_random_state() -> None:
    async def episode(*, disturb: bool) -> list[Any]:
        async with FakeServer() as server, Fleet(server.address) as fleet:
            group = await fleet.open("walk-v1", seed=3, count=4)
            await group[3].step("left")
            if disturb:
                await server.restart()
                await group[3].step("right")
            await group[3].reset(seed=8)
            return await play(group[3])

    assert await episode(disturb=True) == await episode(disturb=False)


async def test_a_snapshot_travels_as_bytes() -> None:
    async with FakeServer() as one, FakeServer() as two:
        async with Fleet(one.address) as fleet:
            (session,) = await fleet.open("walk-v1", seed=3)
            first = await play(session, TURNS[:3])
            data = (await session.snapshot()).to_bytes()
        async with Fleet(two.address) as fleet:
            restored = await fleet.restore(Snapshot.from_bytes(data))
            assert restored.step_index == 3
            assert first + await play(restored, TURNS[3:]) == await undisturbed(3)


# --- members ---------------------------------------------------------------------------------------------------------


async def test_siblings_join_and_twins_leave() -> None:
    async with FakeServer() as one, FakeServer() as two:
        port_one, port_two = (server.address.rpartition(":")[2] for server in (one, two))
        one.endpoints = [f"0.0.0.0:{port_one}", f"0.0.0.0:{port_two}"]
        async with Fleet([one.address, f"localhost:{port_one}"]) as fleet:
            await eventually(lambda: len(fleet.replicas) == 2 and all(replica.ready for replica in fleet.replicas))
            assert {replica.instance_id for replica in fleet.replicas} == {one.instance_id, two.instance_id}


async def test_names_are_resolved() -> None:
    async with FakeServer() as server:
        port = server.address.rpartition(":")[2]
        async with Fleet(f"dns:///localhost:{port}") as fleet:
            assert f"127.0.0.1:{port}" in {replica.address for replica in fleet.replicas}
            await fleet.open("walk-v1", seed=1)


async def test_versions_are_chosen_over_the_whole_fleet() -> None:
    async with (
        FakeServer(version="1.2.0") as old,
        FakeServer(version="1.10.0") as new,
        Fleet([old.address, new.address]) as fleet,
    ):
        assert [spec.version for spec in await fleet.describe()] == ["1.10.0", "1.2.0"]
        assert (await fleet.open("walk-v1"))[0].version == "1.10.0"
        (session,) = await fleet.open("walk-v1", version="<1.10", seed=3)
        assert session.version == "1.2.0"
        await session.step("left")
        await old.restart()
        await session.step("left")
        assert (session.version, session.address) == ("1.2.0", old.address)
