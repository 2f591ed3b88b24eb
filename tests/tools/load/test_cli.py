"""`starpod load` as a person meets it: processes, signals, files, exit statuses."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, ServerProcess, credentials, start_server
from tests.tools.load.conftest import LAZY, command, run_load

minutes = pytest.mark.minutes
QUICK = ("--sessions", "4", "--seconds", "0.5", "--warmup", "100ms")


def complaint(err: str) -> str:
    """The one line of a failed call."""
    (line,) = err.splitlines()
    assert line.startswith("starpod: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("-e", "frozen_laek"), "did you mean frozen_lake-v1?"),
        pytest.param(("-e", "frozen_lake", "--option", "siez=4"), "has no option 'siez'", marks=minutes),
        pytest.param(("-e", "frozen_lake", "--require", "step.p98<2ms"), "nothing is called 'step.p98'", marks=minutes),
        pytest.param(("-e", "frozen_lake", "--mix", "fork"), "CALL=SHARE", marks=minutes),
        pytest.param(("-e", "frozen_lake", "--think", "1s", "--rate", "5"), "leave one out", marks=minutes),
        pytest.param(("-e", "waits", "--policy", "expert"), "waits-v1 has no expert", marks=minutes),
        pytest.param(("-e", "frozen_lake", "--policy", "recorded:README.md"), "not a recording", marks=minutes),
        (("-e", "frozen_lake", "--option", "size=99"), "options.size"),
        pytest.param((), "give the --environment to play", marks=minutes),
        pytest.param(("-e", "frozen_lake", "--html", "no/such/x.html"), "no folder no/such", marks=minutes),
        pytest.param(
            ("-e", "frozen_lake", "--sessions", "2", "--processes", "3"), "a session of its own", marks=minutes
        ),
    ],
)
def test_a_wrong_call_is_told_in_one_line(server: ServerProcess, arguments: tuple[str, ...], told: str) -> None:
    done = run_load(server.address, *arguments)
    assert done.status == 2
    assert told in complaint(done.err)
    assert done.out == ""


@minutes
def test_nothing_answers() -> None:
    done = run_load("127.0.0.1:1", "-e", "frozen_lake")
    assert done.status == 1
    assert "no server answers at 127.0.0.1:1" in complaint(done.err)


@minutes
def test_the_report_and_the_page(server: ServerProcess, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    requirements = ("--require", "step.p99<1m", "--require", "errors=0", "--require", "steps_per_second>1")
    done = run_load(
        server.address,
        "-e",
        "frozen_lake",
        *QUICK,
        "--processes",
        "2",
        *requirements,
        "--html",
        str(page),
        folder=tmp_path,
    )
    assert done.status == 0, done.err
    (stage,) = done.report["stages"]
    assert len(stage["generators"]) == 2
    assert stage["sessions"] == 4
    assert stage["calls"]["open"]["count"] == stage["calls"]["close"]["count"] == 4
    assert all(verdict["met"] for verdict in done.report["requirements"])
    assert done.report["server"]["replicas"] == [server.address]
    assert "met: errors=0" in done.out
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "http://" not in text.replace("http://www.w3.org", "")


@minutes
def test_json_alone_on_standard_output(server: ServerProcess) -> None:
    done = run_load(server.address, "-e", "frozen_lake", *QUICK, "--json", "-")
    assert json.loads(done.out)["format"] == "starpod-load"
    assert done.status == 0


@minutes
def test_an_unmet_requirement_is_exit_status_1(server: ServerProcess) -> None:
    done = run_load(server.address, "-e", "frozen_lake", *QUICK, "--require", "steps_per_second>1e9")
    assert done.status == 1
    assert "NOT met: steps_per_second>1e9" in done.out


@minutes
def test_ctrl_c_gives_the_report_so_far(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    words = command(
        server.address, "-e", "frozen_lake", "--sessions", "4", "--seconds", "60", "--warmup", "0", "--processes", "2",
        "--json", str(file),
    )  # fmt: skip
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()  # the first line comes with the first figures
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of them
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    (stage,) = json.loads(file.read_text())["stages"]
    assert stage["interrupted"]
    assert 0 < stage["seconds"] < 60
    assert stage["steps"] > 0
    assert stage["calls"]["close"]["count"] == 4
    assert "interrupted" in out


@minutes
def test_a_server_killed_mid_run_leaves_a_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with start_server("frozen_lake") as server:
        words = command(server.address, "-e", "frozen_lake", "--seconds", "60", "--warmup", "0", "--json", str(file))
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        server.kill()
        out, _ = process.communicate(timeout=40)
    assert process.returncode == 1
    assert "ended early: no server answers" in " ".join(out.split())
    (stage,) = json.loads(file.read_text())["stages"]
    assert stage["ended"].startswith("no server answers")
    assert set(stage["errors"]["classes"]) == {"transport"}


@minutes
def test_a_ramp_and_its_comparison_with_another(server: ServerProcess, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        done = run_load(
            server.address, "-e", "frozen_lake", "--ramp", "2,6", "--seconds", "1", "--warmup", "100ms",
            folder=tmp_path / name,
        )  # fmt: skip
        assert [stage["sessions"] for stage in done.report["stages"]] == [2, 6]
    compared = run_load(
        "--compare", *(str(tmp_path / name / "report.json") for name in ("a", "b")), "--json", str(tmp_path / "c.json")
    )
    assert compared.status == 0, compared.err
    assert "steps_per_second" in compared.out
    assert {change["stage"] for change in json.loads((tmp_path / "c.json").read_text())["changes"]} == {
        "2 sessions",
        "6 sessions",
    }
    wrong = run_load("--compare", str(tmp_path / "a" / "report.json"), "README.md")
    assert wrong.status == 2
    assert "README.md" in complaint(wrong.err)


@minutes
def test_the_highest_rate_of_a_server_that_holds_a_known_one(tmp_path: Path) -> None:
    """Two threads of 20 ms each hold 100 steps a second, whatever the machine."""
    with start_server("waits", "--environment-module", LAZY, "--threads", "2") as server:
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
def test_what_is_recorded_is_played_again(server: ServerProcess, tmp_path: Path) -> None:
    recording = tmp_path / "recording.jsonl"
    done = run_load(server.address, "-e", "frozen_lake", *QUICK, "--policy", "expert", "--record", str(recording))
    assert done.status == 0, done.err
    again = run_load(
        server.address, "-e", "frozen_lake", *QUICK, "--policy", f"recorded:{recording}", "--transport", "unary",
        "--require", "errors=0", folder=tmp_path,
    )  # fmt: skip
    assert again.status == 0, again.out
    assert again.report["plan"]["policy"] == "recorded"
    assert again.report["plan"]["transport"] == "unary"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[ServerProcess, list[str]]]:
    """Two workers behind mTLS and a token, and what it takes to reach them."""
    files = credentials(tmp_path)
    serving = {"tls-certificate": "certificate", "tls-key": "key", "tls-client-ca": "ca", "token-file": "token"}
    options = [word for option, name in serving.items() for word in (f"--{option}", str(files[name]))]
    access = [word for name, file in files.items() for word in (f"--{name.replace('token', 'token-file')}", str(file))]
    with start_server("frozen_lake", "--workers", "2", *options) as server:
        yield server, access


@minutes
def test_several_replicas_behind_tls_and_a_token(guarded: tuple[ServerProcess, list[str]], tmp_path: Path) -> None:
    server, access = guarded
    done = run_load(server.address, "-e", "frozen_lake", *QUICK, *access, "--require", "errors=0", folder=tmp_path)
    assert done.status == 0, done.err + done.out
    replicas = done.report["stages"][0]["replicas"]
    assert len(replicas) == 2
    assert all(replica["steps"] > 0 for replica in replicas)
    refused = run_load(server.address, "-e", "frozen_lake", *access[:-2])
    assert refused.status == 1
    assert "token" in complaint(refused.err)


@minutes
def test_a_terminal_gets_a_live_screen(server: ServerProcess) -> None:
    import pty

    ours, theirs = pty.openpty()
    words = command(server.address, "-e", "frozen_lake", "--sessions", "2", "--seconds", "2")
    with subprocess.Popen(words, cwd=ROOT, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}):
        os.close(theirs)
        seen, until = b"", time.monotonic() + 60
        while time.monotonic() < until:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            seen += part
    os.close(ours)
    assert b"\x1b[" in seen
    assert b"steps/s" in seen
