"""Made-up runs, and sites over them."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
import uvicorn
import yaml

from starpod.serving.sockets import link
from starpod.trainer.data.episode import Episode
from starpod.trainer.data.updates import BELOW, TRAINED, TokenRecord, Verdict
from starpod.trainer.output.pictures import write_pictures
from starpod.trainer.output.run_folder import RunFolder
from starpod.ui import cli
from tests.trainer.diagnostics.synthetic import episode, turn, write_run

CONFIG: dict[str, Any] = {
    "environment": {"id": "frozen_lake-v1"},
    "algorithm": {"preset": "starpo-s", "filter": {"strategy": "top_fraction", "value": 0.5}},
    "stop": {"iterations": 150, "minutes": None},
}


def a_group(number: int, returns: list[float]) -> list[Episode]:
    """The members of a group, of which those with a return of 1 solved their task."""
    members = []
    for member, value in enumerate(returns):
        made = episode(7 + number, solved=value == 1.0, turns=2, group=number, member=member)
        made.turns[-1].parts = {"environment": value}
        members.append(made)
    return members


def make_run(path: Path, *, collapse: bool = False, seed: int = 0, **changes: Any) -> RunFolder:
    """A finished run with evaluations, rollouts of two groups at step 150, and a final evaluation of twenty seeds."""
    folder = write_run(path, collapse=collapse, seed=seed, title=f"The run {path.name}")
    folder.config.write_text(
        yaml.safe_dump({**CONFIG, "seed": seed, "stop": {"iterations": 150, "minutes": 4}, **changes}), encoding="utf-8"
    )
    members = a_group(1, [1.0, 0.0])
    for made in members:
        for number, each in enumerate(made.turns):
            each.reply, each.versions = list(range(65, 73)), [149] * 8
            each.blocks, each.criteria = {"plan": "go <down>"}, {"reached": True, "dry": False}
            each.progress, each.value, each.generating, each.stepping = 0.25, 0.5, 0.2, 0.003
            each.logprobs = [-0.03 * (place + 1) ** (1 + number) for place in range(8)]
    odd = Episode(3, 0, "frozen_lake-v1", turns=[turn("nonsense xylophone", well_formed=False, finish="length")])
    odd.turns[0].actions, odd.end = [], "max_turns"
    others = a_group(2, [1.0, 1.0])
    others[1].turns[1].actions = ["Left"]
    folder.episodes.write_rollouts(150, [*members, *others, odd], max_bytes=2**20)
    verdicts = {1: Verdict(True, "Its reward_std is the largest."), 2: Verdict(False, "Its score tells nothing apart.")}
    marks = np.array([TRAINED, TRAINED | BELOW, *[TRAINED] * 5, 0] * 2, np.uint8)
    learnt = TokenRecord(np.linspace(-1, 1, 16).astype(np.float16), np.linspace(0.7, 1.3, 16).astype(np.float16), marks)
    folder.episodes.write_update(150, verdicts, [(made, learnt) for made in members], max_bytes=2**20)
    solved = [number % (3 + seed) > 0 for number in range(20)]
    results = {
        "seed": list(range(20)), "sample": [0] * 20, "success": solved, "return": [float(each) for each in solved]
    }  # fmt: skip
    summary = {"step": 150, "success": sum(solved) / 20, "success_low": 0.4, "success_high": 0.8, "return_mean": 0.6}
    setting = {"environment": "frozen_lake-v1", "version": "1.0.0", "options": {}, "limits": {}}
    folder.write_final({**summary, **setting, "episodes": 20, "seeds": [0, 20], "samples": 1, "results": results})
    folder.episodes.write(
        150, [episode(number, solved=each, group=number) for number, each in enumerate(solved)], "final"
    )
    write_pictures(folder.pictures, {("final-000150.jsonl", 3, 0): [b"\x89PNG one", b"\x89PNG two"]})
    (folder.checkpoints / "step-00000150").mkdir()
    (folder.checkpoints / "best").write_text("step-00000150")
    folder.notes.write_text('{"tags": ["made up"], "note": "Nobody\\nplayed it."}')
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two runs, one of which collapsed."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "calm")
    make_run(folder / "sweep" / "trapped", collapse=True, seed=1)
    return folder


@pytest.fixture(scope="session")
def calm(runs: Path) -> Path:
    """A run to be copied: nobody may change it."""
    return runs / "calm"


@pytest.fixture(scope="session")
def pages(runs: Path) -> Iterator[httpx.Client]:
    """A client of a site over `runs`, which has read them."""
    with site_over(runs, page="/episodes?run=sweep/trapped&kind=final", shown="20") as http:
        yield http


@contextmanager
def site_over(runs: Path, *words: str, page: str, shown: str) -> Iterator[httpx.Client]:
    """Runs `starpod ui RUNS WORDS` in a thread. Yields a client of it once the page shows the text."""
    served: list[tuple[uvicorn.Server, str]] = []

    async def serve(app: Any, listener: socket.socket) -> None:
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        served.append((uvicorn.Server(config), link(listener, "127.0.0.1")))
        await served[0][0].serve([listener])

    with ThreadPoolExecutor(1) as thread:
        with patch("starpod.serving.http.serve", serve):
            running = thread.submit(cli.ui.main, [str(runs), "--port", "0", *words], standalone_mode=False)
            wait_until(lambda: served or running.done())
        if not served:
            running.result()
        try:
            with httpx.Client(base_url=served[0][1], follow_redirects=True, timeout=60.0) as http:
                wait_until(lambda: shown in http.get(page).text)
                yield http
        finally:
            served[0][0].should_exit = True
            running.result()


def serve_site(runs: Path, *words: str, page: str, shown: str) -> Iterator[str]:
    """Yields the address of `starpod ui` over `runs`, called with these words, once the page shows the text."""
    with site_over(runs, *words, page=page, shown=shown) as http:
        yield address_of(http)


def address_of(http: httpx.Client) -> str:
    return str(http.base_url).rstrip("/")


def wait_until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Fails the test if it does not come to hold."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come to hold"
        time.sleep(0.02)
