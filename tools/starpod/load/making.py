"""From what was given on the command line to a plan and its stages; whatever does not fit together is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from starpod.client.catalog import parse_options
from starpod.load.plan import Place, Plan, Stage, Turns
from starpod.load.policies import read_recording
from starpod.load.schedule import Arrivals
from starpod.load.servers import (
    check_plan,
    choose_wire,
    find_openenv,
    find_servers,
    openenv_actions,
    try_options,
)
from starpod.report.figures import show

WARMUP_SHARE = 0.2
LONGEST_WARMUP = 5.0


def make_plan(given: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan and what the servers say of themselves. Raises ClickException for whatever does not fit together."""
    address, access = given["address"], given["access"]
    if not address:
        raise click.UsageError("give the ADDRESS of a server, as in 127.0.0.1:50051")
    if given["think"] and (given["rate"] or given["targets"]):
        raise click.UsageError("--think is for closed loops, --rate and --find-rate make an open one: leave one out")
    if given["ramp"] and given["targets"]:
        raise click.UsageError("--ramp and --find-rate both say which rates to try: leave one out")
    for name in ("json_file", "html_file", "record"):
        if given[name] and not Path(given[name]).parent.is_dir():
            raise click.UsageError(f"{given[name]} cannot be written: there is no folder {Path(given[name]).parent}")
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
    try_options(plan)
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


def make_stages(given: Mapping[str, Any]) -> list[Stage]:
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
