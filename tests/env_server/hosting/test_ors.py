"""Environments of the Open Reward Standard as services, over a server of its own package."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

pytest.importorskip("openreward", reason="openreward is not installed: make test-hosting")

from openreward.api.environments.client import EnvironmentsAPI
from openreward.api.errors import ToolCallError

from starpod.client import JSON, Image, SyncFleet, ToolCall
from starpod.env_server.hosting.ors import host
from starpod.env_server.hosting.ors_server import ORSServer
from starpod.v1.untrusted import wait_seconds
from tests.env_server.hosting.checks import check_contract, check_recovery, check_refusal
from tests.env_server.hosting.checks import words as words_of
from tests.support import ServerProcess, start_server

SUMS, WALK = "ors-sums-v1", "ors-walk-v1"


@pytest.fixture(scope="module")
def ors() -> Iterator[str]:
    process = ServerProcess([sys.executable, "-m", "tests.env_server.hosting.ors_environments"])
    with contextlib.closing(process):
        yield f"http://{process.address}"


@pytest.fixture(scope="module")
def words(ors: str) -> tuple[str, ...]:
    sums, walk = f"{ors}/sums#success_at=1&deterministic=yes", f"{ors}/walk#deterministic=yes"
    return words_of("ors", sums, walk, f"{ors}/walk#id=unknown-v1")


def test_the_seed_picks_a_task_of_the_first_training_split(fleet: SyncFleet) -> None:
    told = [fleet.open(SUMS, seed=seed)[0].observation.text for seed in (0, 3, 8)]
    assert told == ["0 + 1 = ?", "3 + 1 = ?", "3 + 1 = ?"]


def test_text_answers_where_one_tool_takes_one_text(fleet: SyncFleet) -> None:
    for answer, right in (("4", True), ("5", False)):
        (session,) = fleet.open(SUMS, seed=3)
        end = session.step(answer)
        assert (end.reward, end.terminated, end.success) == (float(right), True, right)
        assert end.observation.text == ("Right." if right else "Wrong.")
        assert end.info == {"metadata": {"right": right}}


def test_tools_are_called_and_the_last_text_ends_the_walk(fleet: SyncFleet) -> None:
    (session,) = fleet.open(WALK, seed=0)
    assert session.observation.text == "Walk to 3."
    calls = ToolCall("walk", {"steps": 1}), JSON({"tool_name": "walk", "arguments": {"steps": 1}})
    for place, call in enumerate((*calls, '{"tool_name": "walk", "arguments": {"steps": 1}}'), 1):
        transition = session.step(call)
        text, picture = transition.observation.parts
        assert (text, transition.reward) == (f"You are at {place}.", 0.1)
        assert isinstance(picture, Image)
        assert picture.mime == "image/png"
    end = session.step("I am there.")
    assert (end.observation.text, end.reward, end.terminated, end.success) == ("You said: I am there.", 1.0, True, None)


def test_a_call_that_fits_no_tool_is_invalid_and_harms_nothing(fleet: SyncFleet) -> None:
    (session,) = fleet.open(WALK, seed=0)
    for call, reason in ((ToolCall("fly", {}), "not_found"), (ToolCall("walk", {"steps": "far"}), "input_validation")):
        transition = session.step(call)
        assert [outcome.valid for outcome in transition.outcomes] == [False]
        assert (transition.info["reason"], transition.reward, transition.terminated) == (reason, 0.0, False)
    assert not session.step(JSON([1])).outcomes[0].valid
    assert session.step(ToolCall("walk", {"steps": 3})).observation.parts[0] == "You are at 3."


def test_the_contract_is_kept(server: ServerProcess) -> None:
    check_contract(server, SUMS, WALK)


async def test_episodes_survive_a_killed_server_or_are_reported(server: ServerProcess) -> None:
    await check_recovery(server, WALK, [ToolCall("walk", {"steps": 1})], "unknown-v1")


def test_a_call_whose_connection_breaks_is_made_once(ors: str) -> None:
    with _cutting(ors) as (cut, connections):
        direct, cutting = ORSServer(ors), ORSServer(cut)
        session = direct.create("walk", "train", 0)
        before = direct.call("walk", session, "count", {})
        reply = cutting.call("walk", session, "walk", {"steps": 2})
        assert reply.output.blocks[0].text == "You are at 2."
        after = direct.call("walk", session, "count", {})
    first, last = (int(each.output.blocks[0].text) for each in (before, after))
    assert last == first + 1
    assert len(connections) > 1


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("/sum", "did you mean sums?"),
        ("", "there are sums, walk"),
        ("/sums#split=esy", "did you mean easy?"),
        ("/sums#concurrency=process", "concurrency is 'process'; use one of thread"),
        ("/sums?difficulty=2", "a running server takes no arguments"),
    ],
)
def test_unhostable_environments_are_reported(ors: str, place: str, told: str) -> None:
    check_refusal(host, ors + place, re.escape(told))


def test_a_busy_server_names_a_number_of_seconds_or_a_date() -> None:
    later, earlier = (formatdate(time.time() + seconds, usegmt=True) for seconds in (20, -20))
    waits = [wait_seconds(text) for text in ("3", "0", "", "soon", "-1", "nan", earlier)]
    assert waits == [3.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert 15 < wait_seconds(later) <= 20


def test_a_server_that_is_not_there_is_reported() -> None:
    check_refusal(host, "http://127.0.0.1:1/sums", r"no ORS server answers at http://127.0.0.1:1: .*refused")
    check_refusal(host, "sums", "http://HOST:PORT/ENVIRONMENT")


def test_the_packages_client_plays_our_environments() -> None:
    with (
        start_server("frozen_lake", "--http", "0", "--ors-server") as own,
        contextlib.closing(EnvironmentsAPI("", "")) as api,
    ):
        url = own.ready.split("as JSON at ")[1].split(",")[0]
        lake = api.get("starpod", variant="frozen_lake-v1", base_url=url)
        assert (lake.list_splits(), lake.num_tasks("train")) == (["train", "test"], 1000)
        (task,) = lake.get_task_range("test", 3, 4)
        assert [tool.name for tool in lake.list_tools()] == ["step"]
        with lake.session(task) as session, SyncFleet(own.address) as fleet:
            (direct,) = fleet.open("frozen_lake-v1", seed=task.task_spec["seed"])
            assert session.get_prompt()[-1].text == direct.observation.text
            for action in ("Right", "Down"):
                output, transition = session.call_tool("step", {"actions": [action]}), direct.step(action)
                assert output.blocks[0].text == transition.observation.text
                assert (output.reward, output.finished) == (transition.reward, transition.done)
            with pytest.raises(ToolCallError):
                session.call_tool("fly", {})
        with lake.session(split="train", index=0) as session:
            assert session.get_messages()[0].role == "user"


@contextlib.contextmanager
def _cutting(address: str) -> Iterator[tuple[str, list[socket.socket]]]:
    """A proxy that cuts its first connection once the id of the call came over it: its address and its connections."""
    target = address.removeprefix("http://").split(":")
    connections: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket, cut: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
                if cut and b"task_id" in data:
                    break
            time.sleep(0.01)
            sink.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                upstream = socket.create_connection((target[0], int(target[1])))
                threading.Thread(target=pump, args=(client, upstream, False), daemon=True).start()
                threading.Thread(target=pump, args=(upstream, client, not connections), daemon=True).start()
                connections.append(client)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
        listener.shutdown(socket.SHUT_RDWR)
