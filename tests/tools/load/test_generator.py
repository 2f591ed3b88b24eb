"""Both loops against real servers: what is counted, what is not, and what is left when servers fail."""

import asyncio
import os
import signal
from functools import partial
from typing import Any

import pytest

from starpod.load import generator, players
from starpod.load.generator import RunEnded
from starpod.load.measurements import Histogram, bucket_ceilings
from starpod.load.plan import ActionSource, Stage, Think
from starpod.load.servers import LoadServer
from tests.support import ServerProcess, start_server
from tests.tools.load.conftest import LAZY, make_plan, play
from tests.tools.load.lazy import STALL_SECONDS

SHORT = Stage("short", sessions=8, seconds=0.5, warmup=0.1)
minutes = pytest.mark.minutes


def above(histogram: Histogram, seconds: float) -> int:
    """Return the number of latencies of at least `seconds`."""
    return int(histogram.counts[bucket_ceilings() >= round(seconds * 1e9)].sum())


@pytest.mark.parametrize("wire", ["stream", pytest.param("unary", marks=minutes)])
async def test_a_closed_loop(server: ServerProcess, wire: str) -> None:
    wanted = {"open", "step", "reset", "close", "render", "fork", "snapshot"}
    for _ in range(10):  # on a machine that is held up, half a second may not be enough for each of them
        mix = {"render": 0.2, "fork": 0.1, "snapshot": 0.1}
        (report,) = (await play(make_plan(server.address, wire=wire, mix=mix), SHORT)).reports
        calls = report["calls"]
        if set(calls) >= wanted and report["steps"]:
            break
    assert set(calls) >= wanted
    assert calls["open"]["count"] == 8 <= calls["close"]["count"]
    assert report["errors"] == {"total": 0, "share": 0.0, "classes": {}}
    assert report["sessions"] == 8
    assert 0 < report["steps"] <= calls["step"]["count"] + 8
    assert "service" not in calls["step"]
    told = report["server_time"]
    assert 0 < told["environment_ms"] <= told["total_ms"] <= told["latency_ms"]
    assert (told["queue_ms"] is not None) == (wire == "unary")


@pytest.mark.parametrize(
    ("wire", "actions", "path"),
    [("stream", ("Left", "Up"), "columns"), ("stream", (), "messages"), ("unary", ("Left", "Up"), "unary")],
)
async def test_the_path_of_steps_is_reported(
    server: ServerProcess, wire: str, actions: tuple[str, ...], path: str
) -> None:
    """Environments with named actions are not asked for valid actions, so their steps travel in columns."""
    stage = Stage("short", sessions=8, seconds=0.1, warmup=0.0)
    for _ in range(10):  # on a machine that is held up, a tenth of a second may not be enough for a step
        (report,) = (
            await play(make_plan(server.address, wire=wire, turns=ActionSource("random", actions)), stage)
        ).reports
        if report["paths"]:
            break
    assert report["paths"] == {path: 1.0}


@minutes
async def test_sessions_think(server: ServerProcess) -> None:
    (report,) = (await play(make_plan(server.address, think=Think("50ms")), SHORT)).reports
    # Each session can step no more often than it thinks.
    assert 0 < report["steps"] <= 8 * (1 + report["seconds"] / 0.05)


@minutes
async def test_an_environments_time_is_distinguished(server: ServerProcess) -> None:
    plan = make_plan(server.address, environment="waits-v1", wire="unary")
    (report,) = (await play(plan, Stage("waits", 2, 0.4, 0.1))).reports
    assert report["server_time"]["environment_ms"] >= 20


async def test_an_open_loop_keeps_its_schedule(server: ServerProcess) -> None:
    stage = Stage("open", 16, 1.0, 0.2, rate=100.0, arrivals="constant")
    (report,) = (await play(make_plan(server.address), stage)).reports
    # Due in the measured second: 100, one more or less at its edges. Answered and late are other questions.
    assert 99 <= report["calls"]["step"]["count"] + report["unserved"] + report["unanswered"] <= 101
    assert report["calls"]["step"]["service"]["count"] == report["calls"]["step"]["count"]
    assert report["loop"] == "open"


