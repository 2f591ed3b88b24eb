"""Frames of episodes, drawn again over the wire."""

from dataclasses import replace
from typing import Any

import pytest

from starpod.client import Fleet
from starpod.client.errors import Unreachable
from starpod.trainer.agents.scripted import ReferenceAgents
from starpod.trainer.data.episode import Episode
from starpod.trainer.rollout.collect import Collector, starts_from
from starpod.trainer.rollout.frames import draw_episodes
from tests.trainer.lake import TASK

PNG = b"\x89PNG"


async def test_frames_are_drawn_before_each_turn_and_at_the_end(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes that cannot be replayed are left out, and the total size of pictures is limited."""
    collector = Collector(fleet=fleet, agents=ReferenceAgents("random"), task=TASK)
    episodes = (await collector.collect(starts_from(range(3)), 1)).episodes
    players = {"": (fleet, TASK)}
    drawn = await draw_episodes(players, enumerate(episodes))
    assert {place: len(frames) for place, frames in drawn.items()} == {
        place: len(episode.turns) + 1 for place, episode in enumerate(episodes)
    }
    assert all(frame.startswith(PNG) for frames in drawn.values() for frame in frames)
    assert all(len(set(frames)) > 1 for frames in drawn.values())

    first, second, third = episodes
    first.turns[0].observation = "another lake"
    second.task = "elsewhere"
    lost = Episode(9, 0, "frozen_lake-v1", turns=third.turns, end="failed")
    old = replace(third, version="0.9.0")  # of before a server was renewed
    assert await draw_episodes(players, enumerate([first, second, lost, old, third])) == {4: drawn[2]}
    # Pictures that are there already cost nothing.
    size = sum(map(len, set(drawn[2])))
    assert list(await draw_episodes(players, enumerate([third, third]), max_bytes=size)) == [0, 1]
    assert await draw_episodes(players, enumerate([third]), max_bytes=size - 1) == {}

    async def gone(*_: Any, **__: Any) -> None:
        raise Unreachable("gone")

    monkeypatch.setattr(Fleet, "open", gone)
    assert await draw_episodes(players, enumerate([third])) == {}
