"""`starpod load`: the command line of the load generator."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from starpod.client.catalog import access_options, parse_options
from starpod.client.console import safe_console
from starpod.client.figures import show
from starpod.client.load.comparison import compare
from starpod.client.load.conductor import Broken, Conductor
from starpod.client.load.html import write_page
from starpod.client.load.plan import EXTRAS, Place, Plan, Stage, Turns
from starpod.client.load.policies import read_recording, write_recording
from starpod.client.load.report import FORMAT, document, judge, stage_report
from starpod.client.load.schedule import Arrivals, Think, parse_duration
from starpod.client.load.screen import Screen
from starpod.client.load.search import Found, find_rate
from starpod.client.load.servers import check_plan, choose_wire, find_openenv, find_servers, openenv_actions
from starpod.client.load.thresholds import Requirement, parse_requirement
from starpod.client.spelling import nearest

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
WRITTEN = click.Path(dir_okay=False, path_type=Path)
WARMUP_SHARE = 0.2
LONGEST_WARMUP = 5.0
INTERRUPTED = 130


class _Parsed(click.ParamType[Any]):
    """A parameter that a function reads; its ValueError becomes the message."""

    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


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
        values = []
    if not values or min(values) <= 0:
        raise ValueError(f"{text!r} is not a list of numbers above 0, as in 16,64,256")
    return values


def _parse_report(text: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(text).read_text(encoding="utf-8"))
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


DURATION = _Parsed("duration", parse_duration)
REQUIREMENT = _Parsed("requirement", parse_requirement)


@click.command()
@click.argument("address", required=False)
@access_options
@click.option("--environment", "-e", metavar="NAME", help="The environment to play.")
@click.option("--version", default="", metavar="VERSION", help="This version exactly, instead of the newest.")
@click.option("--option", "assignments", multiple=True, metavar="KEY=VALUE", help="An environment option. Repeatable.")
@click.option("--sessions", type=click.IntRange(1), default=16, show_default=True, help="Sessions to keep open.")
@click.option("--seconds", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Length of a stage.")
@click.option("--warmup", type=DURATION, metavar="DURATION", help="Not counted. [default: 20% of a stage, 5s at most]")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Steps due per second: an open loop.")
@click.option("--arrivals", type=click.Choice(["poisson", "constant"]), default="poisson", show_default=True)
@click.option(
    "--think",
    type=_Parsed("think", Think),
    default="0",
    metavar="DISTRIBUTION",
    show_default=True,
    help="Pause before each step of a closed loop: 50ms, exponential:50ms, uniform:1ms..9ms, lognormal:2s,0.8.",
)
@click.option(
    "--ramp",
    type=_Parsed("ramp", _parse_ramp),
    metavar="N,N,...",
    help="One stage for each: numbers of sessions, or rates where --rate is given too.",
)
@click.option(
    "--find-rate",
    "targets",
    type=REQUIREMENT,
    multiple=True,
    metavar="REQUIREMENT",
    help="Search the highest rate that keeps this, as in 'step.p99<20ms'. Repeatable.",
)
@click.option(
    "--policy",
    type=_Parsed("policy", _parse_policy),
    default="random",
    show_default=True,
    metavar="random|expert|recorded:FILE",
    help="What the agents do.",
)
@click.option(
    "--action",
    "actions",
    multiple=True,
    metavar="TEXT",
    help="What random agents choose from, instead of the environment's own actions. Repeatable.",
)
@click.option(
    "--mix",
    type=_Parsed("mix", _parse_mix),
    metavar="CALL=SHARE,...",
    help="Further calls per step: render, fork, snapshot, renew.",
)
@click.option(
    "--episodes-per-session",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Close a session and open another after so many episodes; 0: never.",
)
@click.option("--transport", type=click.Choice(["auto", "stream", "unary"]), default="auto", show_default=True)
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True, help="Generator processes.")
@click.option("--timeout", type=DURATION, default="30s", show_default=True, metavar="DURATION", help="Of one call.")
@click.option(
    "--on-overload",
    type=click.Choice(["retry", "count"]),
    default="retry",
    show_default=True,
    help="Wait as the server says and ask again, or count the call as failed.",
)
@click.option("--seed", type=click.IntRange(0, 2**62), default=0, show_default=True, help="Of everything random.")
@click.option("--record", type=WRITTEN, metavar="FILE", help="Write what was played, for --policy recorded:FILE.")
@click.option(
    "--require",
    "requirements",
    type=REQUIREMENT,
    multiple=True,
    metavar="REQUIREMENT",
    help="Exit with 1 unless this holds, as in 'step.p99<20ms', 'errors=0', 'steps_per_second>1000'.",
)
@click.option(
    "--against",
    type=click.Choice(["starpod", "openenv"]),
    default="starpod",
    show_default=True,
    help="What ADDRESS is: host:port of Starpod servers, or the URL of an OpenEnv server.",
)
@click.option(
    "--compare",
    "compared",
    type=_Parsed("report", _parse_report),
    nargs=2,
    metavar="A.json B.json",
    help="Say what changed from one report to another; nothing is run.",
)
@click.option(
    "--json", "json_file", metavar="FILE", default="", help="Write the report as JSON; - for standard output."
)
@click.option("--html", "html_file", type=WRITTEN, metavar="FILE", help="Write the report as a page.")
@click.pass_context
def load(context: click.Context, /, **given: Any) -> None:
    """Put load on the servers at ADDRESS (host:port, several with commas) and report what they held.

    Closed loop: each of --sessions steps again as soon as its reply is there. Open loop (--rate): steps are due on a
    schedule, whatever the server does, and latencies count from when they were due.

    Exit status: 0 done and all requirements met, 1 one is not met or the run ended early, 2 the call was wrong.
    """
    console = safe_console(stderr=given["json_file"] == "-")
    if given["compared"]:
        _compare(console, *given["compared"], json_file=given["json_file"])
        return
    stages = _make_stages(given)
    plan, server = _make_plan(given)
    started = time.time()
    with Screen(console) as screen, _Run(plan, screen) as run:
        found = _search(stages[0], given["targets"], run) if given["targets"] else None
        for stage in () if found else stages:
            if run.play(stage) is None:
                break
        run.close()
    command = " ".join(["starpod", "load", *map(shlex.quote, _words())])
    report = document(plan, server, run.reports, command=command, started=started)
    judged = run.reports if found is None else [stage for stage in run.reports if _is_final(stage, found)]
    report["requirements"] = judge(given["requirements"], judged)
    if found is not None:
        report["search"] = {
            "targets": [target.text for target in given["targets"]],
            "rate": found.rate,
            "probes": [probe.as_json() for probe in found.probes],
        }
    _finish(given, report, screen, found)
    if given["record"]:
        write_recording(given["record"], plan.environment_id, run.recorded)
        console.print(f"{len(run.recorded):,} episodes in {given['record']}", highlight=False)
    if run.interrupted:
        context.exit(INTERRUPTED)
    failed = (
        not all(verdict["met"] for verdict in report["requirements"])
        or any(stage["ended"] for stage in report["stages"])
        or (found is not None and found.rate is None)
    )
    context.exit(1 if failed else 0)


class _Run:
    """The stages that were played, and their reports."""

    def __init__(self, plan: Plan, screen: Screen) -> None:
        self.reports: list[dict[str, Any]] = []
        self._plan = plan
        self._screen = screen
        self._conductor = Conductor(plan, screen.watch)
        self._last: Any = None

    def __enter__(self) -> _Run:
        self._conductor.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._conductor.__exit__(*exception)

    @property
    def interrupted(self) -> bool:
        return self._conductor.interrupted

    @property
    def recorded(self) -> list[dict[str, Any]]:
        return self._conductor.recorded

    def play(self, stage: Stage) -> dict[str, Any] | None:
        """The report of a stage; None if the run ends with it."""
        try:
            self._last = self._conductor.run(stage)
        except Broken as error:
            if self.reports:
                self.reports[-1]["warnings"].append(f"the next stage could not begin: {error}")
                self.reports[-1]["ended"] = self.reports[-1]["ended"] or str(error)
                return None
            raise click.ClickException(str(error)) from None
        report = stage_report(self._last, self._plan)
        self.reports.append(report)
        self._screen.stage(report)
        return None if self._last.ended or self._last.interrupted else report

    def close(self) -> None:
        """Ends the sessions and writes what that took into the last stage's report."""
        if self._last is not None:
            self._conductor.close(self._last)
            self.reports[-1] = {**self.reports[-1], **stage_report(self._last, self._plan)}