async def test_a_stall_cannot_hide() -> None:
    """Coordinated omission: while the server sleeps, steps fall due. Each of them waited. A generator
    that counts from the sending sees as many slow steps as it has sessions."""
    sessions, rate = 4, 100.0
    with start_server("stalls", LAZY) as server:
        plan = make_plan(server.address, environment="stalls-v1", turns=ActionSource("random", ("go",)))
        stage = Stage("stalls", sessions, 1.8, 0.2, rate=rate, arrivals="constant")
        (report,) = (await play(plan, stage)).reports
    step = report["calls"]["step"]
    due, sent = Histogram.decode(step["hdr"]), Histogram.decode(step["service"]["hdr"])
    waited = rate * STALL_SECONDS / 2  # those due in the first half of the stall waited for at least half of it
    assert above(due, STALL_SECONDS / 2) >= waited - 1
    assert above(due, STALL_SECONDS * 0.99) >= 1
    # Any other pause of the machine makes more steps slow, and still more of them late.
    assert 1 <= above(sent, STALL_SECONDS / 2) <= above(due, STALL_SECONDS / 2) / 2
    assert step["p90_ms"] > 1e3 * STALL_SECONDS / 3
    assert report["unserved"] == 0


async def test_what_is_interrupted_in_the_middle_of_its_steps_is_closed(server: ServerProcess) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, stop.set)
    plan = make_plan(server.address, environment="waits-v1", options={"milliseconds": 1000})
    (report,) = (await play(plan, Stage("waits", 4, 60.0, 0.0), stop=stop)).reports
    assert report["calls"]["close"]["count"] == 4


@minutes
async def test_a_stage_after_another(server: ServerProcess) -> None:
    first, second = (Stage(f"{count} sessions", count, 0.3, 0.05) for count in (2, 6))
    reports = (await play(make_plan(server.address), first, second)).reports
    assert [report["sessions"] for report in reports] == [2, 6]
    assert [report["calls"]["open"]["count"] for report in reports] == [2, 4]
    assert reports[1]["calls"]["close"]["count"] == 6


@minutes
async def test_sessions_come_and_go(server: ServerProcess) -> None:
    (report,) = (await play(make_plan(server.address, episodes_per_session=1), SHORT)).reports
    assert "reset" not in report["calls"]
    assert report["calls"]["open"]["count"] > 8
    # A stage may end between a close and the open that follows it.
    assert 0 <= report["calls"]["open"]["count"] - report["calls"]["close"]["count"] <= 8


@minutes
async def test_bugs_of_the_environment_are_a_class_of_their_own(server: ServerProcess) -> None:
    (report,) = (await play(make_plan(server.address, environment="breaks-v1"), SHORT)).reports
    assert set(report["errors"]["classes"]) == {"environment_bug"}
    bugs = report["errors"]["classes"]["environment_bug"]
    assert bugs["count"] == bugs["calls"]["step"] > 0
    assert "a bug on purpose" in bugs["example"]
    # Each of them cost its session; another one took its place.
    assert report["calls"]["open"]["count"] > 8


@minutes
async def test_overload_is_honoured_or_counted() -> None:
    with start_server("waits", LAZY, "--max-calls-in-flight", "8") as server:
        for retry in (True, False):
            plan = make_plan(server.address, environment="waits-v1", retry_overload=retry)
            (report,) = (await play(plan, Stage("crowded", 12, 0.6, 0.1))).reports
            assert set(report["errors"]["classes"]) == {"overload"}
            assert report["errors"]["classes"]["overload"]["calls"].get("step", 0) > 0
            assert report["calls"]["step"]["count"] > 0
            # Refusals are quick: were they among the latencies, the fastest would not have waited.
            assert Histogram.decode(report["calls"]["step"]["hdr"]).percentiles(0)[0] >= 0.0199


async def test_the_wait_that_an_overloaded_server_asks_for_is_no_missed_deadline() -> None:
    with start_server("waits", LAZY, "--max-calls-in-flight", "1") as server:
        options = {"milliseconds": 200.0}
        plan = make_plan(server.address, environment="waits-v1", options=options, retry_overload=True, timeout=1.0)
        (report,) = (await play(plan, Stage("crowded", 8, 4.0, 0.0))).reports
    assert set(report["errors"]["classes"]) == {"overload"}


@minutes
async def test_a_server_without_room_for_all_sessions() -> None:
    with start_server("frozen_lake", "--max-sessions", "5") as server:
        (report,) = (await play(make_plan(server.address, retry_overload=False), SHORT)).reports
    assert report["sessions"] == 5
    assert report["errors"]["classes"]["overload"]["calls"] == {"open": 9}  # three tries each
    assert "only 5 of 8 sessions could be opened" in report["warnings"]


