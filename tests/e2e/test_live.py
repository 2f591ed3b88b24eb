"""`starpod train --ui`: the run in a browser while it trains."""

import html
import io
import os
import pty
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from starpod.cli.main import main
from tests.forks import start_fork
from tests.support import ServerProcess
from tests.tools.ui.conftest import wait_until
from tests.training import COMMAND, Screen, command, train


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was looked at while it trained."""
    shown = threading.Event()
    folder, screen = tmp_path_factory.mktemp("live") / "lake", Screen("step 1/3", lambda: shown.wait(60))
    few = ("warm_start.steps=5", "warm_start.episodes=20", "evaluation.every=0", "stop.iterations=3")
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, *few, "--ui", run_dir=folder, screen=screen)
        try:
            while not (live := re.search(r"live: (\S+)\n", screen.getvalue())):
                assert not training.done(), training.result()
                time.sleep(0.1)
            run = fleet = ""
            # On the server of the run itself, as soon as that has seen that somebody looks.
            while not ("Sessions in play" in run and "/play/frozen_lake-v1" in fleet):
                assert not training.done(), "the run ended before it was shown"
                run, fleet = (httpx.get(f"{live[1]}{page}", timeout=60.0).text for page in ("runs/lake", "fleet"))
        finally:
            shown.set()
        assert 'class="status running"' in run and "frozen_lake-v1" in run
        training.result()
    with pytest.raises(httpx.ConnectError):
        httpx.get(live[1])
    return folder


def test_a_run_is_shown_while_it_trains_and_the_site_leaves_nothing(lake: Path) -> None:
    assert not list(lake.glob(".starpod-index*")) and not (lake / ".live.json").exists()


def run_on(terminal: str, words: list[str]) -> None:
    """Runs the command with a terminal as its standard input and standard error."""
    file = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    os.dup2(file, 0)
    os.dup2(file, 2)
    sys.stdin, sys.stderr, sys.stdout = open(0), open(2, "w", buffering=1), io.StringIO()  # noqa: SIM115
    main(words)


def test_on_a_terminal_the_pages_stay_until_ctrl_c(tmp_path: Path) -> None:
    """The pages answer at the printed address and start a server for games."""
    terminal, inside = pty.openpty()
    small = ("stop.iterations=1", "warm_start.steps=1", "warm_start.episodes=4", "evaluation.episodes=1")
    words = command("--ui", *small, "evaluation.reference=[]", run_dir=tmp_path / "lake")
    process = start_fork(run_on, os.ttyname(inside), words)
    lines = iter(os.fdopen(terminal, errors="replace"))
    live = next(line for line in lines if "live: " in line).split()[-1]
    stays = next(line for line in lines if "the pages stay at" in line)
    assert live in stays and "until Ctrl-C" in stays
    wait_until(lambda: 'class="status ended"' in httpx.get(f"{live}runs/lake").text)
    assert "/play/frozen_lake-v1" in httpx.get(f"{live}fleet", timeout=60.0).text
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 0
    os.close(inside)
    with pytest.raises(httpx.ConnectError):
        httpx.get(live)


def test_its_checkpoint_continues_from_each_turn(lake: Path, server: ServerProcess) -> None:
    site = ServerProcess([*COMMAND, "ui", str(lake), "--address", server.address, "--index", ":memory:"])
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
            best, *others = re.findall(r'<option value="(checkpoint-[^"]+)"', form)
            job = http.post("/turns", data={**fields, "policy": best, "count": "4"}).headers["location"]
            wait_until(lambda: "data-poll" not in http.get(job).text, 200)
            reply = http.get(job)
            # Another checkpoint of the run continues after the same turns.
            job = http.post("/turns", data={**fields, "policy": others[-1], "count": "4"}).headers["location"]
            wait_until(lambda: "data-poll" not in http.get(job).text, 200)
            assert "Intervals are" in http.get(job).text and 'class="notice"' not in http.get(job).text
            (lake / "checkpoints" / best.removeprefix("checkpoint-") / "manifest.json").unlink()
            job = http.post("/turns", data={**fields, "policy": best, "count": "4"}).headers["location"]
            wait_until(lambda: "data-poll" not in http.get(job).text, 200)
            assert "It cannot continue here" in http.get(job).text
        assert 'class="notice"' not in reply.text and "the run&#39;s best" in reply.text
        assert len(re.findall(r'aria-label="Success before turn', reply.text)) == page.count('aria-label="Turn ')
    finally:
        site.close()


def test_a_start_that_is_refused_leaves_no_trace(tmp_path: Path) -> None:
    train("environment.options.foo=1", "--ui", run_dir=tmp_path / "bandit", status=2, base=("bandit",))
    assert not list(tmp_path.iterdir())
