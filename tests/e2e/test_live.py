"""`starpod train --ui`: the run in a browser while it trains."""

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_train import SMALL


def test_a_run_is_shown_while_it_trains(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "starpod.cli.main", "train", *SMALL, "stop.iterations=3", "--ui"]
    with subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "lake")], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stderr is not None
        address = next(line.split()[-1] for line in process.stderr if line.strip().startswith("live: "))
        shown = ""
        while 'class="status running"' not in shown and process.poll() is None:
            shown = httpx.get(f"{address}runs/lake").text
            time.sleep(0.1)
        assert "frozen_lake-v1" in shown
        process.stderr.read()
    assert process.returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(address)
    assert not list((tmp_path / "lake").glob(".starpod-index*"))


def test_a_start_that_is_refused_leaves_no_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "starpod.cli.main", "train", "bandit", "environment.options.foo=1", "--ui"]
    done = subprocess.run([*command, "--run-dir", str(tmp_path / "bandit")], capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "bandit").exists()
