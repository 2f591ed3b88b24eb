"""The check does not report correct servers, however small, slow or picky they are."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from starpod.check.runner import CannotCheck, CheckReport, check
from starpod.check.suite import REQUIREMENTS, companions
from starpod.client.transport import Transport
from tests.skipped import not_by_time
from tests.tools.check.correct import CORRECT, Correct, EndsStreams, Guarded, Plain, Reference, RequiresAnOption
from tests.tools.check.reference_server import ReferenceService, serve

NOT_SHOWN = {
    "C-70": "the environment draws no png",
    "C-95": "no token was given",
    "C-97": "the server sends no server-timing",
    "C-98": "it takes 75 s: run it with --slow",
    "S-15": "the server sends no timing",
    "F-10": "only for environments without fork, and this one has it",
    "N-11": "only for environments without snapshot, and this one has it",
}

Reports = dict[type[Correct], CheckReport]


@pytest.fixture(scope="module", params=["own levels", pytest.param("all levels", marks=pytest.mark.minutes)])
def reports(request: pytest.FixtureRequest) -> Reports:
    async def examine(service: type[Correct]) -> CheckReport:
        levels = service.levels if request.param == "own levels" else "CSFN"
        async with serve(service()) as address, serve(service()) as also:
            chosen = [each for each in REQUIREMENTS if each.id[0] in levels]
            return await check(address, chosen, also=also, seconds=120.0, call_seconds=60.0)

    async def examine_all() -> Reports:
        return dict(zip(CORRECT, await asyncio.gather(*map(examine, CORRECT)), strict=True))

    return asyncio.run(examine_all())


@pytest.mark.parametrize("service", CORRECT, ids=lambda service: service.__name__)
def test_a_correct_server_keeps_the_contract(service: type[Correct], reports: Reports) -> None:
    report = reports[service]
    assert not _unmet(report) and report.passed
    skipped = not_by_time((r.requirement.id, r.message) for r in report.results if r.status == "skipped")
    checked = {r.requirement.id for r in report.results}
    assert skipped.keys() - NOT_SHOWN.keys() == checked & set(service.lacks), skipped
    assert service is not Reference or skipped == NOT_SHOWN


def _unmet(report: CheckReport) -> dict[str, str]:
    return {r.requirement.id: r.message for r in report.results if r.status in ("failed", "error")}


def test_a_server_without_capabilities_is_tested_by_what_it_has() -> None:
    results = _run(Plain(), [each.id for each in REQUIREMENTS])
    assert not {id_: message for id_, (status, message) in results.items() if status in ("failed", "error")}
    shown = {id_ for id_, (status, _) in results.items() if status == "passed"}
    assert {id_ for id_ in shown if id_[0] != "C"} == {"F-10", "N-11"} and len(shown) > 72


def test_ragged_columns_may_end_the_stream() -> None:
    results = _run(EndsStreams(), ("S-06", "S-14"))
    assert {id_: status for id_, (status, _) in results.items()} == {"S-06": "passed", "S-14": "passed"}


def _run(service: ReferenceService, ids: Collection[str], **settings: Any) -> dict[str, tuple[str, str]]:
    async def examine() -> CheckReport:
        async with serve(service) as address:
            return await check(address, [each for each in REQUIREMENTS if each.id in ids], **settings)

    return {r.requirement.id: (r.status, r.message) for r in asyncio.run(examine()).results}


def test_an_option_that_was_given_is_used_in_every_session() -> None:
    class LongWalk(RequiresAnOption):
        def read_options(self, struct: Any) -> dict[str, Any]:
            options = super().read_options(struct)
            assert options["length"] == 12
            return options

    results = _run(LongWalk(), ("C-06", "C-52", "C-79"), options=["length=12"])
    assert {status for status, _ in results.values()} == {"passed"}


def test_sessions_last_as_long_as_a_test_may() -> None:
    leases = set()

    class Leasing(ReferenceService):
        def grant_lease(self, asked: float) -> float:
            leases.add(asked)
            return super().grant_lease(asked)

    assert _run(Leasing(), ("C-78",), seconds=300)["C-78"][0] == "passed"
    assert min(leases) > 300


def test_an_option_that_no_environment_has_is_reported() -> None:
    with pytest.raises(CannotCheck, match="no environment has the option 'lenght'"):
        _run(ReferenceService(), ("C-06",), options=["lenght=12"])


def test_a_required_option_of_no_known_type_must_be_given() -> None:
    class Vague(RequiresAnOption):
        spec = type(RequiresAnOption.spec)()
        spec.CopyFrom(RequiresAnOption.spec)
        bounds = '"type": "integer", "minimum": 3, "maximum": 99'
        spec.options_schema_json = spec.options_schema_json.replace(bounds, "")

    with pytest.raises(CannotCheck, match="--option length=JSON"):
        _run(Vague(), ("C-06",))
    assert _run(Vague(), ("C-06",), options=["length=9"])["C-06"][0] == "passed"


def test_a_token_is_wanted_by_every_method() -> None:
    secret = Transport("secret")
    assert _run(Guarded(), ("C-95",), access=secret)["C-95"][0] == "passed"

    class GuardsDescribe(Guarded):
        async def guard(self, context: Any) -> None:
            return

        async def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
            await super().guard(context)
            return await super().describe(request)

    class OpensStreams(Guarded):
        Stream = ReferenceService.Stream

    for service, method in ((GuardsDescribe(), "Open"), (OpensStreams(), "Stream")):
        status, message = _run(service, ("C-95",), access=secret)["C-95"]
        assert status == "failed" and f"UNAUTHENTICATED from {method} with no token" in message


def test_a_server_that_hangs_up_on_pings_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class HangsUp(ReferenceService):
        channel_options = (("grpc.http2.min_ping_interval_without_data_ms", 300_000),)

    monkeypatch.setattr(companions, "PING_SECONDS", 0.1)
    monkeypatch.setattr(companions, "SILENT_SECONDS", 6.0)
    assert _run(ReferenceService(), ("C-98",), slow=True)["C-98"] == ("passed", "")
    status, message = _run(HangsUp(), ("C-98",), slow=True)["C-98"]
    assert status == "failed"
    assert "Too many pings" in message
    assert _run(HangsUp(), ("C-98",))["C-98"] == ("skipped", "it takes 75 s: run it with --slow")
