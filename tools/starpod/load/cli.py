"""`starpod load`: the command line of the load generator."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from starpod.load.comparison import compare_loads
from starpod.load.discovery import make_plan, make_stages
from starpod.load.measurements import StageResult
from starpod.load.page import write_page
from starpod.load.plan import EXTRAS, LoadPlan, Stage, Think, write_recording
from starpod.load.processes import GeneratorProcesses, RunFailed
from starpod.load.report import FORMAT, document, judge, stage_report
from starpod.load.requirements import find_rate, parse_requirement
from starpod.load.screen import LoadScreen
from starpod.remote.catalog import ACCESS, JSON, OPTIONS, VERSION, WORD, access_options, write_report
from starpod.report.console import safe_console
from starpod.serving.options import Command, ParsedOption, duration
from starpod.v1.spelling import nearest

WRITTEN = click.Path(dir_okay=False, path_type=Path)
INTERRUPTED = 130
HIGHEST_RATE = 1_000_000
"""Maximum of --rate, in steps per second, and of each number of --ramp."""


def _parse_mix(text: str) -> dict[str, float]:
    mix = {}
    for part in text.split(","):
        call, equals, share = part.strip().partition("=")
        if call not in EXTRAS:
            raise ValueError(f"{call!r} cannot be mixed in{nearest(call, EXTRAS)}")
        try:
            mix[call] = float(share) if equals else -1.0
        except ValueError:
            mix[call] = -1.0
        if not 0 <= mix[call] <= 1:
            raise ValueError(f"{part!r} is not CALL=SHARE with a share from 0 to 1, as in render=0.1")
    if sum(mix.values()) > 1:
        raise ValueError(f"the shares of {text!r} add up to more than 1")
    return mix


def _parse_ramp(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if not all(0 < value <= HIGHEST_RATE for value in values):
        raise ValueError(f"{text!r} is not a list of numbers above 0 and up to {HIGHEST_RATE:,}, as in 16,64,256")
    return values


def _parse_rate(text: str) -> float:
    try:
        (rate,) = _parse_ramp(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a number above 0 and up to {HIGHEST_RATE:,}: leave --rate out to go as fast as the "
            "server replies"
        ) from None
    return rate


def _parse_report(text: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(text).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{text} cannot be read: {error}") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise ValueError(f"{text} is not a report of starpod load; --json writes one")
    return report


def _parse_policy(text: str) -> tuple[str, Path | None]:
    kind, _, file = text.partition(":")
    if kind in ("random", "expert") and not file:
        return kind, None
    if kind == "recorded" and file:
        return kind, Path(file)
    raise ValueError(f"{text!r} is not random, expert or recorded:FILE")


REQUIREMENT = ParsedOption(parse_requirement)


@click.command(
    cls=Command,
    headings={
        "What to play": ["environment", "version", "assignments", "policy", "mix", "episodes_per_session", "seed"],
        "Load": ["sessions", "seconds", "warmup", "rate", "arrivals", "think", "ramp", "targets", "processes"],
        "Calls": ["timeout", "on_overload"],
        "Results": ["requirements", "compared", "json_file", "html_file", "record"],
        "Access to the server": ACCESS,
    },
    epilog="Example: starpod load frozen_lake --sessions 64 --seconds 30 --require 'step.p99<50ms'",
)
@click.argument("word", metavar="ENVIRONMENT", type=WORD, required=False)
@access_options
@click.option(
    "--environment", "-e", metavar="NAME", help="Environment of the server to play, if ENVIRONMENT is only an ADDRESS."
)
@VERSION
@OPTIONS
@click.option("--sessions", type=click.IntRange(1), default=16, help="Number of sessions to keep open.")
@click.option(
    "--seconds", type=duration(0.1), default="10s", help="Length of a stage, as 10s, 2m or a number of seconds."
)
@click.option(
    "--warmup", type=duration(), show_default="20% of a stage, at most 5s", help="Time before a stage is measured."
)
@click.option(
    "--rate",
    type=ParsedOption(_parse_rate, "number"),
    help="Steps that are due per second, as an open loop. Without it, the loop is closed.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "constant"]),
    default="poisson",
    help="Gaps between the steps of an open loop. poisson: random and independent. constant: all equal.",
)
@click.option(
    "--think",
    type=ParsedOption(Think),
    default="0",
    metavar="DISTRIBUTION",
    help="Pause before each step of a closed loop: 50ms, exponential:MEAN, uniform:1ms..9ms or lognormal:MEDIAN,SIGMA.",
)
@click.option(
    "--ramp",
    type=ParsedOption(_parse_ramp),
    metavar="N,N,...",
    help="Run a stage for each value, which is a number of sessions, or with --rate a rate.",
)
@click.option(
    "--find-rate",
    "targets",
    type=REQUIREMENT,
    multiple=True,
    metavar="REQUIREMENT",
    help="Search for the highest rate at which this holds, such as 'step.p99<20ms'. Repeatable.",
)
@click.option(
    "--policy",
    type=ParsedOption(_parse_policy),
    default="random",
    metavar="random|expert|recorded:FILE",
    help="Source of actions: random valid ones, those of the environment's expert, or those of a file from --record.",
)
@click.option(
    "--mix",
    type=ParsedOption(_parse_mix),
    metavar="CALL=SHARE,...",
    help="Further calls per step, such as render=0.1,fork=0.02. There are render, fork, snapshot and renew.",
)
@click.option(
    "--episodes-per-session",
    type=click.IntRange(0),
    default=0,
    help="Number of episodes after which a session is closed and another one is opened; 0: never.",
)
@click.option(
    "--workers", "processes", type=click.IntRange(1, 256), default=1, help="Number of processes that generate the load."
)
@click.option(
    "--timeout", type=duration(), default="30s", help="Time limit of one call, as 30s, 500ms or a number of seconds."
)
@click.option(
    "--on-overload",
    type=click.Choice(["retry", "count"]),
    default="retry",
    help="What to do if the server refuses a call because it is overloaded. retry: wait as long as it says, and call "
    "again. count: count the call as failed.",
)
@click.option("--seed", type=click.IntRange(0, 2**62), default=0, help="Seed of all random streams.")
@click.option(
    "--record", type=WRITTEN, metavar="FILE", help="File for the played episodes, for a later --policy recorded:FILE."
)
@click.option(
    "--require",
    "requirements",
    type=REQUIREMENT,
    multiple=True,
    metavar="REQUIREMENT",
    help="Exit with status 1 unless this holds, such as 'step.p99<20ms' or 'errors=0'. Repeatable.",
)
@click.option(
    "--compare",
    "compared",
    type=ParsedOption(_parse_report),
    nargs=2,
    metavar="A.json B.json",
    help="Show the changes from report A to report B of --json, and run nothing.",
)
@JSON
@click.option("--html", "html_file", type=WRITTEN, metavar="FILE", help="File for the report as a page.")
@click.pass_context
def load(context: click.Context, /, **values: Any) -> None:
    """Put load on the servers of ENVIRONMENT and report what they sustained.

    ENVIRONMENT is ADDRESS/NAME at a server (host:port, several with commas), or ADDRESS with --environment. A NAME,
    FILE.py, FILE.py:CLASS or FAMILY:NAME is served by this command.

    In a closed loop, which is the default, each session steps again as soon as its reply arrives. In an open loop
    (--rate), steps are due on a schedule, whatever the server does, and a latency begins when the step was due.

    Exit status: 0 all requirements are met, 1 one is not met or the run ended early, 2 usage error.
    """
    console = safe_console(stderr=values["json_file"] == "-")
    if values["compared"]:
        _compare(console, *values["compared"], json_file=values["json_file"])
        return
    stages = make_stages(values)
    plan, server = make_plan(values)
    start_time = time.time()
    screen = LoadScreen(console)
    with GeneratorProcesses(plan, screen.watch) as processes:
        run = _StageRunner(plan, screen, processes)
        search = find_rate(stages[0], values["targets"], run.play) if values["targets"] else None
        for stage in () if search else stages:
            if run.play(stage) is None:
                break
        run.close()
    words = sys.argv[sys.argv.index("load") :] if "load" in sys.argv else ["load", *sys.argv[1:]]
    report = document(plan, server, run.reports, command=shlex.join(["starpod", *words]), start_time=start_time)
    reports = run.reports
    if search is not None:
        reports = [] if search.rate is None else run.reports[-1:]
        report["search"] = {
            "targets": [target.text for target in values["targets"]],
            "rate": search.rate,
            "probes": [asdict(probe) for probe in search.probes],
        }
    report["requirements"] = judge(values["requirements"], reports)
    if search is not None:
        screen.search(search)
        screen.remarks(report)
    else:
        screen.report(report)
    write_report(values["json_file"], json.dumps(report) + "\n")
    if values["html_file"]:
        write_page(report, values["html_file"])
    if values["record"]:
        write_recording(values["record"], plan.environment_id, processes.recorded)
        console.print(f"{len(processes.recorded):,} episodes in {values['record']}", markup=False, highlight=False)
    if processes.interrupted:
        context.exit(INTERRUPTED)
    has_failed = (
        not all(verdict["met"] for verdict in report["requirements"])
        or any(stage["ended"] for stage in report["stages"])
        or (search is not None and search.rate is None)
    )
    context.exit(1 if has_failed else 0)


@dataclass
class _StageRunner:
    """The stages of a run that were played so far, and their reports."""

    plan: LoadPlan
    screen: LoadScreen
    processes: GeneratorProcesses
    reports: list[dict[str, Any]] = field(default_factory=list)
    last: StageResult | None = None

    def play(self, stage: Stage) -> dict[str, Any] | None:
        """Play a stage and return its report, or None if the run ends with it."""
        try:
            self.last = self.processes.run(stage)
        except RunFailed as error:
            if self.last is None:
                raise click.ClickException(str(error)) from None
            self.last.ended = f"the next stage could not begin: {error}"
            return None
        report = stage_report(self.last, self.plan)
        self.reports.append(report)
        self.screen.stage(report)
        return None if self.last.ended or self.last.interrupted else report

    def close(self) -> None:
        """Close the sessions, and replace the last stage's report by one that counts the closing calls."""
        if self.last is not None:
            self.processes.close(self.last)
            self.reports[-1] = stage_report(self.last, self.plan)


def _compare(console: Console, before: Mapping[str, Any], after: Mapping[str, Any], *, json_file: str) -> None:
    try:
        comparison = compare_loads(before, after)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    LoadScreen(console).comparison(comparison)
    write_report(json_file, json.dumps(comparison.as_json()) + "\n")
