"""`starpod train --ui`: the run in a browser while it trains."""

import html
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_train import SMALL
from tests.support import ServerProcess


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was looked at while it trained."""
    folder = tmp_path_factory.mktemp("live") / "lake"
    command = [sys.executable, "-m", "starpod.cli.main", "train", *SMALL, "stop.iterations=3", "--ui"]
    with subprocess.Popen(
        [*command, "--run-dir", str(folder)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
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
    return folder


def test_a_run_is_shown_while_it_trains_and_the_site_leaves_nothing(lake: Path) -> None:
    assert not list(lake.glob(".starpod-index*"))


def test_its_checkpoint_goes_on_from_each_turn(lake: Path, server: ServerProcess) -> None:
    site = ServerProcess(
        [sys.executable, "-m", "starpod.cli.main", "ui", str(lake), "--address", server.address, "--index", ":memory:"]
    )
    try:
        with httpx.Client(base_url=site.address, timeout=200.0) as http:
            links: list[str] = []
            while not links:
                page = http.get("/episodes?run=lake&kind=train&sort=longest").text
                links = re.findall(r'href="(/episode\?[^"]+)"', page)
                time.sleep(0.1)
            page = http.get(html.unescape(links[0])).text
            form = next(each for each in page.split("<form") if 'action="/turns"' in each)
            fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)">', form))
            reply = http.post("/turns", data={**fields, "policy": "checkpoint", "count": "4"})
        assert reply.status_code == 200, reply.text
        assert "the run&#39;s best checkpoint" in reply.text
        assert len(re.findall(r'aria-label="Success before turn', reply.text)) == page.count('aria-label="Turn ')
    finally:
        site.close()


def test_a_start_that_is_refused_leaves_no_trace(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "starpod.cli.main", "train", "bandit", "environment.options.foo=1", "--ui"]
    done = subprocess.run([*command, "--run-dir", str(tmp_path / "bandit")], capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "bandit").exists()
