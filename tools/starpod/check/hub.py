"""`starpod hub`: serves all installed environments, checks each, and writes a page about each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import grpc
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from starpod.check.expectations import Unmet
from starpod.check.handle import Handle
from starpod.check.hub_pages import CheckedEnvironment, write_pages
from starpod.check.probe import Probe, Target
from starpod.check.report import describe_results
from starpod.check.requirement import Requirement
from starpod.check.runner import CannotCheck, EnvironmentReport, check, connect
from starpod.check.suite import REQUIREMENTS, REWARD
from starpod.client.programs import ServiceRefused, start_server
from starpod.client.transport import Transport
from starpod.remote.catalog import expect_writable, service_errors
from starpod.report.console import safe_console
from starpod.serving.options import duration
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub

SERVED: dict[str, str] = {
    "starpod": "*",
    "gymnasium": "gymnasium:*",
    "minigrid": "gymnasium:minigrid:*",
    "reasoning_gym": "reasoning-gym:*",
    "textarena": "textarena:*",
    "textworld": "textworld:*",
    "openenv": "openenv:*",
    "verifiers": "verifiers:*",
}
"""Word that serves all environments of a Python module. Each module gets its own server."""
PROCESSES = ("--workers", "2")
"""Worker processes of each server: two, so that episodes can be compared between processes."""
AT_ONCE = 4
"""Environments that are checked at the same time."""
ServedEnvironment = tuple[str, pb.EnvironmentSpec]
"""Address of the server process in which an environment is checked, and the environment's spec."""
MEASURED_SECONDS = 0.3
"""Seconds for which steps are counted to measure the rate."""
REQUIREMENT_SECONDS, CALL_SECONDS = 180.0, 60.0
"""Time limits of a requirement and of a call, longer than in `starpod check` because checks run in parallel."""
ENVIRONMENT_SECONDS = 600.0
"""Seconds for all checks of one environment. Some environments take half a minute to start."""


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Example: starpod hub bandit 'reasoning-gym:leg*' --out pages",
)
@click.argument("words", nargs=-1, metavar="[ENVIRONMENT]...", type=click.UNPROCESSED)
@click.option("--serve", is_flag=True, help="Serve the environments until Ctrl-C, and check nothing.")
@click.option(
    "--port", default=50051, type=click.IntRange(0, 65535), help="Port to listen on with --serve; 0: any free port."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("hub"),
    help="Folder for the pages and hub.json.",
)
@click.option(
    "--minutes",
    "seconds",
    type=duration(1e-9, bare="m"),
    show_default="no limit",
    help="Time after which no further check starts; a number alone is in minutes.",
)
@click.pass_context
def hub(
    context: click.Context, words: tuple[str, ...], serve: bool, port: int, out: Path, seconds: float | None
) -> None:
    """Check every environment that is installed and write a page about each, or list and serve them.

    These are Starpod's own environments and, if they are installed, those of Gymnasium, MiniGrid, Reasoning Gym,
    TextArena, OpenEnv's packages and tasksets of verifiers, and the TextWorld games of this folder. Each is checked
    for contract, determinism, snapshots, rewards and steps per second. To check others, name each ENVIRONMENT as for
    `starpod serve`.

    Exit status: 0 all pass, 1 one does not, 2 usage error.
    """
    all_arguments = [words] if words else [(word,) for module, word in SERVED.items() if find_spec(module)]
    if serve:
        _serve([argument for arguments in all_arguments for argument in arguments], port)
        return
    out.mkdir(parents=True, exist_ok=True)
    expect_writable(str(out / "hub.json"))
    console = safe_console()
    entries: list[CheckedEnvironment] = []
    try:
        with service_errors():
            _check_and_measure(all_arguments, entries, console, seconds, must_start=bool(words))
    except KeyboardInterrupt:
        console.print("interrupted: results of the finished checks")
    except CannotCheck as error:
        raise click.ClickException(str(error)) from error
    entries.sort(key=lambda entry: entry.spec.id)
    write_pages(entries, out)
    (out / "hub.json").write_text(
        json.dumps([_summarise(entry) for entry in entries], indent=2) + "\n", encoding="utf-8"
    )
    passed_count = sum(entry.passed for entry in entries)
    console.print(f"{passed_count} of {len(entries)} pass; pages: {out / 'index.html'}", markup=False, highlight=False)
    context.exit(0 if passed_count == len(entries) else 1)


def _check_and_measure(
    all_arguments: Sequence[Sequence[str]],
    entries: list[CheckedEnvironment],
    console: Console,
    seconds: float | None,
    *,
    must_start: bool,
) -> None:
    """Serve environments, check them, and then measure their steps per second one by one.

    Args:
        entries: receives each environment once it is checked.
        seconds: no check begins after this time; None: no limit.
        must_start: whether a server that has nothing to serve is an error.
    """
    with contextlib.ExitStack() as servers:

        def start(arguments: Sequence[str]) -> list[ServedEnvironment]:
            try:
                return _assign_processes(servers.enter_context(start_server(*PROCESSES, *arguments)))
            except ServiceRefused as error:
                if must_start:
                    raise
                # No environment of it is installed.
                console.print(f"{arguments[-1]}: {error.stderr}", markup=False, highlight=False)
                return []

        progress = servers.enter_context(_make_progress(console))
        task = progress.add_task("environments", total=0)

        def report_progress(hosted: int = 0, entry: CheckedEnvironment | None = None) -> None:
            progress.update(task, total=(progress.tasks[0].total or 0) + hosted, advance=entry is not None)
            if entry:
                entries.append(entry)
            if entry and not entry.passed:
                console.print(f"[red]✗[/] {escape(entry.spec.id)}: {escape(entry.first_problem)}", highlight=False)

        deadline = time.monotonic() + seconds if seconds else math.inf
        asyncio.run(check_all(all_arguments, start, report_progress, until=deadline))
        progress.update(task, description="steps per second", completed=0)
        for entry in entries:
            entry.rate = asyncio.run(measure(entry.address, entry.spec.id))
            progress.advance(task)


