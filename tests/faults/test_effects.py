"""Servers are killed while their environments wait for a judge, and no judge is asked twice."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from starpod.client import Fleet
from tests.fake_openai import Model
from tests.faults.episodes import QUICK
from tests.support import start_server
from tests.waiting import eventually

MODULE = ("tests/env_server/judged.py",)


@pytest.fixture
def model() -> Iterator[Model]:
    with Model() as model:
        yield model


def entries(journal: Path) -> list[dict[str, Any]]:
    """Return the entries of a journal."""
    return [json.loads(text) for path in journal.glob("*/*") if (text := path.read_text())]


async def test_a_server_is_killed_between_a_reply_and_the_end_of_the_step(model: Model, tmp_path: Path) -> None:
    lingering = {**model.variables, "STARPOD_TEST_LINGER": "60"}
    with start_server(*MODULE, "--effects", str(tmp_path), environment=lingering) as server:
        async with Fleet(server.address, **QUICK) as fleet:
            (session,) = await fleet.open("judged-v1", seed=1)
            step = asyncio.create_task(session.step("hello"))
            await eventually(lambda: len(entries(tmp_path)) == 3)
            await asyncio.to_thread(server.restart, {"STARPOD_TEST_LINGER": "0"})
            first = await step
            await asyncio.to_thread(server.restart)
            second = await session.step("bye")
            assert session.recoveries == 2
    model.asked_once(5)
    replies = {(entry["turn"], entry["number"]): entry["reply"] for entry in entries(tmp_path)}
    start, turns = replies[None, 1], [replies[turn, 1] for turn in (0, 1)]
    assert first.observation.text == f"1: {start} | hello | {turns[0]}"
    assert second.observation.text == f"2: {start} | hello | {turns[0]} | bye | {turns[1]}"
    assert [first.reward, second.reward] == [replies[turn, 2] for turn in (0, 1)]


async def test_without_a_journal_a_session_continues_from_its_snapshot(model: Model) -> None:
    with start_server(*MODULE, environment=model.variables) as server:
        async with Fleet(server.address, **QUICK) as fleet:
            (session,) = await fleet.open("judged-v1", seed=1)
            for line in ("hello", "again"):
                await session.step(line)
            await asyncio.to_thread(server.restart)
            assert (await session.step("more")).observation.text.startswith("3: ")
            assert session.recoveries == 1
    model.asked_once(7)
