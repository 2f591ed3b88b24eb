"""Cost of WebShop by catalogue size: build, start, memory, latency by kind of step, steps per second. Linux only.

    python -m benchmarks.webshop.catalogues [--products 1000 100000 1181436] [--store PATH ...] [--seconds 10]

It builds a store of made-up products for each number, or uses stores built by `starpod webshop build`. Servers are
`starpod serve webshop` with such a store; the client is this process. The client plays episodes that a separate process
has recorded, whose searches no cache can answer. Steps per second are over the wire in observation mode text, and for
the smallest catalogue also in text_rich and html.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar

import numpy as np
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import child_process, origin, peak_bytes
from benchmarks.webshop import episodes, wire
from benchmarks.webshop.episodes import ShopEpisode, Waits
from benchmarks.webshop.original import CLICKS
from benchmarks.webshop.report import Build, Result, Steps, Wait, print_tables, write
from starpod.environments.webshop.store.store import Manifest
from tests.support import ROOT, children_of

WARM_UP, TIMED = 200, 500
"""Numbers of episodes of a latency measurement."""
STARTS = 3
WORKERS = 2
POLL_SECONDS = 0.05
PACKAGES = ("numpy", "numba", "textblob", "scipy")
"""Packages whose versions are recorded besides the usual ones. scipy is optional, but slows starts if installed."""

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
Tell = Callable[[str], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", type=int, nargs="*", default=[1_000, 100_000, 1_181_436], help="sizes to build")
    parser.add_argument("--store", type=Path, action="append", default=[], help="a store that is there; repeatable")
    parser.add_argument("--out", type=Path, help="where to build and keep the stores; default: a temporary folder")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of steps per second")
    parser.add_argument("--rounds", type=int, default=3, help="of them; medians are reported")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "benchmarks" / "webshop.json")
    parser.add_argument("--no-report", action="store_true", help="print the tables only, write nothing")
    arguments = parser.parse_args()
    sizes = sorted((Manifest.read(store).products, store) for store in arguments.store)
    built_already = {size for size, _ in sizes}
    jobs = [*sizes, *((size, None) for size in arguments.products if size not in built_already)]
    results: list[Result] = []
    with ExitStack() as stack:
        folder = arguments.out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="webshop-")))
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True), refresh_per_second=2))
        for size, store in sorted(jobs, key=lambda job: job[0]):
            task = progress.add_task(f"{size:,} products", total=None)

            def tell(what: str, size: int = size, task: int = task) -> None:
                progress.update(task, description=f"{size:,} products: {what}")  # type: ignore[arg-type]

            build_result = None
            if store is None:
                tell("building")
                store = folder / str(size)
                build_result = build(size, store)
            modes = ["text"] if results else ["text", "text_rich", "html"]
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(
                    measure(store, modes, arguments.sessions, arguments.seconds, arguments.rounds, tell)
                )
            results.append(replace(result, build=build_result))
            progress.update(task, description=f"{size:,} products", total=1, completed=1)
    print_tables(results)
    if not arguments.no_report:
        source = origin()
        source["machine"]["versions"] |= {name: version(name) for name in PACKAGES if find_spec(name)}
        write(arguments.json, results, source)


def build(products: int, out: Path) -> Build:
    """Run `starpod webshop build --synthetic N`. Raises RuntimeError with its output if it fails."""
    command = [sys.executable, "-m", "starpod.cli.main", "webshop", "build", "--synthetic", str(products)]
    with tempfile.TemporaryFile(mode="w+") as log:
        start, peak = time.perf_counter(), 0
        command += ["--out", str(out), "--force"]
        with child_process(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as process:
            while process.poll() is None:
                peak = max(peak, peak_bytes(process.pid))
                time.sleep(POLL_SECONDS)
        if process.returncode:
            log.seek(0)
            raise RuntimeError(log.read())
        return Build(time.perf_counter() - start, peak)


async def measure(store: Path, modes: Sequence[str], sessions: int, seconds: float, rounds: int, tell: Tell) -> Result:
    """Measure everything about one store. tell: called with a description of each part as it starts."""
    tell("recording what is played")
    all_episodes = call_in_process(episodes.record_at, store)
    warm_up, timed_episodes = all_episodes[:WARM_UP], all_episodes[WARM_UP : WARM_UP + TIMED]
    tell("starts")
    starts = [await wire.start(store) for _ in range(STARTS)]
    memory: dict[str, list[int]] = {}
    tell("one worker")
    server = wire.serve(store)
    try:
        memory["one server, started"] = [wire.private_bytes(server.pid)]
        over_the_wire = await wire.one_by_one(server.address, warm_up, timed_episodes)
        memory["one server, used"] = [wire.private_bytes(server.pid)]
        steps = []
        for mode in modes:
            tell(f"{sessions} sessions, {mode}")
            loads = await wire.all_at_once(server, all_episodes, sessions, seconds, rounds, mode)
            steps.append(Steps.of(mode, sessions, loads))
            memory.setdefault(f"one server, after {sessions} sessions", [wire.private_bytes(server.pid)])
    finally:
        server.close()
    tell(f"{WORKERS} workers")
    memory |= await memory_of_workers(store, warm_up, timed_episodes)
    manifest = Manifest.read(store)
    return Result(
        products=manifest.products,
        store_bytes=manifest.bytes,
        build=None,
        start=wire.Start(*(median(getattr(each, name) for each in starts) for name in ("ready", "first_open", "cpu"))),
        memory=memory,
        wire=summaries(over_the_wire),
        steps=steps,
    )


async def memory_of_workers(
    store: Path, warm_up: Sequence[ShopEpisode], timed: Sequence[ShopEpisode]
) -> dict[str, list[int]]:
    """Return the memory of each worker of one server. All workers play the same episodes."""
    server = wire.serve(store, "--workers", str(WORKERS))
    try:
        workers = children_of(server.pid)
        start_memory = [wire.private_bytes(worker) for worker in workers]
        for address in await wire.endpoints_of(server):
            await wire.one_by_one(address, warm_up, timed)
        final_memory = [wire.private_bytes(worker) for worker in workers]
    finally:
        server.close()
    return {f"each of {WORKERS} workers, started": start_memory, f"each of {WORKERS} workers, used": final_memory}


def call_in_process(
    call: Callable[Parameters, Returned], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> Returned:
    """Make a call in a separate process. If this one mapped a store, servers would share its pages."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args, **kwargs).result()


def summaries(waits: Waits) -> dict[str, Wait]:
    """Return medians and 99th percentiles of each kind of step, and of all clicks together."""
    clicks = [wait for kind in episodes.KINDS if kind != episodes.SEARCH for wait in waits[kind]]
    summary = {}
    for kind, seconds in {**waits, CLICKS: clicks}.items():
        p50, p99 = np.percentile(seconds, (50, 99))
        summary[kind] = Wait(len(seconds), float(p50), float(p99))
    return summary


if __name__ == "__main__":
    main()
