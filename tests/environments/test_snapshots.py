"""Snapshots over the wire: episodes on boards of one's own, and options that ask which of them were given."""

import random
from typing import Any

import grpc
import pytest
from pydantic import Field, model_validator

from starpod.env_server import Concurrency, Environment, EnvironmentOptions, EnvironmentSpec, Outcome
from starpod.env_server.config import ServerConfig
from starpod.env_server.episode import Episode
from starpod.env_server.registry import Registry
from starpod.env_server.server import EnvironmentServer
from starpod.env_server.state import decode, encode
from starpod.environments.sokoban import Sokoban
from starpod.environments.sudoku import Sudoku
from starpod.v1 import environment_pb2 as pb
from starpod.v1.environment_pb2_grpc import EnvironmentServiceStub
from tests.environments.episodes import CASES, Case, start_case


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

    spec = EnvironmentSpec(
        id="guarded-track-v1",
        version="1.0.0",
        title="A track",
        actions=("go",),
        concurrency=Concurrency.PROCESS,
    )


BOARDS: list[tuple[type[Environment], dict[str, Any], str]] = [
    (Sokoban, {"layout": "#####\n#PXO#\n#####"}, "Right"),
    (Sokoban, {"layout": ["#######", "#P____#", "#_XX__#", "#_OO__#", "#######"], "boxes": 2}, "Right"),
    (Sudoku, {"puzzle": "2.1. .1.. ..24 4.3."}, "1,2,3"),
    (Track, {"drawing": "----"}, "go"),
    (GuardedTrack, {"drawing": "----"}, "go"),
]


@pytest.mark.parametrize(("kind", "options", "action"), BOARDS)
async def test_a_board_of_ones_own_comes_back(kind: type[Environment], options: dict[str, Any], action: str) -> None:
    server = EnvironmentServer(Registry([kind]), ServerConfig(port=0))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = EnvironmentServiceStub(channel)
            opening = pb.OpenRequest(environment_id=kind.spec.id, seed=1)
            opening.options.update(options)
            session = (await stub.Open(opening)).sessions[0]
            taken = await stub.Snapshot(pb.SnapshotRequest(session_id=session.session_id))
            restored = (await stub.Restore(pb.RestoreRequest(snapshot=taken.snapshot))).sessions[0]
            assert restored.observation == session.observation
            steps = [
                pb.StepRequest(session_id=each.session_id, epoch=1, actions=[pb.Action(text=action)])
                for each in (session, restored)
            ]
            original, copy = [(await stub.Step(step)).transition for step in steps]
            assert copy == original
            assert original.outcomes[0].effective
    finally:
        await server.stop(0)


@pytest.mark.parametrize("case", CASES)
def test_a_snapshot_that_holds_every_option_is_restored(case: Case) -> None:
    """As written by servers that did not tell options that were given from defaults."""
    original = start_case(case, 1, 2)
    saved = decode(original.save())
    saved["options"] = original.environment.options.model_dump(mode="json")
    restored = Episode.load(case[0], encode(saved))
    assert restored.environment.observe() == original.environment.observe()
    assert restored.environment.state_key() == original.environment.state_key()
