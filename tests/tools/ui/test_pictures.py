"""Pictures of episodes: pages ask for those that there are, and for no others."""

import asyncio
import re
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import yaml
from fastapi import Request

from starpod.client import SyncFleet
from starpod.trainer.data.episode import Episode
from starpod.trainer.output.run_folder import RunFolder
from starpod.ui import episodes
from tests.support import ServerProcess
from tests.tools.ui.conftest import serve_site
from tests.tools.ui.test_games import EPISODE, FATAL, address, lost
from tests.trainer.turns import a_turn

__all__ = ["address", "lost"]  # fixtures


def asked(text: str) -> list[str]:
    return re.findall(r'<img src="/picture\?[^"]*turn=(\d+)"', text)


def test_a_page_asks_for_each_picture_small_and_large(address: str) -> None:
    text = httpx.get(address + EPISODE).text
    turns = [str(turn) for turn in range(FATAL + 2)]
    assert asked(text) == turns * 2  # the strip, then each turn and the end
    (sizes,) = {
        (width, height) for width, height in re.findall(r'alt="The state[^>]*width="(\d+)" height="(\d+)"', text)
    }
    assert max(map(int, sizes)) <= 260


def test_what_the_server_cannot_draw_is_not_asked_for(
    server: ServerProcess, lost: tuple[Path, Episode], tmp_path: Path
) -> None:
    """Of an environment without pictures, and of an episode that the server does not repeat; nor of their groups."""
    folder = RunFolder.create(tmp_path / "mixed")
    folder.config.write_text(
        yaml.safe_dump({"environment": {"id": "frozen_lake-v1", "options": {"success_rate": 1.0}}})
    )
    folder.metrics.write_text('{"step": 1, "time": 1.0, "metrics": {"collect/success": 0.0}}\n')
    with SyncFleet(server.address) as fleet:
        (session,) = fleet.open("countdown-v1", seed=3)
        words = Episode.begin(session.session, 0)
        words.turns = [a_turn(observation=session.observation.text, actions=["1"], text="1")]
    other = Episode.from_json(lost[1].to_json())
    other.group, other.turns[0].observation = 1, "another lake"
    folder.write_rollouts(1, [words, other], most=2**20)
    for site in serve_site(tmp_path, "--address", server.address, page="/episodes?run=mixed", shown="2 episodes"):
        for group in (0, 1):
            place = f"run=mixed&file=train-000001.jsonl.gz&group={group}"
            for page in (f"{site}/episode?{place}&member=0", f"{site}/group?{place}"):
                reply = httpx.get(page, timeout=60.0)
                assert reply.status_code == 200 and asked(reply.text) == []


async def test_a_page_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It then asks for pictures without knowing whether there are some."""
    waiting = asyncio.Event()

    async def picture(site: object, request: Request) -> None:
        assert request.query_params["turn"] == "0" and request.query_params["run"] == "lake"
        await waiting.wait()
        raise episodes.NotPossible

    monkeypatch.setattr(episodes, "picture", picture)
    monkeypatch.setattr(episodes, "PATIENCE", 0.01)
    page = episodes.with_pictures(lambda site, request, drawn: cast(Any, drawn))
    request = Request({"type": "http", "query_string": b"run=lake&turn=7", "headers": []})
    assert await page(cast(Any, None), request) == b""
    waiting.set()
    monkeypatch.setattr(episodes, "PATIENCE", 60.0)
    assert await page(cast(Any, None), request) is None
