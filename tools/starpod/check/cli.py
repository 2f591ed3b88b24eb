"""`starpod check`: the command line."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from starpod.check.report import Terminal, describe_requirement, to_json
from starpod.check.requirement import LEVELS, Requirement
from starpod.check.runner import PLAYED, CannotCheck, CheckReport, WrongCall
from starpod.check.runner import check as run_check
from starpod.check.suite import REQUIREMENTS, REWARD
from starpod.client.programs import start_server
from starpod.remote.catalog import (
    ACCESS,
    JSON,
    OPTIONS,
    WORD,
    access_options,
    expect_address,
    expect_writable,
    service_errors,
    write_report,
)
from starpod.report.console import safe_console
from starpod.serving.options import Command, duration

CONTRACT = [level for level in LEVELS.values() if level != "reward"]


CALL_SECONDS = 10.0
"""Minimum time limit of a call. If requirements may take longer than three times this, it is a third of their time."""
_HTTP = re.compile(r"(mcp\+)?https?://[^\s/]+:\d+")


def _levels(_: click.Context, __: click.Parameter, value: str) -> set[str]:
    levels = {level.strip() for level in value.split(",")}
    if unknown_levels := levels - set(CONTRACT):
        raise click.BadParameter(f"no level {', '.join(sorted(unknown_levels))}; there are {', '.join(CONTRACT)}")
    return levels


@click.command(
    cls=Command,
    headings={
        "What to check": ["environments", "reward", "levels", "slow", "assignments", "also", "seconds"],
        "Results": ["only_list", "json_file"],
        "Access to the server": ACCESS,
    },
    epilog="Example: starpod check mine.py --reward --json report.json",
)
@click.argument("address", metavar="ENVIRONMENT", required=False)
@click.option(
    "--list", "only_list", is_flag=True, help="Print each requirement with its number and level, and check no server."
)
@click.option(
    "--environment",
    "-e",
    "environments",
    metavar="NAME",
    multiple=True,
    show_default="all",
    help="Environment of the server to check. Repeatable.",
)
@click.option(
    "--reward",
    is_flag=True,
    help="Also play well and badly, and check that nothing except solving the task earns rewards.",
)
@click.option(
    "--level",
    "levels",
    default=",".join(CONTRACT),
    callback=_levels,
    help="Levels of requirements to check, separated by commas: core is for all servers, the others for servers that "
    "declare the capability.",
)
@click.option(
    "--also",
    metavar="HOST:PORT",
    default="",
    show_default=False,
    help="Second server with the same environments. Equal seeds must give equal episodes on both.",
)
@JSON
@click.option(
    "--timeout",
    "seconds",
    type=duration(0.1),
    default="30s",
    help="Time limit of one requirement, as 30s, 2m or a number of seconds.",
)
@OPTIONS
@click.option("--slow", is_flag=True, help="Also check requirements that take more than a minute each.")
@access_options
@click.pass_context
def check(
    context: click.Context,
    /,
    address: str | None,
    only_list: bool,
    environments: tuple[str, ...],
    reward: bool,
    levels: set[str],
    also: str,
    json_file: str,
    seconds: float,
    assignments: tuple[str, ...],
    **settings: Any,
) -> None:
    """Check that ENVIRONMENT keeps the contract of docs/protocol.md.

    ENVIRONMENT is ADDRESS or ADDRESS/NAME at a server: host:port for gRPC, http://host:port or https://host:port for
    JSON over HTTP, and mcp+http://host:port or mcp+https://host:port for MCP. A NAME, FILE.py, FILE.py:CLASS or
    FAMILY:NAME is served by two processes, which are compared with each other.

    Exit status: 0 no requirement of strength MUST is violated, 1 one is violated or no server answers, 2 usage error.
    """
    known = (*REQUIREMENTS, *REWARD) if reward else REQUIREMENTS
    selection = [requirement for requirement in known if requirement.level in (*levels, "reward")]
    if only_list:
        _list_requirements(context, selection, json_file)
        return
    if address is None:
        raise click.UsageError("Missing argument 'ENVIRONMENT'.")
    if also and not _HTTP.fullmatch(also):
        expect_address(also)
    if not _HTTP.fullmatch(address):
        word = WORD.convert(address, context.command.params[0], context)
        if not word.addresses:
            # Use different hash salts. Otherwise a start that depends on a set's order would look deterministic.
            first, second = (start_server(word.serve, variables={"PYTHONHASHSEED": salt}) for salt in "12")
            with service_errors(), first as first_address, nullcontext(also) if also else second as twin:
                context.invoke(check, **{**context.params, "address": first_address, "also": twin})
        address, environments = word.addresses, environments or (*filter(None, [word.id]),)
    expect_writable(json_file)
    # The requirement PLAYED is always checked: without a playable episode, no other one can be tested.
    requirements = [requirement for requirement in known if requirement in selection or requirement.id == PLAYED]
    report = _check_server(
        address,
        requirements,
        safe_console(stderr=json_file == "-"),
        environments=environments,
        also=also,
        seconds=seconds,
        options=assignments,
        call_seconds=max(CALL_SECONDS, seconds / 3),
        **settings,
    )
    write_report(json_file, to_json(report))
    if report.unreachable:
        raise click.ClickException(report.unreachable)
    context.exit(0 if report.passed else 1)


def _check_server(address: str, requirements: Sequence[Requirement], console: Console, **settings: Any) -> CheckReport:
    """Check a server, show the progress, and return the report. settings: as for `runner.check`."""
    with Terminal(console) as terminal:
        try:
            report = asyncio.run(run_check(address, requirements, observer=terminal, **settings))
        except WrongCall as error:
            raise click.UsageError(str(error)) from error
        except CannotCheck as error:
            return CheckReport(address, unreachable=str(error))
    terminal.close(report)
    return report


def _list_requirements(context: click.Context, requirements: Sequence[Requirement], json_file: str) -> None:
    """Print requirements, or write them as JSON. Raise UsageError for options that only a check uses."""
    for parameter in context.command.params:
        name = parameter.name or ""
        is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in ("only_list", "levels", "reward", "json_file"):
            option_name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
            raise click.UsageError(f"--list checks no server: leave {option_name} out")
    expect_writable(json_file)
    write_report(
        json_file, json.dumps([describe_requirement(requirement) for requirement in requirements], indent=2) + "\n"
    )
    if json_file == "-":
        return
    for requirement in requirements:
        click.echo(f"{requirement.id}  {requirement.level:<8}  {requirement.strength:<6}  {requirement.title}")
