"""From the command line to a plan: which servers there are, what they host, and whether they can do what is asked.

Whatever does not fit together is refused here.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import grpc

from starpod.client.catalog import connect, expect_writable, find_environment, hosted, parse_options
from starpod.client.transport import Transport, as_addresses, join_endpoint, split_address
from starpod.load.plan import Place, Plan, Stage, Turns, Wire, read_recording
from starpod.report.figures import show
from starpod.v1 import environment_pb2 as pb

WARMUP_SHARE = 0.2
LONGEST_WARMUP = 5.0


@dataclass(frozen=True, slots=True)
class Servers:
    """places: one for each server process. spec: of the environment that they all host."""

    places: tuple[Place, ...]
    spec: pb.EnvironmentSpec
    description: pb.DescribeResponse

    def as_json(self) -> dict[str, Any]:
        """What a report says of them."""
        return {
            "name": self.description.server_name,
            "version": self.description.server_version,
            "replicas": [place.address for place in self.places],
        }


def find_servers(addresses: str, transport: Transport, environment: str, version: str) -> Servers:
    """Asks each address who is there, and takes in the siblings that it names.

    Raises ClickException if one cannot be reached, BadParameter with the nearest names if it lacks the environment.
    """
    try:
        queue = [place for address in as_addresses(addresses) for place in _resolve(address)]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="ADDRESS") from None
    known: dict[str, Place] = {}
    spec = description = None
    asked = set()
    while queue:
        place = queue.pop(0)
        if place.address in asked:
            continue
        asked.add(place.address)
        with connect(place.address, transport, place.server_name) as connection:
            answer = hosted(connection)
        if answer.instance_id in known:
            continue  # another name for a server that we have
        known[answer.instance_id] = place
        spec = spec or find_environment(answer, environment, version)
        description = description or answer
        find_environment(answer, spec.id, spec.version)
        host, _ = split_address(place.address)
        queue += [Place(join_endpoint(endpoint, host), place.server_name) for endpoint in answer.endpoints]
    assert spec is not None and description is not None
    return Servers(tuple(known.values()), spec, description)


def choose_wire(asked: str, description: pb.DescribeResponse) -> Wire:
    """`stream` where the server has it, unless something else was asked for. Raises BadParameter where it has not."""
    if asked == "stream" and not description.capabilities.stream:
        raise click.BadParameter("the server has no Stream; use unary", param_hint="--transport")
    if asked == "unary" or not description.capabilities.stream:
        return "unary"
    return "stream"


def check_plan(plan: Plan, spec: pb.EnvironmentSpec) -> None:
    """Raises UsageError if the environment cannot do what the plan asks of it."""
    can = spec.capabilities
    for call, able in (("fork", can.fork), ("snapshot", can.snapshot), ("render", "text" in spec.render_modes)):
        if call in plan.mix and not able:
            raise click.UsageError(f"--mix {call}: {spec.id} has no {call}")
    if plan.turns.kind == "expert" and not can.expert_action:
        raise click.UsageError(f"--policy expert: {spec.id} has no expert")
    if plan.turns.kind != "recorded" and not plan.turns.actions and not can.valid_actions:
        raise click.UsageError(
            f"{spec.id} neither names its actions nor lists valid ones ({spec.action_space.grammar or 'no grammar'}):"
            " give some with --action, or a recording with --policy recorded:FILE"
        )


def try_options(plan: Plan) -> None:
    """Opens and closes a session with the plan's options. Raises UsageError if the server refuses what was asked.

    Whatever else is wrong, a full server say, is for the run to meet and to count.
    """
    place = plan.places[0]
    request = pb.OpenRequest(environment_id=plan.environment_id, version=plan.version, seed=plan.seed)
    request.options.update(dict(plan.options or {}))
    with connect(place.address, plan.transport, place.server_name) as connection:
        try:
            opened = connection.call(connection.stub.Open, request)
            ids = [session.session_id for session in opened.sessions]
            connection.call(connection.stub.Close, pb.CloseRequest(session_ids=ids))
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                raise


def _resolve(address: str) -> list[Place]:
    """Every address that a dns:/// name stands for; any other address as it is. Raises ClickException."""
    target = address.removeprefix("dns:///")
    if target == address:
        return [Place(address)]
    host, port = split_address(target)
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise click.ClickException(f"{host} cannot be resolved: {error}") from None
    hosts = {f"[{item[4][0]}]" if item[0] == socket.AF_INET6 else str(item[4][0]) for item in found}
    return [Place(f"{member}:{port}", host) for member in sorted(hosts)]


# --- plan and stages --------------------------------------------------------------------------------------------------


def make_plan(given: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """The plan and what the servers say of themselves. Raises ClickException for whatever does not fit together."""
    address, access = given["address"], given["access"]
    if not address:
        raise click.UsageError("give the ADDRESS of a server, as in 127.0.0.1:50051")
    if given["think"] and (given["rate"] or given["targets"]):
        raise click.UsageError("--think is for closed loops, --rate and --find-rate make an open one: leave one out")
    if given["ramp"] and given["targets"]:
        raise click.UsageError("--ramp and --find-rate both say which rates to try: leave one out")
    expect_writable(given["json_file"], given["html_file"], given["record"])
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
    check_plan(plan, spec)
    try_options(plan)
    return plan, servers.as_json()


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
    loads = [(sessions, rate)]
    if given["ramp"]:
        loads = [(sessions, value) if rate else (max(int(value), 1), None) for value in given["ramp"]]
    if min(count for count, _ in loads) < given["processes"]:
        raise click.UsageError("each of --processes needs a session of its own: use fewer, or more --sessions")
    return [
        Stage(name, count, seconds, warmup, due, given["arrivals"])
        for count, due in loads
        for name in (f"{count:,} sessions" if due is None else f"{show(due, 'rate')} steps/s",)
    ]
