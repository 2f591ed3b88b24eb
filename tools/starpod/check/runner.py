"""Runs requirements against a server, several at the same time, each with a time limit and its own sessions."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc

from starpod.check.connection import CheckConnection
from starpod.check.expectations import BrokenCall, NotShown, Unmet
from starpod.check.grpc_connection import GrpcConnection
from starpod.check.http_connection import HTTPConnection
from starpod.check.mcp_connection import MCP, MCPConnection
from starpod.check.options import Required, session_options
from starpod.check.probe import Probe, Target
from starpod.check.refusal import from_error
from starpod.check.requirement import Requirement
from starpod.client.transport import Transport
from starpod.remote.catalog import no_answer
from starpod.v1 import environment_pb2 as pb
from starpod.v1.spelling import nearest

Status = Literal["passed", "failed", "skipped", "error"]
MAX_PARALLEL = 8
"""Maximum number of tests that run at the same time. Servers with low limits get fewer."""
CONNECT_SECONDS = 10.0
"""Minimum time limit in seconds for the first call, which includes connecting."""
SESSIONS, CALLS = 8, 6
"""Number of sessions and calls in flight that one test may need at the same time."""
PLAYED = "C-30"
"""The requirement that fails if no episode can be played."""


class CannotCheck(Exception):
    """The server does not answer Describe, or the check lacks something, such as a second process."""


class WrongCall(CannotCheck):
    """The command line asks for something that the server lacks: an environment or an option."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one requirement."""

    requirement: Requirement
    status: Status
    message: str = ""
    """Why the requirement failed, was skipped or could not be tested."""
    seconds: float = 0.0

    @property
    def breaks(self) -> bool:
        """Whether the result makes the check fail. An unmet SHOULD is only a warning."""
        return self.status in ("failed", "error") and self.requirement.strength == "MUST"


@dataclass(slots=True)
class EnvironmentReport:
    id: str
    version: str
    results: list[Result] = field(default_factory=list)


@dataclass(slots=True)
class CheckReport:
    """All results of a check of one server."""

    address: str
    server_name: str = ""
    server_version: str = ""
    protocol_version: str = ""
    environments: list[EnvironmentReport] = field(default_factory=list)
    unreachable: str = ""
    """Why nothing could be checked; empty if the check ran."""

    @property
    def results(self) -> list[Result]:
        return [result for environment in self.environments for result in environment.results]

    @property
    def passed(self) -> bool:
        return not self.unreachable and not any(result.breaks for result in self.results)


class Observer:
    """Receives progress of a check. This base class ignores it."""

    def began(self, environment: EnvironmentReport, requirements: Sequence[Requirement]) -> None: ...

    def ran(self, environment: EnvironmentReport, result: Result) -> None: ...


async def check(
    address: str,
    requirements: Sequence[Requirement],
    *,
    environments: Sequence[str] = (),
    also: str = "",
    access: Transport = Transport(),  # noqa: B008 - frozen
    seconds: float = 30.0,
    call_seconds: float = 10.0,
    options: Sequence[str] = (),
    slow: bool = False,
    observer: Observer | None = None,
) -> CheckReport:
    """Check environments of a server.

    Args:
        address: host:port for gRPC, or a URL (see `connect`).
        environments: `name-vN` or `name`; empty: the newest version of each hosted one.
        also: address of another server process that hosts the same versions.
        seconds: time limit of one requirement.
        call_seconds: time limit of one call.
        options: environment options as `name=JSON`.
        slow: include requirements whose tests take more than a minute.

    Raises:
        CannotCheck: Nothing can be checked.
    """
    connection = connect(address, access, call_seconds)
    try:
        server = await _describe(connection)
        if also:
            await _expect_another(server, address, connection.new_connection(also))
        connection.portion = server.limits.max_calls_in_flight // _parallel_tests(server)
        report = CheckReport(address, server.server_name, server.server_version, server.protocol_version)
        for spec, spec_options in _with_options(_select(server, environments), options):
            environment = EnvironmentReport(spec.id, spec.version)
            report.environments.append(environment)
            target = Target(connection, server, spec, also, seconds, spec_options)
            await _check(target, requirements, environment, observer or Observer(), slow)
    finally:
        await connection.close()
    return report


def connect(address: str, access: Transport, seconds: float) -> CheckConnection:
    """Return a connection for an address.

    Args:
        address: host:port for gRPC, http:// or https:// for JSON over HTTP, mcp+http:// or mcp+https:// for MCP.
        seconds: default time limit of a call.

    Raises:
        CannotCheck: a package that the transport needs is missing.
    """
    if "://" not in address:
        return GrpcConnection(address, access, seconds)
    try:
        return (MCPConnection if address.startswith(MCP) else HTTPConnection)(address, access, seconds)
    except ImportError as error:
        raise CannotCheck("to check over HTTP install httpx: pip install '.[http]' in a clone") from error


async def _describe(connection: CheckConnection) -> pb.DescribeResponse:
    try:
        seconds = max(connection.seconds, CONNECT_SECONDS)
        server: pb.DescribeResponse = await connection.call(pb.DescribeRequest(), seconds=seconds)
    except grpc.aio.AioRpcError as error:
        refusal = from_error(error)
        if refusal.code == "UNAVAILABLE" and not refusal.info:
            raise CannotCheck(no_answer(connection.address, refusal.message)) from error
        raise CannotCheck(f"{connection.address} does not answer Describe: {refusal}") from error
    if not server.environments:
        raise CannotCheck(f"{connection.address} hosts no environment")
    return server