@minutes
async def test_a_missed_deadline_is_counted_and_asked_again(server: ServerProcess) -> None:
    plan = make_plan(server.address, environment="waits-v1", options={"milliseconds": 300.0}, timeout=0.1)
    (report,) = (await play(plan, Stage("late", 2, 1.0, 0.0))).reports
    assert set(report["errors"]["classes"]) == {"deadline"}
    assert report["calls"]["step"]["count"] > 0  # the same step again had its reply


async def test_a_step_is_asked_for_again_with_its_own_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the session's player sent first: replies in columns are followed by the next steps at once."""
    stop, missed, failed = asyncio.Event(), asyncio.Event(), players.Players.failed

    def note(*arguments: Any) -> str:
        missed.set()
        return failed(*arguments)

    async def pause_server(playing: generator.Generator) -> None:
        paths = playing.players.servers[0].paths
        for steps in (1_000, 5_000):
            while paths["columns"] < steps:
                await asyncio.sleep(0.01)
            missed.clear()
            os.kill(server.pid, signal.SIGSTOP)
            await missed.wait()
            os.kill(server.pid, signal.SIGCONT)
        while paths["columns"] < 10_000:
            await asyncio.sleep(0.01)
        stop.set()

    monkeypatch.setattr(players.Players, "failed", note)
    with start_server("frozen_lake") as server:
        plan = make_plan(server.address, options={"size": 8}, timeout=0.5)
        (report,) = (await play(plan, Stage("stopped", 64, 60.0, 0.0), stop=stop, beside=pause_server)).reports
    assert set(report["errors"]["classes"]) == {"deadline"} and report["steps"] > 5_000


@minutes
async def test_a_session_that_never_answers_is_given_up_and_its_late_reply_ignored(server: ServerProcess) -> None:
    plan = make_plan(server.address, environment="waits-v1", options={"milliseconds": 1500.0}, timeout=0.1)
    played = await play(plan, Stage("silent", 2, 3.0, 0.0))
    (report,) = played.reports
    assert set(report["errors"]["classes"]) == {"deadline"}
    assert report["calls"]["open"]["count"] > 2
    assert "step" not in report["calls"]
    assert len(played.generator.players.all) == 2


async def test_steps_that_are_ready_share_a_message(server: ServerProcess) -> None:
    played = await play(make_plan(server.address), Stage("many", 64, 1.0, 0.0))
    (report,) = played.reports
    (driven,) = played.generator.players.servers
    assert isinstance(driven, LoadServer)
    assert report["calls"]["step"]["count"] > 8 * driven.messages_sent


async def kill_while_counted(server: ServerProcess, playing: generator.Generator, number: int = 0) -> None:
    """Kill the plan's server of this number once 50 of its steps have been counted."""
    players = playing.players
    while not players.log.counting:
        await asyncio.sleep(0.01)
    steps = players.servers[number].paths.total() + 50
    while players.servers[number].paths.total() < steps:
        await asyncio.sleep(0.01)
    server.kill()


@minutes
@pytest.mark.parametrize("wire", ["stream", "unary"])
async def test_a_server_that_dies_ends_the_run(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(players, "GIVE_UP_SECONDS", 0.3)
    with start_server("frozen_lake") as server:
        plan, kill = make_plan(server.address, wire=wire), partial(kill_while_counted, server)
        (report,) = (await play(plan, Stage("killed", 8, 60.0, 0.1), beside=kill)).reports
    assert report["ended"].startswith("no server answers")
    assert report["warnings"][0].startswith("ended early: no server answers")
    assert set(report["errors"]["classes"]) == {"transport"}
    assert report["steps"] > 0


@minutes
async def test_one_of_two_servers_dies_and_the_other_takes_over(server: ServerProcess) -> None:
    with start_server("frozen_lake") as other:
        plan, kill = make_plan(server.address, other.address), partial(kill_while_counted, other, number=1)
        (report,) = (await play(plan, Stage("halved", 8, 3.0, 0.1), beside=kill)).reports
    assert report["ended"] == ""
    first, second = report["replicas"]
    assert first["steps"] > 0 < second["steps"]
    assert (first["errors"], second["errors"] > 0) == (0, True)
    assert report["calls"]["open"]["count"] >= 12  # four moved


@minutes
async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "REFUSED_SECONDS", 0.1)
    with pytest.raises(RunEnded, match=r"no server answers: 127\.0\.0\.1:1: "):
        await play(make_plan("127.0.0.1:1"), SHORT)


@minutes
async def test_a_wrong_option_ends_the_run(server: ServerProcess) -> None:
    with pytest.raises(RunEnded, match="no_such_option"):
        await play(make_plan(server.address, options={"no_such_option": 1}), SHORT)
