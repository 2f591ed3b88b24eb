"""Snapshots over the wire: episodes on boards of one's own, and options that ask which of them were given."""

import random
from dataclasses import replace

import pytest
from pydantic import Field, model_validator

from starpod.client import Fleet
from starpod.env_server import Concurrency, Environment, EnvironmentOptions, EnvironmentSpec, Outcome
from starpod.env_server.config import ServerConfig
from starpod.env_server.registry import Registry
from starpod.env_server.server import EnvironmentServer


class Track(Environment):
    """Its options refuse a length beside a drawing, as soon as one is given."""

    spec = EnvironmentSpec(id="track-v1", version="1.0.0", title="A track", actions=("go",))

    class Options(EnvironmentOptions):
        length: int = Field(default=6, description="Steps to the end.")
        drawing: str = Field(default="", description="The track instead of a length.")

        @model_validator(mode="after")
        def _one_of_both(self) -> "Track.Options":
            if {"length", "drawing"} <= self.model_fields_set:
                raise ValueError("length and drawing say the same: leave one out")
            return self

    def reset(self, rng: random.Random) -> None:
        self.left = len(self.options.drawing) or self.options.length

    def step(self, action: str) -> Outcome:
        self.left -= 1
        return Outcome(terminated=not self.left)

    def render(self, mode: str = "text") -> str:
        return f"{self.left} left"


class GuardedTrack(Track):
    """The same in a process of its own."""

    spec = replace(Track.spec, id="guarded-track-v1", concurrency=Concurrency.PROCESS)


@pytest.mark.parametrize("name", ["track-v1", "guarded-track-v1"])
async def test_a_snapshot_tells_given_options_from_defaults(name: str) -> None:
    server = EnvironmentServer(Registry([Track, GuardedTrack]), ServerConfig(port=0))
    await server.start()
    try:
        async with Fleet(server.address) as fleet:
            (session,) = await fleet.open(name, seed=1, options={"drawing": "----"})
            restored = await fleet.restore(await session.snapshot())
            assert restored.observation.text == session.observation.text == "4 left"
            assert (await restored.step("go")).observation.text == "3 left"
    finally:
        await server.stop(0)