async def _expect_another(server: pb.DescribeResponse, address: str, other: CheckConnection) -> None:
    try:
        if (await _describe(other)).instance_id == server.instance_id != "":
            raise CannotCheck(f"{other.address} is the same process as {address}: name another one, or none")
    finally:
        await other.close()


def _parallel_tests(server: pb.DescribeResponse) -> int:
    """Return the number of tests that the server's limits allow at the same time."""
    limits = server.limits
    shares = ((limits.max_sessions, SESSIONS), (limits.max_calls_in_flight, CALLS))
    return max(1, min([MAX_PARALLEL, *(limit // share for limit, share in shares if limit)]))


def _with_options(
    specs: Sequence[pb.EnvironmentSpec], assignments: Sequence[str]
) -> list[tuple[pb.EnvironmentSpec, dict[str, Any]]]:
    try:
        options_by_spec = [(spec, session_options(spec, assignments)) for spec in specs]
    except Required as error:
        raise CannotCheck(str(error)) from error
    for name in (assignment.partition("=")[0] for assignment in assignments):
        if not any(name in options for _, options in options_by_spec):
            raise WrongCall(f"no environment has the option {name!r}")
    return options_by_spec


def _select(server: pb.DescribeResponse, names: Sequence[str]) -> list[pb.EnvironmentSpec]:
    newest_specs: dict[str, pb.EnvironmentSpec] = {}
    for spec in server.environments:
        newest_specs.setdefault(spec.id, spec)
    specs = []
    for name in names:
        matches = [spec for key, spec in newest_specs.items() if name in (key, key.rpartition("-v")[0])]
        if not matches:
            raise WrongCall(f"no environment {name!r} is hosted{nearest(name, list(newest_specs))}")
        specs += matches
    return specs if names else list(newest_specs.values())


async def _check(
    target: Target,
    requirements: Sequence[Requirement],
    report: EnvironmentReport,
    observer: Observer,
    slow: bool,
) -> None:
    observer.began(report, requirements)
    results: dict[str, Result] = {}
    slots = asyncio.Semaphore(_parallel_tests(target.server))

    async def run(requirement: Requirement) -> None:
        if requirement.slow and not slow:
            result = Result(requirement, "skipped", f"it takes {requirement.slow:g} s: run it with --slow")
        elif requirement.slow:
            result = await _run(target, requirement, bugs)  # needs no slot: it waits and makes no calls
        else:
            async with slots:
                result = await _run(target, requirement, bugs)
        results[requirement.id] = result
        observer.ran(report, result)

    try:
        await target.record()
    except grpc.aio.AioRpcError as error:
        raise CannotCheck(
            f"{target.connection.address} is draining and opens no sessions: check it once it is started again"
        ) from error
    bugs: dict[
        str, str
    ] = {}  # server's message about a bug (see _without_numbers) -> id of the requirement that reports it
    if isinstance(target.play_error, BrokenCall) and any(requirement.id == PLAYED for requirement in requirements):
        bugs[_without_numbers(target.play_error)] = PLAYED
    slow_tests = asyncio.gather(*(run(requirement) for requirement in requirements if requirement.slow))
    await asyncio.gather(
        *(run(requirement) for requirement in requirements if not requirement.alone and not requirement.slow)
    )
    for requirement in requirements:
        if requirement.alone:
            await run(requirement)
    await slow_tests
    report.results = [results[requirement.id] for requirement in requirements]


def _without_numbers(bug: BrokenCall) -> str:
    """Return the server's message about a bug with all numbers replaced, so that repetitions are equal."""
    return re.sub(r"[\d.]*\d", "0", str(bug))


async def _run(target: Target, requirement: Requirement, bugs: dict[str, str]) -> Result:
    if reason := _out_of_scope(target, requirement):
        return Result(requirement, "skipped", reason)
    probe = Probe(target)
    status: Status = "failed"
    message = ""
    limit = target.seconds + requirement.slow
    start = time.perf_counter()
    try:
        async with asyncio.timeout(limit):
            await requirement.test(probe)
        status = "passed"
    except NotShown as error:
        status, message = "skipped", str(error)
    except BrokenCall as error:
        message = str(error)
        if (reporter := bugs.setdefault(_without_numbers(error), requirement.id)) != requirement.id:
            status, message = "skipped", f"stopped by the bug that {reporter} reports"
    except Unmet as error:
        message = str(error)
    except grpc.aio.AioRpcError as error:
        message = f"expected the call to succeed; got {from_error(error)}"
    except TimeoutError:
        message = f"expected an end of the test within {limit:g} s; got none: the server hangs"
    except Exception as error:  # a bug of the check, or a reply that no server may send
        status, message = "error", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(target.connection.seconds):
            await probe.clean_up()
    return Result(requirement, status, message, seconds)


def _out_of_scope(target: Target, requirement: Requirement) -> str:
    """Return why the requirement does not apply to this target, or an empty text if it does."""
    level = requirement.level
    if level == "stream" and not isinstance(target.connection, GrpcConnection):
        return f"{target.connection.transport} has no Stream in both directions"
    if level in ("core", "reward"):
        return ""
    owner, subject = ("server", target.server) if level == "stream" else ("environment", target.spec)
    capability = getattr(subject.capabilities, level)
    if capability != requirement.absent:
        return ""
    if capability:
        return f"only for {owner}s without {level}, and this one has it"
    return f"the {owner} does not declare {level}"
