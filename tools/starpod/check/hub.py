"""`starpod hub`: serves all environments that are installed, checks each, and writes a page about each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from starpod.check.hub_pages import Entry, write_pages
from starpod.check.report import describe_results
from starpod.check.requirement import Requirement
from starpod.check.runner import EnvironmentReport, Unreachable, check
from starpod.check.suite import REQUIREMENTS, REWARD
from starpod.client import StarpodError, SyncFleet, Want
from starpod.client.catalog import expect_writable
from starpod.client.programs import ServiceFailed, ServiceRefused, started
from starpod.report.console import safe_console
from starpod.v1 import environment_pb2 as pb

FAMILIES = {
    "gymnasium": ("--gymnasium", "*"),
    "minigrid": ("--gymnasium", "minigrid:*"),
    "reasoning_gym": ("--reasoning-gym", "*"),
    "textarena": ("--textarena", "*"),
}
"""Packages whose environments need only be installed, by module: what `starpod serve` is told to host them all."""
MEASURED = 1.0
"""Seconds for which steps are counted."""
REQUIREMENT_SECONDS, CALL_SECONDS = 180.0, 60.0
"""Much longer than a check of one environment allows: many run at the same time."""


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, metavar="[WHAT TO SERVE]...", type=click.UNPROCESSED)
@click.option("--list", "only_list", is_flag=True, help="Print the ids and check nothing.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("hub"),
    show_default=True,
    help="Folder for the pages and hub.json.",
)
@click.option(
    "--at-once", type=click.IntRange(1), default=4, show_default=True, help="Environments checked at the same time."
)
@click.pass_context
def hub(context: click.Context, words: tuple[str, ...], only_list: bool, out: Path, at_once: int) -> None:
    """Check every environment that is installed, and write a page about each.

    Starpod's own, and those of Gymnasium, MiniGrid, Reasoning Gym and TextArena where these are installed: contract,
    determinism, snapshots, rewards, steps per second. Or those of WHAT TO SERVE, in the words of `starpod serve`:

    starpod hub bandit sokoban --reasoning-gym 'leg*'

    Exit status: 0 all pass, 1 one does not, 2 the call was wrong.
    """
    if not only_list:
        out.mkdir(parents=True, exist_ok=True)
        expect_writable(str(out / "hub.json"))
    everything = ["*", *(word for module, option in FAMILIES.items() if find_spec(module) for word in option)]
    console = safe_console()
    try:
        with started("the environment service", "serve", *(words or everything), "--port", "0") as address:
            with SyncFleet(address) as fleet:
                specs = sorted(fleet.describe(), key=lambda spec: spec.id)
            if only_list:
                for spec in specs:
                    click.echo(f"{spec.id}  {spec.version}  {spec.title}")
                return
            with _progress(console) as progress:
                task = progress.add_task(f"{len(specs)} environments", total=len(specs))
                entries = asyncio.run(_check_all(address, specs, at_once, lambda: progress.advance(task)))
                progress.update(task, description="steps per second", completed=0)
                for entry in entries:
                    entry.rate = measure(address, entry.spec.id)
                    progress.advance(task)
    except ServiceRefused as error:
        raise click.UsageError(error.said) from error
    except (ServiceFailed, Unreachable) as error:
        raise click.ClickException(str(error)) from error
    write_pages(entries, out)
    (out / "hub.json").write_text(json.dumps([_summary(entry) for entry in entries], indent=2) + "\n", encoding="utf-8")
    failed = [entry for entry in entries if not entry.passed]
    for entry in failed:
        console.print(f"[red]✗[/] {escape(entry.spec.id)}: {escape(entry.first_problem)}", highlight=False)
    console.print(f"{len(entries) - len(failed)} of {len(entries)} pass; pages: {out / 'index.html'}", highlight=False)
    context.exit(1 if failed else 0)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def _summary(entry: Entry) -> dict[str, Any]:
    capabilities = entry.spec.capabilities
    return {
        "id": entry.spec.id,
        "version": entry.spec.version,
        "title": entry.spec.title,
        "passed": entry.passed,
        "problem": entry.problem,
        "deterministic": capabilities.deterministic,
        "fork": capabilities.fork,
        "snapshot": capabilities.snapshot,
        "steps_per_second": entry.rate and round(entry.rate, 1),
        "seconds": round(entry.seconds, 1),
        "contract": describe_results(entry.contract),
        "rewards": describe_results(entry.rewards),
    }


async def _check_all(
    address: str, specs: Sequence[pb.EnvironmentSpec], at_once: int, advance: Callable[[], None]
) -> list[Entry]:
    room = asyncio.Semaphore(at_once)

    async def one(spec: pb.EnvironmentSpec) -> Entry:
        async with room:
            start = time.perf_counter()
            entry = Entry(spec, EnvironmentReport(spec.id, spec.version), EnvironmentReport(spec.id, spec.version))
            try:
                entry.contract, entry.rewards = [
                    await _check_one(address, spec.id, requirements) for requirements in (REQUIREMENTS, REWARD)
                ]
            except Unreachable as error:
                entry.problem = str(error)
            entry.seconds = time.perf_counter() - start
            advance()
            return entry

    return await asyncio.gather(*map(one, specs))


async def _check_one(address: str, id: str, requirements: Sequence[Requirement]) -> EnvironmentReport:
    report = await check(
        address, requirements, environments=[id], seconds=REQUIREMENT_SECONDS, call_seconds=CALL_SECONDS
    )
    return report.environments[0]


def measure(address: str, id: str) -> float | None:
    """Steps per second of one session that takes valid actions at random; None where it cannot be played."""
    rng = random.Random(0)
    with SyncFleet(address) as fleet:
        try:
            (session,) = fleet.open(id, seed=1, want=Want(valid_actions=True))
            observation, steps, seed, start = session.observation, 0, 1, time.perf_counter()
            while (passed := time.perf_counter() - start) < MEASURED or not steps:
                actions = observation.valid_actions
                transition = session.step(rng.choice(actions) if actions else "1")
                steps += 1
                observation = transition.observation
                if transition.done:
                    seed += 1
                    observation = session.reset(seed=seed)
            session.close()
        except StarpodError:
            return None
    return steps / passed
