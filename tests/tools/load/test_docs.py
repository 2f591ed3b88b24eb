"""Every command in docs/load.md does what the page says: run against a server, in shorter stages."""

import re
import shlex
from pathlib import Path

import pytest

from starpod.load.requirements import CLASSES
from tests.support import ROOT, ServerProcess
from tests.tools.load.conftest import run_load

PAGE = (ROOT / "docs" / "load.md").read_text()
COMMANDS = re.findall(r"^starpod load (.+)$", PAGE, re.MULTILINE)


@pytest.mark.minutes
def test_every_command_runs(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) > 10
    for text in COMMANDS:
        text = text.replace("127.0.0.1:50051", server.address)
        done = run_load(*shlex.split(re.sub(r"--seconds \d+", "--seconds 0.4", text)))
        # A search of moments on a busy machine may find nothing, which is no fault of the command.
        assert done.status == 0 or ("--find-rate" in text and "No rate held" in done.out), (text, done.err, done.out)
    for written in ("lake.html", "ramp.html", "lake.json", "lake.jsonl"):
        assert (tmp_path / written).stat().st_size > 1000


def test_every_class_is_reported() -> None:
    for name in CLASSES:
        assert f"`{name}`" in PAGE
