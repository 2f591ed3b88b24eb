"""`starpod load` as a person meets it: processes, signals, files, exit statuses."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT, ServerProcess, charts_of, guarding, start_server
from tests.tools.load.conftest import LAZY, command, run_load

minutes = pytest.mark.minutes
QUICK = ("--sessions", "4", "--seconds", "0.5", "--warmup", "100ms")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-e", "frozen_laek"), "did you mean frozen_lake-v1?"),
        (("-e", "frozen_lake", "--option", "siez=4"), "has no option 'siez'"),
        (("-e", "frozen_lake", "--option", "size=99"), "options.size"),
        (("-e", "frozen_lake", "--require", "step.p98<2ms"), "nothing is called 'step.p98'"),
        (("-e", "frozen_lake", "--mix", "fork"), "CALL=SHARE"),
        (("-e", "frozen_lake", "--think", "1s", "--rate", "5"), "leave one out"),
        (("-e", "waits", "--policy", "expert"), "waits-v1 has no expert"),
        (("-e", "frozen_lake", "--policy", "recorded:README.md"), "not a recording"),
        (("-e", "frozen_lake", "--rate", "inf"), "leave --rate out to go as fast as the server replies"),
        (("-e", "frozen_lake", "--rate", "nan"), "'nan' is not a number above 0"),
        (("-e", "frozen_lake", "--rate", "1e12"), "up to 1,000,000"),
        (("-e", "frozen_lake", "--rate", "1", "--ramp", "1,inf"), "'1,inf' is not a list of numbers"),
        (("-e", "frozen_lake", "--think", "lognormal:1s,inf"), "SIGMA is a number from 0 to 10"),
        ((), "say which environment: breaks-v1, frozen_lake-v1, "),
        (("-e", "frozen_lake", "--html", "no/such/x.html"), "no folder no/such"),
        (("-e", "frozen_lake", "--sessions", "2", "--workers", "3"), "its own session"),
        (("--compare", "README.md", "README.md"), "README.md"),
    ],
)
def test_a_wrong_call_is_reported_in_one_line(server: ServerProcess, arguments: tuple[str, ...], told: str) -> None:
    done = run_load(server.address, *arguments)
    assert done.status == 2 and told in done.complaint


def test_nothing_answers() -> None:
    done = run_load("127.0.0.1:1", "-e", "frozen_lake")
    assert done.status == 1 and "no server answers at 127.0.0.1:1" in done.complaint


@minutes
def test_the_report_and_the_page(server: ServerProcess, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    requirements = ("--require", "step.p99<1m", "--require", "errors=0", "--require", "steps_per_second>1")
    words = (*QUICK, "--workers", "2", *requirements, "--html", str(page))
    done = run_load(server.address, "-e", "frozen_lake", *words, folder=tmp_path)
    assert done.status == 0, done.err
    (stage,) = done.report["stages"]
    assert (len(stage["generators"]), stage["sessions"]) == (2, 4)
    assert stage["calls"]["open"]["count"] == stage["calls"]["close"]["count"] == 4
    assert all(verdict["met"] for verdict in done.report["requirements"])
    assert stage["paths"] == {"columns": 1.0}
    assert "steps travelled in columns" in done.out and "steps travelled in columns" in page.read_text()
    assert done.report["server"]["replicas"] == [server.address] and "met: errors=0" in done.out
    text = page.read_text()
    assert len(charts_of(text)) == 3 and "http://" not in text


@minutes
def test_an_unmet_requirement_is_exit_status_1_and_json_alone_on_standard_output(server: ServerProcess) -> None:
    words = (*QUICK, "--require", "steps_per_second>1e9", "--json", "-")
    done = run_load(server.address, "-e", "frozen_lake", *words)
    report = json.loads(done.out)
    assert (done.status, report["format"], report["requirements"][0]["met"]) == (1, "starpod-load", False)
    assert "NOT met: steps_per_second>1e9" in done.err


def test_a_report_that_cannot_be_written_does_not_hide_the_table(server: ServerProcess) -> None:
    done = run_load(server.address, "-e", "frozen_lake", *QUICK, "--json", "/dev/full")
    assert done.status == 1 and "No space left" in done.err and " p99.9 " in done.out


@minutes
@pytest.mark.parametrize("killed", [False, True], ids=["Ctrl-C", "killed server"])
def test_what_ends_early_leaves_a_report(tmp_path: Path, killed: bool) -> None:
    file = tmp_path / "report.json"
    words = ("--sessions", "4", "--seconds", "60", "--warmup", "0", "--workers", "2", "--json", str(file))
    with start_server("frozen_lake") as server:
        line = command(server.address, "-e", "frozen_lake", *words)
        process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        process.stdout.readline()  # the first line comes with the first figures
        if killed:
            server.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of them
        out, _ = process.communicate(timeout=40)
    (stage,) = json.loads(file.read_text())["stages"]
    if killed:
        assert process.returncode == 1 and "ended early: no server answers" in " ".join(out.split())
        assert stage["ended"].startswith("no server answers") and set(stage["errors"]["classes"]) == {"transport"}
    else:
        assert process.returncode == 130 and "interrupted" in out
        assert stage["interrupted"] and 0 < stage["seconds"] < 60 and stage["steps"] > 0
        assert stage["calls"]["close"]["count"] == 4


@minutes
def test_the_highest_rate_of_a_server_that_holds_a_known_one(tmp_path: Path) -> None:
    """Two threads of 20 ms each hold 100 steps a second, whatever the machine."""
    with start_server("waits", LAZY, "--threads", "2") as server:
        done = run_load(
            server.address, "-e", "waits", "--find-rate", "step.p99<400ms", "--sessions", "64", "--seconds", "0.8",
            "--arrivals", "constant", "--rate", "60", folder=tmp_path,
        )  # fmt: skip
    search = done.report["search"]
    assert search["probes"][0]["rate"] == 60
    assert done.status == (0 if search["rate"] else 1)
    assert search["rate"] is None or 0 < search["rate"] < 130
    assert all(not probe["held"] for probe in search["probes"] if probe["rate"] > 140)
    assert "Search for the highest rate" in done.out


@minutes
def test_several_replicas_behind_tls_and_a_token(tmp_path: Path) -> None:
    options, access = guarding(tmp_path)
    with start_server("frozen_lake", "--workers", "2", *options) as server:
        words = (*QUICK, *access, "--require", "errors=0")
        done = run_load(server.address, "-e", "frozen_lake", *words, folder=tmp_path)
        assert done.status == 0, done.err + done.out
        replicas = done.report["stages"][0]["replicas"]
        assert len(replicas) == 2 and all(replica["steps"] > 0 for replica in replicas)
        refused = run_load(server.address, "-e", "frozen_lake", *access[:-2])
        assert refused.status == 1 and "token" in refused.complaint
