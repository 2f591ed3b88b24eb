"""Turn the command line into a plan: find the servers and what they host, and refuse options that do not fit."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import grpc

from starpod.client.transport import Transport, as_addresses, join_endpoint, split_address
from starpod.load.plan import ActionSource, LoadPlan, ServerAddress, Stage, read_recording
from starpod.remote.catalog import connect, describe_server, expect_writable, find_environment, parse_options, serving
from starpod.report.figures import show
from starpod.v1 import environment_pb2 as pb

WARMUP_SHARE = 0.2
LONGEST_WARMUP = 5.0


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers under load, which all host the environment."""

    places: tuple[ServerAddress, ...]
    """Addresses of the server processes."""
    spec: pb.EnvironmentSpec
    description: pb.DescribeResponse

    def as_json(self) -> dict[str, Any]:
        """Return the entries of a report that describe the servers."""
        return {
            "name": self.description.server_name,
            "version": self.description.server_version,
            "replicas": [place.address for place in self.places],
        }


def find_servers(addresses: str, transport: Transport, environment: str, version: str) -> Servers:
    """Ask each address for its description, and include the siblings that it names.

    Raises:
        ClickException: A server cannot be reached.
        BadParameter: A server lacks the environment. The message has the nearest names.
    """
    try:
        queue = [place for address in as_addresses(addresses) for place in _resolve(address)]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="ADDRESS") from None
    places: dict[str, ServerAddress] = {}
    spec = description = None
    asked_addresses = set()
    while queue:
        place = queue.pop(0)
        if place.address in asked_addresses:
            continue
        asked_addresses.add(place.address)
        answer = describe_server(place.address, transport, place.server_name)
        if answer.instance_id in places:
            continue  # another name of a known server
        places[answer.instance_id] = place
        spec = spec or find_environment(answer.environments, environment, version)
        description = description or answer
        find_environment(answer.environments, spec.id, spec.version)
        host, _ = split_address(place.address)
        queue += [ServerAddress(join_endpoint(endpoint, host), place.server_name) for endpoint in answer.endpoints]
    assert spec is not None and description is not None
    return Servers(tuple(places.values()), spec, description)


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


def try_options(plan: LoadPlan) -> None:
    """Open and close a session with the plan's options. Raise UsageError if the server refuses them.

    Other errors, such as a full server, are ignored, because the run counts them.
    """
    place = plan.places[0]
    request = pb.OpenRequest(
        environment_id=plan.environment_id, version=plan.version, options=plan.options_message, seed=plan.seed
    )
    with connect(place.address, plan.transport, place.server_name) as call:
        try:
            call(pb.CloseRequest(session_ids=[session.session_id for session in call(request).sessions]))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise click.UsageError(error.details() or "the options are refused") from error


def _resolve(address: str) -> list[ServerAddress]:
    """Return all addresses of a dns:/// name, or any other address unchanged. Raise ClickException if unknown."""
    target = address.removeprefix("dns:///")
    if target == address:
        return [ServerAddress(address)]
    host, port = split_address(target)
    try:
        infos = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise click.ClickException(f"{host} cannot be resolved: {error}") from None
    hosts = {f"[{item[4][0]}]" if item[0] == socket.AF_INET6 else str(item[4][0]) for item in infos}
    return [ServerAddress(f"{member}:{port}", host) for member in sorted(hosts)]


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
    plan = LoadPlan(
        places=(),
        transport=access,
        wire="unary",
        mix=values["mix"] or {},
        think=values["think"],
        episodes_per_session=values["episodes_per_session"],
        seed=values["seed"],
        timeout=values["timeout"],
        retry_overload=values["on_overload"] == "retry",
        processes=values["processes"],
        record=values["record"] is not None,
    )
    addresses = click.get_current_context().with_resource(serving(word))
    servers = find_servers(addresses, access, values["environment"] or word.id, values["version"])
    spec = servers.spec
    plan = replace(
        plan,
        places=servers.places,
        wire="stream" if servers.description.capabilities.stream else "unary",
        environment_id=spec.id,
        version=spec.version,
        options=parse_options(spec, values["assignments"]),
        turns=_make_turns(kind, recording, spec.action_space.names, spec.id),
    )
    check_plan(plan, spec)
    try_options(plan)
    return plan, servers.as_json()


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
        raise click.UsageError("each of --processes needs its own session: use fewer, or more --sessions")
    return [
        Stage(name, count, seconds, warmup, rate, values["arrivals"])
        for count, rate in loads
        for name in (f"{count:,} sessions" if rate is None else f"{show(rate, 'rate')} steps/s",)
    ]
