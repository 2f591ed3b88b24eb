"""`starpod list` and `starpod describe`: show what a server hosts."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.markup import escape
from rich.table import Table

from starpod.client import SyncFleet
from starpod.client.nearest import option_type
from starpod.remote.catalog import VERSION, connection_options, find_environment, options_schema
from starpod.report.console import safe_console, visible
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_word import EnvironmentWord

_ROOMY_COLUMNS = 120


@click.command(name="list", epilog="Example: starpod list 127.0.0.1:50051")
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_environments(connection: AbstractContextManager[SyncFleet], word: EnvironmentWord, as_json: bool) -> None:
    """List the environments of a server.

    ENVIRONMENT is the ADDRESS (host:port) of the server. A NAME, FILE.py or FAMILY:NAME is served by this command.
    """
    with connection as fleet:
        response = fleet.replicas[0].description
    assert response is not None
    if as_json:
        _print_json([_as_dict(spec) for spec in response.environments])
        return
    console = safe_console()
    is_wide = console.width >= _ROOMY_COLUMNS  # on a narrow screen only `describe` shows the capabilities
    table = Table(title=escape(f"{response.server_name} {response.server_version}"), title_justify="left")
    for heading, no_wrap in (("Environment", True), ("Version", True), ("Title", False)):
        table.add_column(heading, no_wrap=no_wrap)
    if is_wide:
        table.add_column("Capabilities")
    notes: list[str] = []
    for spec in response.environments:
        capabilities = [", ".join(_list_capabilities(spec))] if is_wide else []
        table.add_row(escape(spec.id), escape(spec.version), escape(spec.title), *capabilities)
        if (confinement := spec.confinement).mode:
            suffix = f", missing {', '.join(confinement.missing)}" if confinement.missing else ""
            notes.append(f"{spec.id} runs in its own processes, sandbox {confinement.mode}{suffix}")
    console.print(table)
    for note in notes:
        console.print(escape(note), highlight=False)
    sessions = _format_count(response.live_sessions, "live session")
    workers = _format_count(len(response.endpoints) or 1, "worker")
    state = ", draining: no new sessions" if response.draining else ""
    console.print(f"{sessions}, {workers}{state}", highlight=False)


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s'[: number != 1]}"


@click.command(epilog="Example: starpod describe 127.0.0.1:50051/frozen_lake")
@connection_options
@click.argument("environment", metavar="[NAME]", default="")
@VERSION
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def describe(
    connection: AbstractContextManager[SyncFleet], word: EnvironmentWord, environment: str, version: str, as_json: bool
) -> None:
    """Show the instructions, actions, options and limits of ENVIRONMENT.

    ENVIRONMENT is ADDRESS/NAME or ADDRESS NAME at a server (host:port). A NAME, FILE.py, FILE.py:CLASS or FAMILY:NAME
    is served by this command.
    """
    with connection as fleet:
        spec = find_environment(fleet.describe(), environment or word.id, version)
    if as_json:
        _print_json(_as_dict(spec))
        return
    console = safe_console()
    console.print(f"[bold]{escape(spec.id)}[/] {escape(spec.version)}  {escape(spec.title)}\n", highlight=False)
    console.print(spec.instructions, markup=False, highlight=False)
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_column(style="bold")
    facts.add_column()
    for name, value in _list_facts(spec):
        facts.add_row(name, escape(value))
    console.print()
    console.print(facts)
    schema = options_schema(spec)
    if schema:
        options = Table(title="Options", title_justify="left")
        for heading in ("Name", "Values = default", "Meaning"):
            options.add_column(heading, overflow="fold")
        for name, option in schema.items():
            options.add_row(escape(name), escape(option_type(option)), escape(str(option.get("description", ""))))
        console.print()
        console.print(options)


def _list_facts(spec: pb.EnvironmentSpec) -> list[tuple[str, str]]:
    space, limits = spec.action_space, spec.limits
    concurrency = pb.ConcurrencyClass.Name(spec.concurrency).removeprefix("CONCURRENCY_CLASS_").lower()
    facts = [
        ("Actions", ", ".join(space.names)),
        ("Action grammar", space.grammar),
        ("Tools", ", ".join(tool.name for tool in space.tools)),
        ("Tensor action", f"{space.tensor.dtype} {list(space.tensor.shape)}" if space.HasField("tensor") else ""),
        ("Observations", ", ".join(spec.observation_modes)),
        ("Renders", ", ".join(spec.render_modes)),
        (
            "Limits",
            f"{limits.max_turns or 'any number of'} turns, {limits.max_actions_per_turn or 'any number of'} actions a "
            f"turn, {limits.max_actions or 'any number of'} actions an episode",
        ),
        ("Capabilities", ", ".join(_list_capabilities(spec))),
        (
            "Steps run",
            {"inline": "in the event loop", "thread": "on a thread", "process": "in a process"}.get(concurrency, ""),
        ),
        ("Confined", _describe_confinement(spec.confinement)),
        ("Restores", spec.restores_versions),
    ]
    return [(name, value) for name, value in facts if value]


def _describe_confinement(confinement: pb.Confinement) -> str:
    if not confinement.mode:
        return ""
    applied, missing = ", ".join(confinement.applied), ", ".join(confinement.missing)
    return f"{confinement.mode}; holds: {applied or 'nothing'}; missing: {missing or 'nothing'}"


def _list_capabilities(spec: pb.EnvironmentSpec) -> list[str]:
    return [field.name for field, value in spec.capabilities.ListFields() if value]


def _as_dict(spec: pb.EnvironmentSpec) -> dict[str, Any]:
    """Return the spec as JSON values, with the JSON texts in it parsed."""
    fields: dict[str, Any] = MessageToDict(
        spec, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    fields["options_schema"] = json.loads(fields.pop("options_schema_json") or "{}")
    return fields


def _print_json(value: Any) -> None:
    # Control characters are escaped as JSON does it, so that a terminal does not execute them.
    text = json.dumps(value, indent=2, ensure_ascii=False)
    click.echo("".join(c if c == visible(c) else f"\\u{ord(c):04x}" for c in text))
