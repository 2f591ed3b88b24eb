"""The check against a correct server that shares no code with starpod.env_server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from starpod.check.runner import Report, check
from starpod.check.suite import REQUIREMENTS
from starpod.v1 import environment_pb2 as pb
from tests.skipped import not_by_time
from tests.tools.check.reference_server import ReferenceService, Seat, put_back, serve
from tests.tools.check.refused import Refused
from tests.tools.check.walk import SPEC

NOT_SHOWN = {
    "C-70": "the environment draws no png",
    "C-95": "no token was given",
    "C-97": "the server sends no server-timing",
    "C-98": "it takes 75 s: run it with --slow",
    "S-15": "the server sends no timing",
    "F-10": "the environment declares fork",
    "N-11": "the environment declares snapshot",
}


@pytest.fixture(scope="module")
def report() -> Report:
    return asyncio.run(_examine())


async def _examine() -> Report:
    async with serve(ReferenceService()) as address, serve(ReferenceService()) as also:
        return await check(address, REQUIREMENTS, also=also)


def test_reference_server_meets_every_requirement(report: Report) -> None:
    unmet = {r.requirement.id: r.message for r in report.results if r.status in ("failed", "error")}
    assert not unmet
    assert report.passed


def test_only_what_it_cannot_show_is_skipped(report: Report) -> None:
    skipped = not_by_time((r.requirement.id, r.message) for r in report.results if r.status == "skipped")
    assert skipped == NOT_SHOWN


class Plain(ReferenceService):
    """A server that has only what every server must have."""

    spec = pb.EnvironmentSpec()
    spec.CopyFrom(SPEC)
    spec.capabilities.CopyFrom(pb.EnvironmentCapabilities(deterministic=True))

    async def describe(self, request: pb.DescribeRequest) -> pb.DescribeResponse:
        reply = await super().describe(request)
        reply.capabilities.Clear()
        return reply

    def observe(self, seat: Seat, want: pb.Want) -> pb.Observation:
        if want.ListFields():
            raise Refused("UNSUPPORTED", "has nothing to be wanted", capability="want")
        return super().observe(seat, want)

    async def fork(self, request: pb.ForkRequest) -> pb.ForkResponse:
        raise Refused("UNSUPPORTED", "cannot be forked", capability="fork")

    async def snapshot(self, request: pb.SnapshotRequest) -> pb.SnapshotResponse:
        raise Refused("UNSUPPORTED", "cannot be snapshot", capability="snapshot")


def test_a_server_without_capabilities_is_tested_by_what_it_has() -> None:
    report = asyncio.run(_examine_plain())
    assert not {r.requirement.id: r.message for r in report.results if r.status in ("failed", "error")}
    told = {r.requirement.id for r in report.results if r.status == "passed"}
    levels = {level: {id_ for id_ in told if id_.startswith(level)} for level in "CSFN"}
    assert levels["S"] == set()
    assert levels["F"] == {"F-10"}
    assert levels["N"] == {"N-11"}
    assert len(levels["C"]) > 70


async def _examine_plain() -> Report:
    async with serve(Plain()) as address:
        return await check(address, REQUIREMENTS)


class EndsStreams(ReferenceService):
    """A server that ends a Stream whose columns are of unequal lengths, and answers no row of them."""

    def rows(self, steps: pb.StepColumns) -> list[pb.Call]:
        if len(steps.call_ids) != len(steps.session_ids):
            raise ValueError("columns of unequal lengths")
        return super().rows(steps)

    async def Stream(self, requests: AsyncIterator[pb.StreamRequest], context: Any) -> AsyncIterator[pb.StreamResponse]:  # noqa: N802 - gRPC's name
        first = await anext(aiter(requests))
        try:
            self.rows(first.steps)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        async for response in super().Stream(put_back(first, requests), context):
            yield response


def test_ragged_columns_may_end_the_stream() -> None:
    async def examine() -> Report:
        async with serve(EndsStreams()) as address:
            return await check(address, [each for each in REQUIREMENTS if each.id in ("S-06", "S-14")])

    assert {r.requirement.id: r.status for r in asyncio.run(examine()).results} == {"S-06": "passed", "S-14": "passed"}