def _search(stage: Stage, targets: Sequence[Requirement], run: _Run) -> Found:
    return find_rate(stage, targets, run.play)


def _is_final(stage: Mapping[str, Any], found: Found) -> bool:
    return bool(found.stages) and stage["name"] == found.stages[-1]["name"] and found.rate is not None


def _make_plan(given: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan and what the servers say of themselves. Raises ClickException for whatever does not fit together."""
    address, access = given["address"], given["access"]
    if not address:
        raise click.UsageError("give the ADDRESS of a server, as in 127.0.0.1:50051")
    if given["think"] and (given["rate"] or given["targets"]):
        raise click.UsageError("--think is for closed loops, --rate and --find-rate make an open one: leave one out")
    if given["ramp"] and given["targets"]:
        raise click.UsageError("--ramp and --find-rate both say which rates to try: leave one out")
    kind, recording = given["policy"]
    if given["actions"] and kind == "recorded":
        raise click.UsageError("a recording has its own actions: leave --action out")
    plan = Plan(
        places=(),
        transport=access,
        wire="unary",
        mix=given["mix"] or {},
        think=given["think"],
        episodes_per_session=given["episodes_per_session"],
        seed=given["seed"],
        timeout=given["timeout"],
        retry_overload=given["on_overload"] == "retry",
        processes=given["processes"],
        record=given["record"] is not None,
    )
    if given["against"] == "openenv":
        return _openenv_plan(plan, given, address, kind, recording)
    if not given["environment"]:
        raise click.UsageError("give the --environment to play; starpod list ADDRESS tells which there are")
    servers = find_servers(address, access, given["environment"], given["version"])
    spec = servers.spec
    plan = replace(
        plan,
        places=servers.places,
        wire=choose_wire(given["transport"], servers.description),
        environment_id=spec.id,
        version=spec.version,
        options=parse_options(spec, given["assignments"]),
        turns=_turns(kind, recording, given["actions"] or tuple(spec.action_space.names), spec.id),
    )
    plan = replace(plan, columns=plan.wire == "stream" and servers.description.capabilities.step_columns)
    check_plan(plan, spec)
    return plan, servers.as_json()


def _openenv_plan(
    plan: Plan, given: Mapping[str, Any], url: str, kind: str, recording: Path | None
) -> tuple[Plan, dict[str, Any]]:
    for name, what in (("environment", "one environment"), ("mix", "no such calls"), ("assignments", "no options")):
        if given[name]:
            option = "option" if name == "assignments" else name
            raise click.UsageError(f"an OpenEnv server has {what}: leave --{option} out")
    if kind == "expert":
        raise click.UsageError("an OpenEnv server has no expert: use --action or a recording")
    server = find_openenv(url)
    schema = server.pop("action_schema")
    actions = () if kind == "recorded" else openenv_actions(given["actions"], schema)
    return replace(plan, places=(Place(url),), wire="openenv", turns=_turns(kind, recording, actions, "")), server


def _turns(kind: str, recording: Path | None, actions: Sequence[str], environment: str) -> Turns:
    if recording is None:
        return Turns("expert" if kind == "expert" else "random", tuple(actions))
    try:
        return Turns("recorded", (), read_recording(recording, environment))
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--policy") from None


def _make_stages(given: Mapping[str, Any]) -> list[Stage]:
    seconds, rate, sessions = given["seconds"], given["rate"], given["sessions"]
    warmup = min(WARMUP_SHARE * seconds, LONGEST_WARMUP) if given["warmup"] is None else given["warmup"]
    arrivals: Arrivals = given["arrivals"]
    loads = [(sessions, rate)]
    if given["ramp"]:
        loads = [(sessions, value) if rate else (max(int(value), 1), None) for value in given["ramp"]]
    if min(count for count, _ in loads) < given["processes"]:
        raise click.UsageError("each of --processes needs a session of its own: use fewer, or more --sessions")
    return [
        Stage(
            f"{count:,} sessions" if due is None else f"{show(due, 'rate')} steps/s",
            count,
            seconds,
            warmup,
            due,
            arrivals,
        )
        for count, due in loads
    ]


def _finish(given: Mapping[str, Any], report: dict[str, Any], screen: Screen, found: Found | None) -> None:
    if given["json_file"] == "-":
        sys.stdout.write(json.dumps(report) + "\n")
    elif given["json_file"]:
        Path(given["json_file"]).write_text(json.dumps(report) + "\n", encoding="utf-8")
    if given["html_file"]:
        write_page(report, given["html_file"])
    if found is not None:
        screen.found(found)
        screen.remarks(report)
    else:
        screen.report(report)


def _compare(console: Console, before: Mapping[str, Any], after: Mapping[str, Any], *, json_file: str) -> None:
    try:
        comparison = compare(before, after)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    Screen(console).comparison(comparison)
    if json_file:
        text = json.dumps(comparison.as_json()) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            Path(json_file).write_text(text, encoding="utf-8")


def _words() -> Sequence[str]:
    words = sys.argv[1:]
    return words[words.index("load") + 1 :] if "load" in words else words
