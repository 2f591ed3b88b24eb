"""The process that runs an agent's program: nothing that the program started outlives it, nor keeps anybody waiting."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from starpod.gateway import supervise

COMMAND = (sys.executable, "-I", "-S", supervise.__file__)
LEAVES = """
import os, subprocess, sys
def child(**more):
    return subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"],
                            stdout=subprocess.PIPE, start_new_session=True, **more)
children = [child(), child(stderr=subprocess.DEVNULL)]
for each in children:
    each.stdout.readline()
print(*(each.pid for each in children), file=open(FILE + ".new", "w"))
os.rename(FILE + ".new", FILE)
"""
"""Leaves two daemons behind, one of which holds the program's standard error."""


def program(file: Path, then: str) -> list[str]:
    return [*COMMAND, sys.executable, "-c", LEAVES.replace("FILE", repr(str(file))) + then]


def start(command: list[str], **more: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **more)


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def daemons(file: Path) -> list[int]:
    return [int(pid) for pid in file.read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize(
    ("then", "status", "last"),
    [("", 0, ""), ("sys.exit('no model')", 1, "no model"), ("os.kill(os.getpid(), 9)", -9, "")],
)
def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path, then: str, status: int, last: str) -> None:
    with start(program(tmp_path / "pids", then)) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.read()) == {"status": status, "last": last}
    assert [runs(pid) for pid in daemons(tmp_path / "pids")] == [False, False]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize("how", ["the trainer is killed", "the supervisor gets SIGTERM"])
def test_a_program_that_never_ends_is_ended(tmp_path: Path, how: str) -> None:
    forever = program(tmp_path / "pids", "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)")
    trainer = (
        f"import subprocess, time\np = subprocess.Popen({forever!r}, stdin=-1)\nprint(p.pid, flush=True)\np.wait()"
    )
    with start([sys.executable, "-c", trainer]) as process:
        assert process.stdout is not None
        supervisor = int(process.stdout.readline())
        while not (tmp_path / "pids").exists():
            assert process.poll() is None
        if how == "the trainer is killed":
            process.kill()
        else:
            os.kill(supervisor, signal.SIGTERM)
        # Its end of this pipe is open until the supervisor is gone, too.
        assert json.loads(process.stdout.read())["status"] == -9
    assert [runs(pid) for pid in daemons(tmp_path / "pids")] == [False, False]


def test_a_program_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with start([*COMMAND, str(tmp_path / "missing")]) as process:
        assert process.stdout is not None
        assert "No such file" in json.loads(process.stdout.read())["refused"]


def test_only_the_end_of_its_output_is_reported() -> None:
    talks = "import sys\nfor n in range(100_000):\n    print('word', file=sys.stderr)\nsys.exit('the end')"
    with start([*COMMAND, sys.executable, "-c", talks]) as process:
        assert process.stdout is not None
        last = json.loads(process.stdout.read())["last"]
    assert last.endswith("word the end") and len(last) <= supervise.SHOWN
