"""Stages played by a generator in the test's own loop, against real servers; and the command as a whole."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from starpod.client.transport import Transport
from starpod.load.generator import Generator
from starpod.load.measurements import Interval, StageResult
from starpod.load.plan import ActionSource, LoadPlan, ServerAddress, Stage
from starpod.load.report import stage_report
from tests.support import ROOT, Done, ServerProcess, run_starpod, start_server

LAZY = str(ROOT / "tests" / "tools" / "load" / "lazy.py")
LAKE = ("Left", "Down", "Right", "Up")


@pytest.fixture(scope="package")
def server() -> Iterator[ServerProcess]:
    """frozen_lake and the environments of lazy.py."""
    with start_server("frozen_lake", "stalls", "waits", "breaks", LAZY) as process:
        yield process


def make_plan(*addresses: str, environment: str = "frozen_lake-v1", wire: Any = "stream", **more: Any) -> LoadPlan:
    actions = LAKE if environment.startswith("frozen") else ("go",)
    more = {"turns": ActionSource("random", actions), **more}
    places = tuple(ServerAddress(address) for address in addresses)
    return LoadPlan(places, Transport(), wire, environment, **more)


@dataclass
class Played:
    """Reports of the stages, and the generator that played them."""

    reports: list[dict[str, Any]]
    generator: Generator


async def play(
    plan: LoadPlan,
    *stages: Stage,
    stop: asyncio.Event | None = None,
    beside: Callable[[Generator], Coroutine[Any, Any, None]] | None = None,
) -> Played:
    """Play stages in this process, or until `stop`. The last report includes the closing of sessions."""
    place: list[StageResult] = []
    generator = Generator(plan, 0, lambda interval: place[-1].add(interval), stop or asyncio.Event())
    await generator.start()
    helper = asyncio.ensure_future(beside(generator)) if beside is not None else None
    for stage in stages:
        place.append(StageResult(stage, time.time()))
        await generator.prepare(stage)
        place[-1].summaries = [await generator.run(time.monotonic() + 0.02)]
        place[-1].ended = place[-1].summaries[0].ended
    if helper is not None:
        await helper
    closing: Interval = await generator.close()
    place[-1].add(closing)
    return Played([stage_report(result, plan) for result in place], generator)


@dataclass
class Loaded(Done):
    """A finished `starpod load`, and its JSON report."""

    report: dict[str, Any]


def run_load(*arguments: str, folder: Path | None = None) -> Loaded:
    """The whole command, in this process. With a folder it writes report.json there."""
    file = folder / "report.json" if folder is not None else None
    done = run_starpod("load", *arguments, *(("--json", str(file)) if file is not None else ()))
    report = json.loads(file.read_text()) if file is not None and file.exists() else {}
    return Loaded(**vars(done), report=report)


def command(*words: str) -> Sequence[str]:
    return [sys.executable, "-m", "starpod.cli.main", "load", *words]
