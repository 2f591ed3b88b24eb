"""Describe: the server's identity, its environments and their options."""

from __future__ import annotations

import json
import re
from itertools import pairwise

from starpod.check.expectations import Unmet, expect
from starpod.check.probe import Probe
from starpod.check.requirement import must
from starpod.v1 import environment_pb2 as pb

ID = re.compile(r"[a-z0-9_]+(-[a-z0-9_]+)*-v[0-9]+")
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")


def _numbers(version: str) -> tuple[int, ...]:
    match = VERSION.fullmatch(version)
    return tuple(map(int, match.groups()[:3])) if match else ()


@must("C-01", "Describe names a protocol version of major 1, the server, its version and a non-empty instance id.")
async def check_identity(probe: Probe) -> None:
    server: pb.DescribeResponse = await probe.connection.call(pb.DescribeRequest())
    version = server.protocol_version
    expect(version.partition(".")[0] == "1" and "." in version, "protocol_version `1.N`", repr(version), 'send "1.0"')
    for name in ("server_name", "server_version", "instance_id"):
        expect(bool(getattr(server, name)), f"a {name}", "an empty one", f"fill in DescribeResponse.{name}")


@must(
    "C-02",
    "Ids are `name-vN` and versions semantic; no version is listed twice, the newest of an id comes first.",
)
async def check_ids_and_versions(probe: Probe) -> None:
    server: pb.DescribeResponse = await probe.connection.call(pb.DescribeRequest())
    expect(len(server.environments) > 0, "at least one environment", "none")
    pairs = [(spec.id, spec.version) for spec in server.environments]
    for name, version in pairs:
        expect(bool(ID.fullmatch(name)), "an id `name-vN` of a-z, 0-9, underscores and hyphens", repr(name))
        expect(bool(VERSION.fullmatch(version)), f"{name} with a version MAJOR.MINOR.PATCH", repr(version))
    expect(len(set(pairs)) == len(pairs), "each (id, version) once", pairs)
    for name in {name for name, _ in pairs}:
        versions = [_numbers(version) for other_name, version in pairs if other_name == name]
        is_sorted = all(a >= b for a, b in pairwise(versions))
        expect(is_sorted, f"the newest version of {name} first", versions, "sort by version, descending")


@must("C-03", "Describe of one environment lists only that one; of an unknown one it is NOT_FOUND.")
async def check_one_environment(probe: Probe) -> None:
    reply: pb.DescribeResponse = await probe.connection.call(pb.DescribeRequest(environment_id=probe.spec.id))
    ids = {spec.id for spec in reply.environments}
    expect(ids == {probe.spec.id}, f"only {probe.spec.id}", sorted(ids), "filter by environment_id")
    request = pb.DescribeRequest(environment_id="no_such_environment-v1")
    await probe.expect_refusal("Describe of an unknown environment", request, "NOT_FOUND")


@must(
    "C-04",
    "options_schema_json is a JSON Schema of an object without additional properties, with a default for "
    "every optional one.",
)
async def check_options_schema(probe: Probe) -> None:
    text = probe.spec.options_schema_json
    try:
        schema = json.loads(text)
    except ValueError as error:
        fix = "for no options send an empty object schema"
        raise Unmet("options_schema_json to be JSON", f"{text[:80]!r} ({error})", fix) from error
    expect(isinstance(schema, dict) and schema.get("type") == "object", "a schema of type object", text[:80])
    closed = schema.get("additionalProperties") is False
    expect(closed, "additionalProperties false", schema.get("additionalProperties", "absent"), "refuse unknown options")
    for name, prop in schema.get("properties", {}).items():
        is_defined = name in schema.get("required", ()) or (isinstance(prop, dict) and "default" in prop)
        expect(is_defined, f"a default of the option {name}", "none", "name it in `required` or give it a default")


@must("C-05", "The instance id is the same over every connection to a process, and in Open.")
async def check_instance_id(probe: Probe) -> None:
    reply: pb.DescribeResponse = await probe.second_connection().call(pb.DescribeRequest())
    open_reply = await probe.open()
    expected, fix = probe.server.instance_id, "draw the id once, when the process starts"
    for source, got in (("over another connection", reply.instance_id), ("from Open", open_reply.instance_id)):
        expect(got == expected, f"instance id {expected!r} {source}", repr(got), fix)
