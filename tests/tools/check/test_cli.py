"""The command line of `starpod check`: what it prints, writes and exits with."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from starpod.check import cli
from starpod.check.cli import check
from starpod.check.requirement import LEVELS
from starpod.check.runner import CheckReport
from starpod.check.suite import REQUIREMENTS
from tests.tools.check.faults.copying import TrustsDigests
from tests.tools.check.faults.serving import HasNoReflection
from tests.tools.check.reference_server import ReferenceService, serve


def run(*arguments: str) -> Result:
    return CliRunner().invoke(check, arguments)


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[type[ReferenceService], str]]:
    """Servers on a thread of their own, because the command runs an event loop itself."""
    services: tuple[type[ReferenceService], ...] = (ReferenceService, HasNoReflection, TrustsDigests, Slow)
    addresses: dict[type[ReferenceService], str] = {}
    ready, over = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def host() -> None:
        async def one(service: type[ReferenceService]) -> None:
            async with serve(service()) as address:
                addresses[service] = address
                if len(addresses) == len(services):
                    ready.set()
                await over.wait()

        await asyncio.gather(*map(one, services))

    thread = threading.Thread(target=loop.run_until_complete, args=(host(),))
    thread.start()
    assert ready.wait(20)
    yield addresses
    loop.call_soon_threadsafe(over.set)
    thread.join()


class Slow(ReferenceService):
    """Never answers an Open."""

    async def open(self, request: object) -> object:
        await asyncio.sleep(3600)
        raise AssertionError


@pytest.mark.parametrize(
    ("service", "words", "status", "said"),
    [
        (TrustsDigests, "--level snapshot", 1, "N-04 MUST"),
        (TrustsDigests, "--level snapshot", 1, "does not keep the contract"),
        (HasNoReflection, "--level core", 0, "C-94 SHOULD"),
        (HasNoReflection, "--level core", 0, "1 of them a warning"),
        (ReferenceService, "--level fork --option length=12", 0, ""),
        (ReferenceService, "--option length", 2, "is not key=value"),
        (ReferenceService, "--environment wolk", 2, "did you mean walk-v1?"),
        (ReferenceService, "--also 127.0.0.1:1 --timeout 2", 1, "no server answers at 127.0.0.1:1"),
        (ReferenceService, "--also ADDRESS", 1, "ADDRESS is the same process as ADDRESS: name another one, or none"),
    ],
)
def test_output_and_exit_status(
    addresses: dict[type[ReferenceService], str], service: type[ReferenceService], words: str, status: int, said: str
) -> None:
    address = addresses[service]
    result = run(address, *words.replace("ADDRESS", address).split())
    assert result.exit_code == status, result.output
    assert said.replace("ADDRESS", address) in result.output
    assert status != 2 or result.stdout == ""


def test_json_holds_every_requirement_of_the_chosen_levels(addresses: dict[type[ReferenceService], str]) -> None:
    result = run(addresses[ReferenceService], "--level", "fork, snapshot", "--environment", "walk", "--json", "-")
    report = json.loads(result.stdout)
    chosen = ["C-30"] + [each.id for each in REQUIREMENTS if each.level in ("fork", "snapshot")]
    assert [entry["id"] for entry in report["environments"][0]["results"]] == chosen
    assert report["passed"]
    assert result.exit_code == 0


def test_ids_ascend_within_their_level_and_titles_are_one_sentence() -> None:
    ids = [requirement.id for requirement in REQUIREMENTS]
    assert len(set(ids)) == len(ids)
    for letter in LEVELS:
        assert (own := [id_ for id_ in ids if id_.startswith(letter)]) == sorted(own)
    assert [each.id for each in REQUIREMENTS if not each.title.endswith(".") or "\n" in each.title] == []


def test_the_list_holds_every_requirement_and_needs_no_server(tmp_path: Path) -> None:
    result = run("--list")
    assert result.exit_code == 0
    assert [line.split(maxsplit=3) for line in result.output.splitlines()] == [
        [each.id, each.level, each.strength, each.title] for each in REQUIREMENTS
    ]
    of_a_level = run("--list", "--level", "fork", "--json", "-")
    assert [entry["id"] for entry in json.loads(of_a_level.stdout)] == [f"F-{number:02d}" for number in range(1, 15)]
    file = tmp_path / "requirements.json"
    assert run("--list", "--json", str(file)).output == result.output
    entry = {"id": "C-94", "level": "core", "strength": "SHOULD"}
    (listed,) = [each for each in json.loads(file.read_text()) if each["id"] == "C-94"]
    assert listed == {**entry, "title": "Server reflection lists starpod.v1.EnvironmentService."}


def test_a_server_that_hangs_is_reported(
    addresses: dict[type[ReferenceService], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "CALL_SECONDS", 0.3)
    result = run(addresses[Slow], "--level", "fork", "--timeout", "3", "--json", "-")
    report = json.loads(result.stdout)
    entry = next(entry for entry in report["environments"][0]["results"] if entry["id"] == "F-07")
    assert entry["status"] == "failed"
    assert "DEADLINE_EXCEEDED" in entry["message"]
    assert result.exit_code == 1


def test_a_server_that_needs_long_for_a_call_is_given_a_third_of_the_timeout(
    addresses: dict[type[ReferenceService], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    async def record(address: str, requirements: object, **settings: Any) -> CheckReport:
        given.append((settings["seconds"], settings["call_seconds"]))
        return CheckReport(address)

    monkeypatch.setattr(cli, "run_check", record)
    run(addresses[ReferenceService])
    run(addresses[ReferenceService], "--timeout", "90")
    assert given == [(30, 10), (90, 30)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'ENVIRONMENT'"),
        (["--list", "127.0.0.1:1"], "--list checks no server: leave ENVIRONMENT out"),
        (["--list", "--timeout", "3"], "--list checks no server: leave --timeout out"),
        (["--list", "--json", "/no/such/folder/list.json"], "/no/such/folder/list.json cannot be written"),
        (["127.0.0.1"], "HOST:PORT/NAME, or FAMILY:NAME"),
        (["missing.py"], "no such file: missing.py"),
        (["127.0.0.1:1", "--level", "core,best"], "no level best"),
        (["127.0.0.1:1", "--token-file", "/no/such/file"], "does not exist"),
        (["127.0.0.1:1", "--key", __file__], "go together"),
        (["127.0.0.1:1", "--json", "/no/such/folder/report.json"], "/no/such/folder/report.json cannot be written"),
        (["127.0.0.1:1", "--json", "/"], "/ cannot be written"),
    ],
)
def test_a_wrong_call_is_exit_status_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_an_unreachable_server_is_also_reported_in_the_report(tmp_path: Path) -> None:
    """A report of an earlier check must not stand for this one."""
    file = tmp_path / "report.json"
    file.write_text("of yesterday")
    result = run("127.0.0.1:1", "--timeout", "2", "--json", str(file))
    assert result.exit_code == 1 and "no server answers at 127.0.0.1:1" in result.output
    report = json.loads(file.read_text())
    assert not report["passed"]
    assert "no server answers at 127.0.0.1:1" in report["unreachable"]
