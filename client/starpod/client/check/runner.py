"""Runs requirements against a server: several at a time, each with a time limit, each with sessions of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import grpc

from starpod.client.check.link import Access, Link
from starpod.client.check.probe import Probe, Target
from starpod.client.check.refusal import from_error
from starpod.client.check.requirement import NotShown, Requirement, Unmet
from starpod.v1 import environment_pb2 as pb

Status = Literal["passed", "failed", "skipped", "error"]
AT_ONCE = 8


class Unreachable(Exception):
    """The server does not answer Describe, or does not host what is to be checked."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one requirement. message: why it failed, was skipped, or could not be run to its end."""

    requirement: Requirement
    status: Status
    message: str = ""
    seconds: float = 0.0

    @property
    def breaks(self) -> bool:
        """Whether it makes the check fail: a SHOULD that is not met is a warning."""
        return self.status in ("failed", "error") and self.requirement.strength == "MUST"


@dataclass(slots=True)
class EnvironmentReport:
    id: str
    version: str
    results: list[Result] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """All results of one check of one server."""

    address: str
    server_name: str
    server_version: str
    protocol_version: str
    environments: list[EnvironmentReport] = field(default_factory=list)

    @property
    def results(self) -> list[Result]:
        return [result for environment in self.environments for result in environment.results]

    @property
    def passed(self) -> bool:
        return not any(result.breaks for result in self.results)


class Observer:
    """Told of what goes on; does nothing with it."""

    def began(self, environment: EnvironmentReport, requirements: Sequence[Requirement]) -> None: ...

    def ran(self, environment: EnvironmentReport, result: Result) -> None: ...


async def check(
    address: str,
    requirements: Sequence[Requirement],
    *,
    environments: Sequence[str] = (),
    also: str = "",
    access: Access | None = None,
    seconds: float = 30.0,
    call_seconds: float = 10.0,
    observer: Observer | None = None,
) -> Report:
    """Checks the environments (`name-vN` or `name`; none: the newest version of each hosted one).

    also: another server process that hosts the same versions. seconds: for one requirement; call_seconds: for one call.
    Raises Unreachable.
    """
    link = Link(address, access or Access(), call_seconds)
    try:
        server = await _describe(link)
        if also:
            await _describe_once(link.twin(also))
        report = Report(address, server.server_name, server.server_version, server.protocol_version)
        for spec in _chosen(server, environments):
            environment = EnvironmentReport(spec.id, spec.version)
            report.environments.append(environment)
            await _check(Target(link, server, spec, also, seconds), requirements, environment, observer or Observer())
    finally:
        await link.close()
    return report


async def _describe(link: Link) -> pb.DescribeResponse:
    try:
        server: pb.DescribeResponse = await link.call("Describe", pb.DescribeRequest())
    except grpc.aio.AioRpcError as error:
        raise Unreachable(f"{link.address} does not answer Describe: {from_error(error)}") from error
    if not server.environments:
        raise Unreachable(f"{link.address} hosts no environment")
    return server


async def _describe_once(link: Link) -> None:
    try:
        await _describe(link)
    finally:
        await link.close()


def _chosen(server: pb.DescribeResponse, names: Sequence[str]) -> list[pb.EnvironmentSpec]:
    newest: dict[str, pb.EnvironmentSpec] = {}
    for spec in server.environments:
        newest.setdefault(spec.id, spec)
    chosen = []
    for name in names:
        matches = [spec for key, spec in newest.items() if name in (key, key.rpartition("-v")[0])]
        if not matches:
            raise Unreachable(f"no environment {name!r} is hosted; there are {', '.join(newest)}")
        chosen += matches
    return chosen if names else list(newest.values())


async def _check(
    target: Target, requirements: Sequence[Requirement], report: EnvironmentReport, observer: Observer
) -> None:
    observer.began(report, requirements)
    results: dict[str, Result] = {}
    room = asyncio.Semaphore(AT_ONCE)

    async def run(requirement: Requirement) -> None:
        async with room:
            result = await _run(target, requirement)
        results[requirement.id] = result
        observer.ran(report, result)

    await asyncio.gather(*(run(requirement) for requirement in requirements if not requirement.alone))
    for requirement in requirements:
        if requirement.alone:
            await run(requirement)
    report.results = [results[requirement.id] for requirement in requirements]


async def _run(target: Target, requirement: Requirement) -> Result:
    if reason := _out_of_scope(target, requirement):
        return Result(requirement, "skipped", reason)
    probe = Probe(target)
    status: Status = "passed"
    message = ""
    start = time.perf_counter()
    try:
        async with asyncio.timeout(target.seconds):
            await requirement.test(probe)
    except NotShown as error:
        status, message = "skipped", str(error)
    except Unmet as error:
        status, message = "failed", str(error)
    except grpc.aio.AioRpcError as error:
        status, message = "failed", f"expected the call to succeed; got {from_error(error)}"
    except TimeoutError:
        status, message = (
            "failed",
            f"expected an end of the test within {target.seconds:g} s; got none: the server hangs",
        )
    except Exception as error:  # a fault of the check, or a reply that no server may send
        status, message = "error", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(target.link.seconds):
            await probe.clean_up()
    return Result(requirement, status, message, seconds)


def _out_of_scope(target: Target, requirement: Requirement) -> str:
    """Why the requirement is not about this target; empty if it is."""
    capabilities = target.spec.capabilities
    has = {
        "core": True,
        "stream": target.server.capabilities.stream,
        "fork": capabilities.fork,
        "snapshot": capabilities.snapshot,
    }
    there = has[requirement.level]
    owner = "server" if requirement.level == "stream" else "environment"
    if there and requirement.absent:
        return f"the {owner} declares {requirement.level}"
    if not there and not requirement.absent:
        return f"the {owner} does not declare {requirement.level}"
    return ""
