"""Turn the command line into a plan: find the servers and what they host, and refuse options that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from starpod.client import BadArgument, StarpodError, SyncFleet
from starpod.load.plan import ActionSource, LoadPlan, ServerAddress, Stage, read_recording
from starpod.remote.catalog import connect, expect_writable, explain_failure, find_environment, parse_options, serving
from starpod.report.figures import show
from starpod.v1 import environment_pb2 as pb

WARMUP_SHARE = 0.2
LONGEST_WARMUP = 5.0
TRIAL_SECONDS = 5.0
"""Seconds in which a session must open before the run, or the run itself finds out why it does not."""


def check_plan(plan: LoadPlan, spec: pb.EnvironmentSpec) -> None:
    """Raise UsageError if the environment cannot do what the plan needs."""
    can = spec.capabilities
    for call, able in (("fork", can.fork), ("snapshot", can.snapshot), ("render", "text" in spec.render_modes)):
        if call in plan.mix and not able:
            raise click.UsageError(f"--mix {call}: {spec.id} has no {call}")
    if plan.turns.kind == "expert" and not can.expert_action:
        raise click.UsageError(f"--policy expert: {spec.id} has no expert")
    if plan.turns.kind != "recorded" and not plan.turns.actions and not can.valid_actions:
        raise click.UsageError(
            f"{spec.id} neither names its actions nor lists valid ones ({spec.action_space.grammar or 'no grammar'}):"
            " play a recording with --policy recorded:FILE"
        )


# --- plan and stages --------------------------------------------------------------------------------------------------


def make_plan(values: Mapping[str, Any]) -> tuple[LoadPlan, dict[str, Any]]:
    """Return the plan and the servers' part of the report. Raise ClickException if options do not fit together."""
    word, access = values["word"], values["access"]
    if word is None:
        raise click.UsageError("name the ENVIRONMENT to play, as in 127.0.0.1:50051/frozen_lake or bandit")
    if values["think"] and (values["rate"] or values["targets"]):
        raise click.UsageError("--think is for closed loops, --rate and --find-rate make an open one: leave one out")
    if values["ramp"] and values["targets"]:
        raise click.UsageError("--ramp and --find-rate both say which rates to try: leave one out")
    expect_writable(values["json_file"], values["html_file"], values["record"])
    kind, recording = values["policy"]
    addresses = click.get_current_context().with_resource(serving(word))
    with connect(addresses, access, discover=True, patience=TRIAL_SECONDS) as fleet:
        for replica in fleet.replicas:
            if replica.error is not None:
                raise explain_failure(replica.error, replica.address)
        spec = find_environment(fleet.describe(), values["environment"] or word.id, values["version"])
        for replica in fleet.replicas:
            find_environment(replica.specs, spec.id, spec.version)
        server = fleet.replicas[0].description
        assert server is not None
        plan = LoadPlan(
            places=tuple(ServerAddress(replica.address, replica.server_name) for replica in fleet.replicas),
            transport=access,
            wire="stream" if server.capabilities.stream else "unary",
            environment_id=spec.id,
            version=spec.version,
            options=parse_options(spec, values["assignments"]),
            turns=_make_turns(kind, recording, spec.action_space.names, spec.id),
            mix=values["mix"] or {},
            think=values["think"],
            episodes_per_session=values["episodes_per_session"],
            seed=values["seed"],
            timeout=values["timeout"],
            retry_overload=values["on_overload"] == "retry",
            processes=values["processes"],
            record=values["record"] is not None,
        )
        check_plan(plan, spec)
        _try_options(fleet, plan)
    addresses_in_use = [place.address for place in plan.places]
    return plan, {"name": server.server_name, "version": server.server_version, "replicas": addresses_in_use}


def _try_options(fleet: SyncFleet, plan: LoadPlan) -> None:
    """Open and close a session with the plan's options. Raise BadArgument if the server refuses them.

    Other errors, such as a full server, are ignored, because the run counts them.
    """
    try:
        (session,) = fleet.open(
            plan.environment_id, version=f"=={plan.version}", options=plan.options or None, seed=plan.seed
        )
        session.close()
    except BadArgument:
        raise
    except StarpodError:
        return


def _make_turns(kind: str, recording: Path | None, actions: Sequence[str], environment: str) -> ActionSource:
    if recording is None:
        return ActionSource("expert" if kind == "expert" else "random", tuple(actions))
    try:
        return ActionSource("recorded", (), read_recording(recording, environment))
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--policy") from None


def make_stages(values: Mapping[str, Any]) -> list[Stage]:
    seconds, rate, sessions = values["seconds"], values["rate"], values["sessions"]
    warmup = min(WARMUP_SHARE * seconds, LONGEST_WARMUP) if values["warmup"] is None else values["warmup"]
    loads = [(sessions, rate)]
    if values["ramp"]:
        loads = [(sessions, value) if rate else (max(int(value), 1), None) for value in values["ramp"]]
    if min(count for count, _ in loads) < values["processes"]:
        raise click.UsageError("each of --workers needs its own session: use fewer, or more --sessions")
    return [
        Stage(name, count, seconds, warmup, rate, values["arrivals"])
        for count, rate in loads
        for name in (f"{count:,} sessions" if rate is None else f"{show(rate, 'rate')} steps/s",)
    ]
