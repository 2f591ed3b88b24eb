"""Pictures of episodes: pages request existing pictures, and no others."""

import asyncio
import html
import re
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request

from starpod.client import SyncFleet
from starpod.remote.game import Impossible
from starpod.trainer.data.episode import Episode
from starpod.ui import episodes
from tests.support import ServerProcess
from tests.tools.ui.conftest import site_over
from tests.tools.ui.test_games import EPISODE, FATAL, live, lost, write_lake
from tests.trainer.turns import a_turn

__all__ = ["live", "lost"]  # fixtures


def asked(text: str) -> list[str]:
    return re.findall(r'<img src="/picture\?[^"]*turn=(\d+)"', text)


def test_a_page_asks_for_each_picture_small_and_large(live: httpx.Client) -> None:
    text = live.get(EPISODE).text
    assert asked(text) == [str(turn) for turn in range(FATAL + 2)] * 2  # the strip, then each turn and the end
    links = list(dict.fromkeys(html.unescape(link) for link in re.findall(r'<img src="([^"]+)"', text)))
    frames = [live.get(link).content for link in links]
    assert len(set(frames)) == FATAL + 2 and all(frame.startswith(b"\x89PNG") for frame in frames)
    assert live.get(links[-1].replace(f"turn={FATAL + 1}", "turn=9")).status_code == 404
    (size,) = set(re.findall(r'alt="The state[^>]*width="(\d+)" height="(\d+)"', text))
    assert max(map(int, size)) <= 260


def test_what_the_server_cannot_draw_is_not_asked_for(
    server: ServerProcess, lost: tuple[Path, Episode], tmp_path: Path
) -> None:
    """The environment has no pictures, or the server cannot replay the episode. The same applies to groups."""
    folder = write_lake(tmp_path / "mixed")
    with SyncFleet(server.address) as fleet:
        (session,) = fleet.open("countdown-v1", seed=3)
        words = Episode.begin(session.session, 0)
        words.turns = [a_turn(observation=session.observation.text, actions=["1"], text="1")]
    other = Episode.from_json(lost[1].to_json())
    other.group, other.turns[0].observation = 1, "another lake"
    folder.episodes.write_rollouts(1, [words, other], max_bytes=2**20)
    with site_over(tmp_path, "--address", server.address, page="/episodes?run=mixed", shown="2 episodes") as http:
        for group in (0, 1):
            place = f"run=mixed&file=train-000001.jsonl.gz&group={group}"
            for page in (f"/episode?{place}&member=0", f"/group?{place}"):
                reply = http.get(page)
                assert reply.status_code == 200 and asked(reply.text) == []


async def test_a_page_does_not_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page then requests pictures without knowing whether they exist."""
    waiting = asyncio.Event()

    async def picture(site: object, request: Request) -> None:
        assert request.query_params["turn"] == "0" and request.query_params["run"] == "lake"
        await waiting.wait()
        raise Impossible

    monkeypatch.setattr(episodes, "picture", picture)
    monkeypatch.setattr(episodes, "PATIENCE", 0.01)
    page = episodes.with_pictures(lambda site, request, drawn: cast(Any, drawn))
    request = Request({"type": "http", "query_string": b"run=lake&turn=7", "headers": []})
    assert await page(cast(Any, None), request) == b""
    waiting.set()
    monkeypatch.setattr(episodes, "PATIENCE", 60.0)
    assert await page(cast(Any, None), request) is None