def _serve(words: Sequence[str], port: int) -> None:
    """Serve the environments in one process until it is interrupted. Print the environments, then the address."""
    try:
        with service_errors(), start_server(*words, port=port) as address:
            places = _assign_processes(address)
            for spec in sorted((spec for _, spec in places), key=lambda spec: spec.id):
                click.echo(f"{spec.id}  {spec.version}  {spec.title}")
            click.echo(f"Serving {len(places)} environments on {address}")
            threading.Event().wait()
    except KeyboardInterrupt:
        return


def _assign_processes(address: str) -> list[ServedEnvironment]:
    """Assign each environment to one of the server's processes. Its check compares with the other process."""
    with grpc.insecure_channel(address) as channel:
        server = EnvironmentServiceStub(channel).Describe(pb.DescribeRequest())
    newest_specs = {spec.id: spec for spec in reversed(server.environments)}
    return list(zip(itertools.cycle(server.endpoints or [address]), newest_specs.values(), strict=False))


def _make_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _summarise(entry: CheckedEnvironment) -> dict[str, Any]:
    capabilities = entry.spec.capabilities
    return {
        "id": entry.spec.id,
        "version": entry.spec.version,
        "title": entry.spec.title,
        "passed": entry.passed,
        "problem": entry.first_problem,
        "deterministic": capabilities.deterministic,
        "fork": capabilities.fork,
        "snapshot": capabilities.snapshot,
        "steps_per_second": entry.rate and round(entry.rate, 1),
        "seconds": round(entry.seconds, 1),
        "contract": describe_results(entry.contract),
        "rewards": describe_results(entry.rewards),
    }


async def check_all(
    all_arguments: Sequence[Sequence[str]],
    start: Callable[[Sequence[str]], list[ServedEnvironment]],
    report_progress: Callable[..., None],
    *,
    until: float,
) -> None:
    """Start the servers at the same time, and check what they host as soon as they are ready.

    The servers take turns, with one environment each, so that every server gets a share if time is short.

    Args:
        start: starts a server and returns what it hosts.
        report_progress: called with hosted=N for a server with N environments, and with entry=E for each check.
        until: no check begins after this instant of `time.monotonic`.
    """
    pool, slots = ThreadPoolExecutor(len(all_arguments)), asyncio.Semaphore(AT_ONCE)
    queue: deque[deque[ServedEnvironment]] = deque()  # one deque per server, in the order of their turns

    async def serve(words: Sequence[str]) -> None:
        places = await asyncio.get_running_loop().run_in_executor(pool, start, words)
        report_progress(hosted=len(places))
        if places:
            queue.appendleft(deque(places))
        await asyncio.gather(*(check_next() for _ in places))

    async def check_next() -> None:
        async with slots:
            places = queue.popleft()
            address, spec = places.popleft()
            if places:
                queue.append(places)
            if time.monotonic() > until:
                no_results = EnvironmentReport(spec.id, spec.version)
                report_progress(
                    entry=CheckedEnvironment(spec, address, no_results, no_results, problem="not checked: out of time")
                )
            else:
                report_progress(entry=await examine(address, spec))

    with pool:
        await asyncio.gather(*map(serve, all_arguments))


async def examine(address: str, spec: pb.EnvironmentSpec) -> CheckedEnvironment:
    start = time.perf_counter()
    entry = CheckedEnvironment(
        spec, address, EnvironmentReport(spec.id, spec.version), EnvironmentReport(spec.id, spec.version)
    )
    try:
        async with asyncio.timeout(ENVIRONMENT_SECONDS):
            entry.contract = await _check_one(address, spec.id, REQUIREMENTS)
            entry.rewards = await _check_one(address, spec.id, REWARD)
    except CannotCheck as error:
        entry.problem = str(error)
    except TimeoutError:
        entry.problem = f"its check did not end within {ENVIRONMENT_SECONDS:g} s"
    entry.seconds = time.perf_counter() - start
    return entry


async def _check_one(address: str, id: str, requirements: Sequence[Requirement]) -> EnvironmentReport:
    report = await check(
        address, requirements, environments=[id], seconds=REQUIREMENT_SECONDS, call_seconds=CALL_SECONDS
    )
    return report.environments[0]


async def measure(address: str, id: str) -> float | None:
    """Return the steps per second of one session with random actions, or None if no episode can be played."""
    connection = connect(address, Transport(), CALL_SECONDS)
    try:
        server: pb.DescribeResponse = await connection.call(pb.DescribeRequest(environment_id=id))
        target = Target(connection, server, server.environments[0])
        probe = Probe(target)
        rng, steps = random.Random(0), 0
        handle = await target.begin(probe)
        observation, start = handle.session.observation, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < MEASURED_SECONDS or not steps:
            transition = await handle.step([rng.choice(probe.actions.choices(observation))])
            steps += 1
            observation = transition.observation
            if transition.end_reason:
                reply = await connection.call(handle.reset_request(seed=steps))
                handle, observation = Handle(connection, reply.session), reply.session.observation
        await probe.clean_up()
    except (Unmet, grpc.aio.AioRpcError):
        return None
    finally:
        await connection.close()
    return steps / elapsed
